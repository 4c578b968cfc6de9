from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core import checks, mail
from django.core.management import get_commands, load_command_class
from django.db import connections

from django_jobs import Retry, job, registry
from django_jobs.checks import check_character_set
from django_jobs.conf import get_settings
from django_jobs.dispatchers.dummy import DummyDispatcher
from django_jobs.models import JobExecution, jobs_alias


def found() -> dict[str, list[checks.CheckMessage]]:
    """What `manage.py check --tag django_jobs` says, by id."""
    messages: dict[str, list[checks.CheckMessage]] = {}
    for message in checks.run_checks(tags=["django_jobs"]):
        messages.setdefault(str(message.id), []).append(message)
    return messages


@pytest.fixture(autouse=True)
def no_jobs() -> Iterator[None]:
    with registry.isolated(empty=True):
        yield


def not_callable() -> None: ...


middleware_value = 3


@pytest.mark.sqlite
@pytest.mark.postgres
@pytest.mark.mysql
def test_good_settings_and_jobs_bring_no_message(settings: Any) -> None:
    settings.DJANGO_JOBS = {"QUEUES": ["default"], "MIDDLEWARE": ["tests.test_checks.not_callable", not_callable]}
    job(name="shop.plain", retry=Retry(2))(not_callable)

    assert found() == {}


@pytest.mark.parametrize(("name", "warned"), [("DJANGO_JOB", True), ("DJANGOJOBS", True), ("DJANGO_TASKS", False)])
def test_a_misspelt_name_of_the_settings_is_told(settings: Any, name: str, warned: bool) -> None:
    setattr(settings, name, {"CONCURRENCY": 3})
    assert found() == {}
    del settings.DJANGO_JOBS
    messages = found().get("django_jobs.W011", [])
    assert [f"There is a setting {name}," in message.msg for message in messages] == [True] * warned


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        ([], "expected a dict"),
        ({"CONCURENCY": 3}, "did you mean CONCURRENCY"),
        ({"TIMEOUT": "60"}, "TIMEOUT is '60'"),
        ({"HEARTBEAT_INTERVAL": 0}, "HEARTBEAT_INTERVAL is 0"),
        ({"DRAIN_TIMEOUT": -1}, "DRAIN_TIMEOUT is -1"),
        ({"DEFAULT_RETRY": "3"}, "DEFAULT_RETRY is '3'"),
        ({"WORKER_LOST_AFTER": 15}, "expected at least twice"),
        ({"KEEP": {"ko": 1}}, "expected ok, error, cancelled, max_age"),
    ],
)
def test_a_bad_setting_is_an_error_that_names_it_and_the_mend(settings: Any, raw: Any, named: str) -> None:
    settings.DJANGO_JOBS = raw

    messages = found()

    assert list(messages) == ["django_jobs.E001"]
    [message] = messages["django_jobs.E001"]
    assert message.level == checks.ERROR
    assert named in message.msg
    assert message.hint


def test_each_bad_setting_is_an_error_of_its_own(settings: Any) -> None:
    settings.DJANGO_JOBS = {"CONCURRENCY": 0, "POLL_INTERVAL": None, "NONSENSE": 1}

    assert len(found()["django_jobs.E001"]) == 3


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("nowhere.at_all", "ModuleNotFoundError"),
        ("tests.test_checks.missing", "ImportError"),
        ("plain", "ImportError"),
        ("tests.admin.explosive.middleware", "RuntimeError: imported"),
        ("tests.test_checks.middleware_value", "not callable"),
    ],
)
def test_middleware_that_cannot_be_used_is_an_error(settings: Any, path: str, fault: str) -> None:
    settings.DJANGO_JOBS = {"MIDDLEWARE": [path]}

    [message] = found()["django_jobs.E002"]

    assert repr(path) in message.msg
    assert fault in message.msg


def test_middleware_of_one_job_is_checked_too() -> None:
    job(name="shop.wrapped", use=["nowhere.at_all"])(not_callable)

    [message] = found()["django_jobs.E002"]

    assert message.msg.startswith("The job shop.wrapped: ")


@pytest.mark.parametrize("path", ["nowhere.Dispatcher", "tests.test_checks.not_callable", "django_jobs.models.Worker"])
def test_a_dispatcher_that_cannot_be_used_is_an_error(settings: Any, path: str) -> None:
    settings.DJANGO_JOBS = {"DISPATCHER": path}

    [message] = found()["django_jobs.E003"]

    assert repr(path) in message.msg


class Picky(DummyDispatcher):
    def __init__(self, options: dict[str, Any]) -> None:
        raise KeyError("URL")


def test_a_dispatcher_that_fails_with_its_options_is_not_said_to_fail_at_its_import(settings: Any) -> None:
    settings.DJANGO_JOBS = {"DISPATCHER": "tests.test_checks.Picky"}

    [message] = found()["django_jobs.E003"]

    assert "giving it its options raises KeyError" in message.msg
    assert message.hint == "Correct its OPTIONS."


@pytest.mark.parametrize("key", ["SWEEP_CRON", "TRIM_CRON"])
def test_a_wrong_cron_expression_in_the_settings_is_an_error(settings: Any, key: str) -> None:
    settings.DJANGO_JOBS = {key: "61 * * * *"}

    [message] = found()["django_jobs.E004"]

    assert message.msg.startswith(f"DJANGO_JOBS: {key} is '61 * * * *'")


def test_a_default_retry_of_another_type_is_an_error(settings: Any) -> None:
    settings.DJANGO_JOBS = {"DEFAULT_RETRY": [3]}

    assert list(found()) == ["django_jobs.E005"]


@pytest.mark.sqlite
def test_atomic_jobs_on_sqlite_are_warned_about() -> None:
    job(name="shop.exact", atomic=True)(not_callable)

    [message] = found()["django_jobs.W001"]

    assert "shop.exact" in message.msg


@pytest.mark.postgres
@pytest.mark.mysql
def test_atomic_jobs_on_a_server_need_no_warning() -> None:
    job(name="shop.exact", atomic=True)(not_callable)

    assert found() == {}


class ToOther:
    def db_for_write(self, model: Any, **hints: Any) -> str:
        return "other"


def test_executions_outside_the_default_database_are_warned_about(settings: Any) -> None:
    settings.DATABASE_ROUTERS = [ToOther()]

    [message] = found()["django_jobs.W002"]

    assert "'other'" in message.msg
    assert "at most once" in message.msg


@pytest.mark.parametrize(("cron", "is_warned"), [("* * * * * 0", True), ("0 3 * * *", False)])
def test_a_cron_expression_of_six_fields_is_warned_about(cron: str, is_warned: bool) -> None:
    job(name="shop.tick", cron=cron)(not_callable)

    assert ("django_jobs.W003" in found()) is is_warned


def test_a_job_whose_queue_is_not_served_is_warned_about(settings: Any) -> None:
    settings.DJANGO_JOBS = {"QUEUES": ["default"]}
    job(name="shop.mail", queue="mail")(not_callable)

    [message] = found()["django_jobs.W005"]

    assert "shop.mail" in message.msg
    assert "--queues mail" in str(message.hint)


def test_a_queue_that_is_not_served_is_told_once_for_all_its_jobs(settings: Any) -> None:
    settings.DJANGO_JOBS = {"QUEUES": ["default"]}
    job(name="shop.mail", queue="mail")(not_callable)
    job(name="shop.news", queue="mail")(not_callable)

    [message] = found()["django_jobs.W005"]

    assert "shop.mail, shop.news" in message.msg


@pytest.fixture
def rival(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: Any) -> Iterator[Callable[[bool], None]]:
    """Install another app that has a runjobs command, before or behind ours."""
    package = tmp_path / "django_extensions" / "management" / "commands"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "runjobs.py").write_text("from django.core.management import BaseCommand as Command\n")
    monkeypatch.syspath_prepend(tmp_path)

    def install(*, first: bool) -> None:
        apps = settings.INSTALLED_APPS
        settings.INSTALLED_APPS = ["django_extensions", *apps] if first else [*apps, "django_extensions"]
        get_commands.cache_clear()

    yield install
    get_commands.cache_clear()
    for name in [name for name in sys.modules if name.startswith("django_extensions")]:
        del sys.modules[name]


def test_the_runjobs_of_another_app_that_comes_first_is_warned_about(rival: Any) -> None:
    rival(first=True)

    [message] = found()["django_jobs.W004"]

    assert "django_extensions" in message.msg
    assert "before 'django_extensions'" in str(message.hint)


def test_the_runjobs_of_another_app_behind_ours_is_no_matter(rival: Any) -> None:
    rival(first=False)

    assert found() == {}
    assert get_commands()["runjobs"] == "django_jobs"
    assert load_command_class("django_jobs", "runjobs")


@pytest.mark.mysql
@pytest.mark.django_db(transaction=True)
def test_a_table_that_cannot_hold_every_character_is_warned_about() -> None:
    alias, table = jobs_alias(), JobExecution._meta.db_table
    assert check_character_set(None, databases=[alias]) == []
    with connections[alias].cursor() as cursor:
        cursor.execute(f"ALTER TABLE {table} DEFAULT CHARACTER SET latin1")
        try:
            [message] = check_character_set(None, databases=[alias])
        finally:
            cursor.execute(f"ALTER TABLE {table} DEFAULT CHARACTER SET utf8mb4")

    assert message.id == "django_jobs.W006"


@pytest.mark.django_db
def test_tables_are_looked_at_only_when_databases_are_checked() -> None:
    assert check_character_set(None) == []
    assert check_character_set(None, databases=[jobs_alias()]) == []


def test_every_message_is_one_sentence_with_a_hint_and_an_id(settings: Any) -> None:
    settings.DJANGO_JOBS = {"QUEUES": ["other"], "MIDDLEWARE": ["x"], "DISPATCHER": "a.b", "SWEEP_CRON": "x"}
    settings.DATABASE_ROUTERS = [ToOther()]
    job(name="shop.tick", cron="* * * * * 0")(not_callable)

    messages = [message for group in found().values() for message in group]

    assert len(messages) == 6
    for message in messages:
        assert message.msg.endswith(".")
        assert message.hint


@pytest.mark.parametrize(
    ("secret", "fault"),
    [
        ("short", "fewer than 16 characters"),
        ("s\u00e9same-ouvre-toi-maintenant", "cannot send in a header"),
        ("open sesame, if you please\n", "whitespace"),
    ],
)
def test_a_cron_secret_that_protects_badly_is_warned_about_and_not_shown(
    settings: Any, secret: str, fault: str
) -> None:
    settings.DJANGO_JOBS = {"CRON_SECRET": secret}
    messages = found()["django_jobs.W008"]
    assert any(fault in message.msg for message in messages)
    assert all(secret.strip() not in f"{message} {message.hint}" for message in messages)


@pytest.mark.parametrize(
    ("name", "debug", "warned"),
    [("immediate", False, 1), ("dummy", False, 1), ("immediate", True, 0), ("direct", False, 0)],
)
def test_a_dispatcher_for_tests_is_told_of_where_people_wait(
    settings: Any, monkeypatch: pytest.MonkeyPatch, name: str, debug: bool, warned: int
) -> None:
    settings.DJANGO_JOBS, settings.DEBUG = {"DISPATCHER": name}, debug
    assert found() == {}, "a test run has DEBUG off as well"
    monkeypatch.delattr(mail, "outbox")
    assert len(found().get("django_jobs.W009", [])) == warned


@pytest.mark.parametrize("secret", [b"sesame", 8675309, "  "])
def test_a_cron_secret_that_is_none_is_refused_without_showing_it(settings: Any, secret: Any) -> None:
    """Monitoring output contains passwords. Source: rq/django-rq, unreleased changelog of 2026."""
    settings.DJANGO_JOBS = {"CRON_SECRET": secret}
    [message] = found()["django_jobs.E001"]
    assert "CRON_SECRET" in message.msg
    assert "sesame" not in message.msg
    assert "8675309" not in message.msg


def test_a_good_cron_secret_brings_no_message_and_is_not_in_the_settings_text(settings: Any) -> None:
    settings.DJANGO_JOBS = {"CRON_SECRET": "Aex3ooPhieyoh8quai1e"}
    assert found() == {}
    assert "Aex3oo" not in repr(get_settings())
