"""The README and the docs say what the code does: blocks run, tables match the code, promises name their tests."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import inspect
import itertools
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from django.test import override_settings

import django_jobs
from django_jobs import JobContext, job, registry
from django_jobs.conf import DEFAULTS, get_settings
from django_jobs.execution.outcomes import Ok
from django_jobs.models import JobExecution
from django_jobs.options import JobOptions
from django_jobs.runtime.options import Options
from django_jobs.runtime.welcome import welcome
from django_jobs.states import Status
from tests.execution.runs import outcome_of
from tests.moves import is_legal
from tests.support import ROOT

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block; `mark` is the HTML comment right above it."""

    page: str
    line: int
    mark: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def python_blocks() -> Iterator[Block]:
    for path in PAGES:
        text = path.read_text()
        for found in re.finditer(r"(?:<!-- (.+?) -->\n)?^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            yield Block(
                page=str(path.relative_to(ROOT)),
                line=text.count("\n", 0, found.start(2)) + 1,
                mark=found[1] or "",
                code=found[2],
            )


BLOCKS = list(python_blocks())
RUNNABLE = [block for block in BLOCKS if block.mark == "run"]


def rows(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the first table below the heading of a page."""
    _, _, text = f"\n{(ROOT / page).read_text()}".partition(f"\n{heading}\n")
    assert text, f"{page} has no heading {heading!r}"
    lines = itertools.dropwhile(lambda line: not line.startswith("|"), text.splitlines())
    table = list(itertools.takewhile(lambda line: line.startswith("|"), lines))[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))] for line in table]


def code_in(cell: str) -> str:
    """Return what stands between the cell's first backticks."""
    return cell.split("`")[1]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_python_block_compiles(block: Block) -> None:
    compile(block.code, str(block), "exec")


def test_no_page_marks_a_block_with_a_word_nobody_reads() -> None:
    assert {block.mark for block in BLOCKS if not block.mark.startswith("file: ")} <= {"", "run"}


@pytest.mark.django_db
@pytest.mark.parametrize("block", RUNNABLE, ids=str)
def test_every_block_marked_as_runnable_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A module of an installed app, so that its jobs get the names they would have there.
    name = "tests.acc.page"
    path = tmp_path / "page.py"
    path.write_text(f"from __future__ import annotations\n{block.code}")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    with registry.isolated():
        spec.loader.exec_module(module)


@pytest.mark.subprocess
def test_the_code_of_the_readme_works_in_a_new_project(tmp_path: Path) -> None:
    files = {block.mark.removeprefix("file: "): block for block in BLOCKS if block.mark.startswith("file: ")}
    assert set(files) == {"shop/jobs.py", "shop/views.py"}
    (tmp_path / "settings.py").write_text(
        textwrap.dedent("""
            SECRET_KEY = "x"
            INSTALLED_APPS = ["django_jobs", "shop"]
            DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "db.sqlite3"}}
            DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
            EMAIL_BACKEND = "django.core.mail.backends.filebased.EmailBackend"
            EMAIL_FILE_PATH = "mail"
            USE_TZ = True
        """)
    )
    shop = tmp_path / "shop"
    shop.mkdir()
    (shop / "__init__.py").touch()
    (shop / "models.py").write_text(
        "from django.db import models\n\n\nclass Order(models.Model):\n    email = models.EmailField()\n"
    )
    for name, block in files.items():
        (tmp_path / name).write_text(block.code)
    (tmp_path / "try_it.py").write_text(
        textwrap.dedent("""
            import django
            django.setup()
            from django.test import RequestFactory
            from shop.views import buy
            buy(RequestFactory().post("/buy/", {"email": "ada@example.com"}))
        """)
    )

    def run(*arguments: str) -> str:
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("DJANGO")},
            "DJANGO_SETTINGS_MODULE": "settings",
            "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}",
        }
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    run("-m", "django", "makemigrations", "shop")
    run("-m", "django", "migrate")
    run("try_it.py")
    assert not (tmp_path / "mail").exists()
    run("-m", "django", "runjobs", "--once")
    (receipt,) = (tmp_path / "mail").iterdir()
    assert "To: ada@example.com" in receipt.read_text()


@pytest.mark.parametrize(
    ("page", "heading"), [("README.md", "## Settings"), ("docs/reference/settings.md", "# Settings")]
)
def test_the_table_of_settings_is_the_settings(page: str, heading: str) -> None:
    table = {code_in(row[0]): ast.literal_eval(code_in(row[1])) for row in rows(page, heading)}
    assert table == DEFAULTS


def test_every_setting_becomes_a_field_of_the_settings_object() -> None:
    fields = set(get_settings().__dataclass_fields__)
    for key in DEFAULTS:
        assert key.lower() in fields or any(name.startswith(f"{key.lower()}_") for name in fields), key


def test_every_setting_is_read() -> None:
    sources = [path for path in (ROOT / "django_jobs").rglob("*.py") if path.name not in {"conf.py", "checks.py"}]
    code = "\n".join(path.read_text() for path in sources)
    assert not [key for key in DEFAULTS if not re.search(rf"(?:settings|get_settings\(\)|conf)\.{key.lower()}", code)]


def test_the_table_of_job_options_is_what_job_takes() -> None:
    table = [code_in(row[0]) for row in rows("docs/reference/job-options.md", "# Job options")]
    assert sorted(table) == sorted(JobOptions.__annotations__)


def test_the_table_of_checks_is_what_can_be_found() -> None:
    table = [code_in(row[0]) for row in rows("docs/reference/checks.md", "# System checks")]
    code = "".join((ROOT / "django_jobs" / name).read_text() for name in ("checks.py", "backends.py"))
    assert table == sorted(set(re.findall(r'id="(django_jobs\.\w+)"', code)))


def test_the_table_of_push_options_is_what_using_takes() -> None:
    table = [code_in(row[0]) for row in rows("docs/reference/job-options.md", "## Options of a push")]
    assert sorted(table) == sorted(options_of(django_jobs.Job.using))


def options_of(function: object) -> set[str]:
    """Return the keyword-only parameters."""
    parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    return {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}


def test_the_table_of_signals_is_what_is_exported() -> None:
    table = [code_in(row[0]) for row in rows("docs/reference/signals.md", "# Signals")]
    assert sorted(table) == sorted(name for name in django_jobs.__all__ if name.startswith("job_"))


def test_the_table_of_exceptions_is_what_is_exported() -> None:
    table = [name for row in rows("docs/reference/exceptions.md", "# Exceptions") for name in row[0].split(", ")]
    exported = {name: getattr(django_jobs, name) for name in django_jobs.__all__}
    exceptions = [name for name, it in exported.items() if isinstance(it, type) and issubclass(it, BaseException)]
    assert sorted(table) == sorted(f"`{name}`" for name in exceptions)


def test_the_table_of_flags_is_what_runjobs_takes() -> None:
    from django.core.management import load_command_class
    from django.core.management.base import BaseCommand

    def flags(command: BaseCommand) -> set[str]:
        parser = command.create_parser("manage.py", "runjobs")
        return {option for action in parser._actions for option in action.option_strings if option.startswith("--")}

    own = flags(load_command_class("django_jobs", "runjobs")) - flags(BaseCommand())
    table = {code_in(row[0]).split()[0] for row in rows("docs/reference/runjobs.md", "## Flags")}
    assert table == own


def test_the_table_of_exit_codes_is_that_of_the_command() -> None:
    from django_jobs.management.commands import runjobs

    told = re.findall(r"^- ([\d, ]+):", runjobs.__doc__ or "", re.MULTILINE)
    table = [row[0].replace("`", "") for row in rows("docs/reference/runjobs.md", "## Exit codes")]
    assert table == told


@override_settings(DJANGO_JOBS={})
def test_the_quickstart_shows_what_runjobs_writes() -> None:
    _, _, text = (DOCS / "tutorial" / "quickstart.md").read_text().partition("$ python manage.py runjobs\n")
    with registry.isolated(empty=True):
        job(name="shop.send_receipt")(lambda: None)
        written = welcome(Options.of(), "default")

    def without_names(line: str) -> str:
        # Of version, host and process, database and wake-up.
        return re.sub(r"^django_jobs .+, pid \d+|default \(\w+\)|wake-up: .+(?=, and a)", "…", line)

    assert [without_names(line) for line in text.splitlines()[:4]] == [without_names(line) for line in written]


def test_every_promise_of_the_readme_names_a_test_that_exists() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    defined = set(re.findall(r"^\s*(?:async )?def (test_\w+)", sources, re.MULTILINE))
    promises = rows("README.md", "## What is promised")
    assert len(promises) >= 4
    for promise in promises:
        named = set(re.findall(r"`(test_\w+)`", promise[1]))
        assert named, promise
        assert named <= defined, named - defined


def anchors(path: Path) -> set[str]:
    """Return what a link may have after its hash: the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_links_of_every_page_lead_to_files_and_headings_that_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if not target.startswith("http"):
            name, _, anchor = target.partition("#")
            path = (page.parent / name) if name else page
            assert path.is_file(), target
            assert not anchor or anchor in anchors(path), target


def test_the_diagram_shows_every_legal_move_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DOCS / "_ext")
    import state_drawing

    drawn = set(re.findall(r'data-from="(\w*)" data-to="(\w+)"', state_drawing.svg()))
    legal = {
        (source.value if source else "", target.value)
        for source in (None, *Status)
        for target in Status
        if is_legal(source, target)
    }
    assert drawn == legal


def test_the_middleware_of_the_docs_tells_of_sync_and_async_handlers(caplog: pytest.LogCaptureFixture) -> None:
    (block, *_) = [block for block in BLOCKS if block.page == "docs/howto/middleware.md"]
    names: dict[str, Any] = {"__name__": "shop.middleware"}
    exec(compile(block.code, str(block), "exec"), names)

    def handler(ctx: JobContext, n: int) -> int:
        return n + 1

    async def ahandler(n: int) -> int:
        await asyncio.sleep(0.01)
        return n + 2

    caplog.set_level("INFO", "shop.middleware")
    assert outcome_of(handler, {"n": 1}, use=[names["timed"]]) == Ok(result=2)
    assert outcome_of(ahandler, {"n": 1}, use=[names["timed"]]) == Ok(result=3)
    took = [float(record.getMessage().split()[-2]) for record in caplog.records]
    assert len(took) == 2
    assert took[1] >= 0.01


def test_the_table_of_executions_names_all_that_is_public_of_a_row() -> None:
    table = rows("docs/reference/executions.md", "# Executions")
    named = {name for row in table for name in re.findall(r"`(\w+)`", row[0])}
    # How it is stored, and not what it means.
    inner = {"rank", "key_digest", "active_key", "context", "run_no", "updated_at", "hinted_at", "fingerprint"}
    fields = {field.name for field in JobExecution._meta.get_fields()}

    assert inner <= fields
    assert fields - inner <= named
    assert not [name for name in named if not hasattr(JobExecution, name)]
