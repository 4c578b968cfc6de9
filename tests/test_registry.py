from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from django.apps.registry import Apps

from django_jobs import DefinitionError, UnknownJob, job, registry


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with registry.isolated():
        yield


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Write modules, each given as "path/in/folder.py": source, that can be imported during the test."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)

    def put(files: dict[str, str]) -> Path:
        for name, source in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        return tmp_path

    yield put
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make these the installed apps, as far as the registry of jobs can see."""

    def put(*names: str) -> None:
        monkeypatch.setattr(registry, "apps", Apps(names))

    return put


def unready() -> Apps:
    apps = Apps([])
    apps.apps_ready = False
    return apps


ONE_JOB = """
    from django_jobs import job

    @job
    def work() -> None: ...
"""


def test_the_jobs_of_installed_apps_are_known_when_django_is_ready() -> None:
    assert registry.get("acc.mark").func.__module__ == "tests.acc.jobs"


def test_a_job_is_found_by_its_name_and_its_aliases() -> None:
    @job(name="shop.new", aliases=["shop.old"])
    def work() -> None: ...

    assert registry.get("shop.new") is registry.get("shop.old") is registry.find("shop.old") is work
    assert registry.names() >= {"shop.new", "shop.old"}
    assert work in registry.all_jobs()


def test_an_unknown_name_raises_with_a_suggestion() -> None:
    @job(name="shop.send_receipt")
    def work() -> None: ...

    with pytest.raises(UnknownJob, match=r"'shop.send_reciept'; did you mean 'shop.send_receipt'\?"):
        registry.get("shop.send_reciept")
    with pytest.raises(UnknownJob, match=r"jobs\.py"):
        registry.get("zzz")
    assert registry.find("zzz") is None


def test_jobs_are_listed_by_name() -> None:
    for name in ("b.x", "a.y", "a.x"):

        def work() -> None: ...

        job(name=name)(work)
    names = [known.name for known in registry.all_jobs()]
    assert names == sorted(names)


def test_an_unregistered_job_frees_its_name_and_aliases() -> None:
    @job(name="shop.a", aliases=["shop.b"])
    def work() -> None: ...

    registry.unregister("shop.a")
    registry.unregister("shop.a")
    assert registry.find("shop.a") is registry.find("shop.b") is None

    @job(name="shop.b")
    def other() -> None: ...


def test_isolation_undoes_what_was_registered() -> None:
    with registry.isolated(empty=True):
        assert registry.all_jobs() == []

        @job(name="shop.temporary")
        def work() -> None: ...

    assert registry.find("shop.temporary") is None
    assert registry.find("acc.mark") is not None


def test_two_functions_under_one_name_are_refused_naming_both() -> None:
    """Two functions with one name collapsed into one registration (celery/celery#10576, celery/celery#1317)."""

    @job(name="shop.work")
    def first() -> None: ...

    with pytest.raises(DefinitionError, match=r"'shop\.work'.*first \(.*test_registry\.py:\d+\).*second \(") as caught:

        @job(name="shop.work")
        def second() -> None: ...

    assert "give one of them another name" in str(caught.value)
    assert registry.get("shop.work") is first


def test_a_second_definition_in_one_module_is_refused() -> None:
    def make() -> Any:
        @job(name="shop.same")
        def work() -> None: ...

        return work

    make()

    def again() -> Any:
        @job(name="shop.same")
        def work() -> None: ...

        return work

    with pytest.raises(DefinitionError, match="Two jobs are called"):
        again()


def test_closures_of_one_factory_are_two_jobs() -> None:
    """The second of two closures got the first one's work (celery/celery#10576)."""

    def factory(tag: str) -> Any:
        @job(name="shop.made")
        def work() -> str:
            return tag

        return work

    factory("a")
    with pytest.raises(DefinitionError, match=r"Two jobs are called 'shop\.made'"):
        factory("b")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"name": "a.x"}, {"name": "a.y", "aliases": ["a.x"]}),
        ({"name": "a.x", "aliases": ["a.z"]}, {"name": "a.z"}),
        ({"name": "a.x", "aliases": ["a.z"]}, {"name": "a.y", "aliases": ["a.z"]}),
        ({"name": "a.x"}, {"name": "A.X"}),
        ({"name": "a.x", "aliases": ["Old"]}, {"name": "old"}),
    ],
)
def test_a_name_belongs_to_one_job_whether_alias_or_not_and_in_any_case(
    first: dict[str, Any], second: dict[str, Any]
) -> None:
    def one() -> None: ...

    def two() -> None: ...

    job(**first)(one)
    before = registry.names()
    with pytest.raises(DefinitionError, match="Two jobs are called"):
        job(**second)(two)
    assert registry.names() == before


def test_a_reloaded_module_replaces_its_jobs(write: Any) -> None:
    folder = write({"reloaded.py": ONE_JOB})
    module = importlib.import_module("reloaded")
    first = registry.get("reloaded.work")
    (folder / "reloaded.py").write_text(textwrap.dedent("# moved down a line\n" + textwrap.dedent(ONE_JOB)))
    importlib.reload(module)
    assert registry.get("reloaded.work") is module.work is not first


def test_a_module_imported_afresh_replaces_its_jobs(write: Any) -> None:
    write({"afresh.py": ONE_JOB})
    first: ModuleType = importlib.import_module("afresh")
    del sys.modules["afresh"]
    second = importlib.import_module("afresh")
    assert registry.get("afresh.work") is second.work is not first.work


def test_one_file_imported_under_two_paths_is_one_job(write: Any) -> None:
    write({"proj/__init__.py": "", "proj/app/__init__.py": "", "proj/app/twice.py": """
        from django_jobs import job

        @job(name="shop.twice")
        def work() -> None: ...
    """})  # fmt: skip
    importlib.import_module("proj.app.twice")
    sys.path.insert(0, str(Path(sys.modules["proj"].__file__ or "").parent))
    try:
        again = importlib.import_module("app.twice")
    finally:
        del sys.path[0]
    assert registry.get("shop.twice") is again.work


def test_a_reload_that_defines_one_name_twice_is_still_refused(write: Any) -> None:
    folder = write({"doubled.py": ONE_JOB})
    module = importlib.import_module("doubled")
    (folder / "doubled.py").write_text(textwrap.dedent(ONE_JOB) + "@job\ndef work() -> None: ...\n")
    with pytest.raises(DefinitionError, match="Two jobs are called"):
        importlib.reload(module)


def test_one_function_name_in_two_apps_makes_two_jobs(write: Any, install: Any) -> None:
    write({"red/__init__.py": "", "red/jobs.py": ONE_JOB, "blue/__init__.py": "", "blue/jobs.py": ONE_JOB})
    install("red", "blue")
    registry.autodiscover()
    assert registry.get("red.work") != registry.get("blue.work")


def test_an_app_without_jobs_is_passed_over_in_silence(write: Any, install: Any) -> None:
    write({"plain/__init__.py": ""})
    install("plain")
    registry.autodiscover()


def test_a_package_of_jobs_works_like_a_module(write: Any, install: Any) -> None:
    write({"big/__init__.py": "", "big/jobs/__init__.py": "from big.jobs import mail", "big/jobs/mail.py": ONE_JOB})
    install("big")
    registry.autodiscover()
    assert registry.get("big.work").func.__module__ == "big.jobs.mail"


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("import a_package_that_is_missing", ModuleNotFoundError),
        ("import broken.jobs_helper", ModuleNotFoundError),
        ("import broken.jobs.helper", ModuleNotFoundError),
        ("from broken import nothing", ImportError),
        ("def work(:", SyntaxError),
        ("raise RuntimeError('at import')", RuntimeError),
        ("from django_jobs import job\n@job(prioritty=1)\ndef work() -> None: ...", DefinitionError),
    ],
)
def test_a_broken_jobs_module_is_loud_and_named(source: str, error: Any, write: Any, install: Any) -> None:
    """Autodiscovery swallowed the ImportError inside a tasks module (celery/celery#3697, #3986, #5211)."""
    write({"broken/__init__.py": "", "broken/jobs.py": source})
    install("broken")
    with pytest.raises(error) as caught:
        registry.autodiscover()
    assert "'broken' (broken.jobs)" in " ".join(caught.value.__notes__)


def test_the_label_of_the_app_makes_the_default_name(write: Any, install: Any) -> None:
    write({
        "site_mail/__init__.py": "",
        "site_mail/apps.py": """
            from django.apps import AppConfig

            class Mail(AppConfig):
                name = "site_mail"
                label = "post"
        """,
        "site_mail/jobs.py": ONE_JOB,
    })  # fmt: skip
    install("site_mail.apps.Mail")
    registry.autodiscover()
    assert registry.get("post.work").func.__module__ == "site_mail.jobs"


def test_outside_of_any_app_the_module_makes_the_default_name(write: Any) -> None:
    write({"loose.py": ONE_JOB})
    importlib.import_module("loose")
    assert registry.find("loose.work") is not None


def test_before_the_apps_are_ready_the_package_makes_the_default_name(
    write: Any, monkeypatch: pytest.MonkeyPatch, install: Any
) -> None:
    write({"early/__init__.py": "", "early/jobs.py": ONE_JOB})
    monkeypatch.setattr(registry, "apps", unready())
    importlib.import_module("early.jobs")
    assert registry.find("early.work") is not None
    install("early")
    registry.get("early.work").resolve()


def test_an_early_name_that_the_app_contradicts_is_refused_when_apps_are_ready(
    write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write({"early/__init__.py": "", "early/deep/__init__.py": "", "early/deep/jobs.py": ONE_JOB})
    monkeypatch.setattr(registry, "apps", unready())
    importlib.import_module("early.deep.jobs")
    monkeypatch.setattr(registry, "apps", Apps(["early"]))
    with pytest.raises(DefinitionError, match=r"deep\.work was defined before .* name it early\.work"):
        registry.get("deep.work").resolve()


def test_forward_references_are_settled_when_all_modules_are_there(write: Any) -> None:
    write({"later.py": """
        from __future__ import annotations
        from dataclasses import dataclass
        from django_jobs import job

        @job
        def work(point: Point) -> None: ...

        @dataclass
        class Point:
            x: int
    """})  # fmt: skip
    importlib.import_module("later")
    known = registry.get("later.work")
    assert not known.schema.is_resolved
    registry.resolve()
    assert known.schema.dump((), {"point": {"x": "1"}}) == '{"point":{"x":1}}'


def test_a_name_that_stays_unknown_is_refused_when_all_modules_are_there() -> None:
    @job(name="shop.never")
    def work(point: Nowhere) -> None: ...  # noqa: F821

    with pytest.raises(DefinitionError, match=r"shop\.never: .*'Nowhere' is not defined"):
        registry.resolve()
