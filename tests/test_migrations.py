"""The first migration: on another database than the default, backwards and forwards, and what its tables refuse."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.core.management import call_command
from django.db import IntegrityError, NotSupportedError, connection, connections, transaction
from django.db.migrations.executor import MigrationExecutor
from django.test.utils import CaptureQueriesContext

from django_jobs import clock, transitions
from django_jobs.migrations._operations import RefuseCompactRows
from django_jobs.models import JobExecution, JobStat, JobState, QueueState, Worker
from django_jobs.states import Status
from tests.factories import JobExecutionFactory, WorkerFactory
from tests.verbs import claim, finish, stored

TABLES = {model._meta.db_table for model in (JobExecution, JobState, QueueState, Worker, JobStat)}
INDEXES = {"claim", "due", "owner", "retention", "list", "key", "fingerprint", "active_key"}


def tables(alias: str) -> set[str]:
    return TABLES & set(connections[alias].introspection.table_names())


def indexes(alias: str) -> set[str]:
    with connections[alias].cursor() as cursor:
        found = connections[alias].introspection.get_constraints(cursor, JobExecution._meta.db_table)
    return {name for name, about in found.items() if about["index"] or about["unique"]}


def migrate(alias: str, *target: str) -> None:
    call_command("migrate", "django_jobs", *target, database=alias, verbosity=0)


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
@pytest.mark.medium
def test_it_goes_backwards_and_forwards_on_another_database_and_leaves_the_default_alone() -> None:
    """A migration uses the default connection though it runs with --database=other. (django-tasks-db#16)"""
    for _ in range(20):
        JobExecution.objects.using("other").create(job_name="acc.mark", status=Status.PENDING, **times())
    with CaptureQueriesContext(connections["default"]) as asked:
        migrate("other", "zero")
        assert tables("other") == set()
        migrate("other")
    assert [query["sql"] for query in asked] == []
    assert tables("other") == TABLES
    assert indexes("other") >= {f"django_jobs_{name}" for name in INDEXES - {"active_key"}}
    assert JobExecution.objects.using("other").count() == 0


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
@pytest.mark.medium
def test_another_database_can_be_migrated_while_the_default_has_no_tables() -> None:
    """On a default that was never migrated a migration hangs, or fails on a missing table."""
    migrate("default", "zero")
    migrate("other", "zero")
    try:
        migrate("other")
        assert (tables("default"), tables("other")) == (set(), TABLES)
    finally:
        migrate("other")
        migrate("default")
    assert tables("default") == TABLES
    assert indexes("default") >= {f"django_jobs_{name}" for name in INDEXES - {"active_key"}}


@pytest.mark.medium
@pytest.mark.django_db(transaction=True, databases=["default", "other"])
@pytest.mark.parametrize("backwards", [False, True])
def test_the_sql_of_the_migration_can_be_shown(backwards: bool) -> None:
    shown = io.StringIO()
    with CaptureQueriesContext(connections["default"]) as asked:
        call_command("sqlmigrate", "django_jobs", "0001", database="other", backwards=backwards, stdout=shown)
    assert [query["sql"] for query in asked] == []
    text = shown.getvalue()
    assert ("DROP TABLE" if backwards else "CREATE TABLE") in text
    assert "django_jobs_claim" in text


@pytest.mark.django_db(transaction=True)
def test_the_sql_for_this_engine_names_every_index() -> None:
    shown = io.StringIO()
    call_command("sqlmigrate", "django_jobs", "0001", stdout=shown)
    assert {name for name in INDEXES if f"django_jobs_{name}" in shown.getvalue()} == INDEXES
    assert ("utf8mb4_bin" in shown.getvalue()) == (connection.vendor == "mysql")


class Nowhere:
    """A router that keeps these tables off a database."""

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool | None:
        return False if app_label == "django_jobs" else None


@pytest.mark.medium
@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_a_router_can_keep_the_tables_off_a_database(settings: Any) -> None:
    migrate("other", "zero")
    settings.DATABASE_ROUTERS = [Nowhere()]
    try:
        migrate("other")
        assert tables("other") == set()
    finally:
        migrate("other", "zero")
        settings.DATABASE_ROUTERS = []
        migrate("other")
    assert tables("other") == TABLES


@pytest.mark.django_db
@pytest.mark.postgres
@pytest.mark.sqlite
def test_indexes_on_live_rows_hold_live_rows_only() -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT indexdef FROM pg_indexes WHERE indexname = 'django_jobs_claim'"
            if connection.vendor == "postgresql"
            else "SELECT sql FROM sqlite_master WHERE name = 'django_jobs_claim'"
        )
        assert " WHERE " in cursor.fetchone()[0]


# What the tables refuse


def times() -> dict[str, Any]:
    return dict.fromkeys(("scheduled_at", "created_at", "updated_at", "hinted_at"), clock.now("default"))


@pytest.mark.django_db
@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param({"status": Status.OK}, id="finished without a time"),
        pytest.param({"status": Status.ERROR}, id="failed without a time"),
        pytest.param({"status": Status.CANCELLED}, id="cancelled without a time"),
        pytest.param({"status": Status.PENDING, "completed_at": "now"}, id="pending and completed"),
        pytest.param({"status": Status.RUNNING, "completed_at": "now"}, id="running and completed"),
        pytest.param({"status": Status.SCHEDULED, "completed_at": "now"}, id="scheduled and completed"),
        pytest.param({"status": Status.OK, "completed_at": "now", "active_key": "k"}, id="finished and holds its key"),
        pytest.param({"status": Status.PENDING, "rank": 101}, id="priority too low"),
        pytest.param({"status": Status.PENDING, "rank": -101}, id="priority too high"),
        pytest.param({"status": Status.RUNNING, "attempt": -1}, id="a negative attempt"),
    ],
)
def test_an_illegal_row_is_refused_by_the_database(wrong: dict[str, Any]) -> None:
    fields = {name: clock.now("default") if value == "now" else value for name, value in wrong.items()}
    # InnoDB says "out of range" as an error of data.
    with pytest.raises(Exception, match=r"(?i)check|constraint|out of range") as caught, transaction.atomic():
        JobExecution.objects.create(job_name="acc.mark", **times(), **fields)
    assert type(caught.value).__module__.startswith("django.db")
    assert not JobExecution.objects.exists()


@pytest.mark.django_db
@pytest.mark.parametrize("rank", [-100, 100])
def test_the_ends_of_the_scale_of_priorities_are_legal(rank: int) -> None:
    JobExecution.objects.create(job_name="acc.mark", status=Status.PENDING, rank=rank, **times())


@pytest.mark.django_db
def test_one_key_has_one_live_row_for_each_job() -> None:
    for _ in range(2):
        JobExecution.objects.create(job_name="acc.mark", status=Status.PENDING, active_key=None, **times())
    JobExecution.objects.create(job_name="acc.mark", status=Status.PENDING, active_key="k", **times())
    JobExecution.objects.create(job_name="acc.slow", status=Status.PENDING, active_key="k", **times())
    with pytest.raises(IntegrityError), transaction.atomic():
        JobExecution.objects.create(job_name="acc.mark", status=Status.RUNNING, active_key="k", **times())


# Every character, exactly


def stores_every_character() -> None:
    """Take a row with four-byte characters everywhere through its life."""
    now = clock.now("default")
    row = JobExecutionFactory.build(
        now=now, key="💥", payload={"tag": "𝕏💥"}, triggered_by_name="Ada 💥", organization_id="💥"
    )
    transitions.insert([row], now=now, using="default")
    (run,) = claim(WorkerFactory(now=now), now)
    assert run.payload == {"tag": "𝕏💥"}
    entry = {"message": "💥"}
    finish(
        transitions.fail(run, error="ValueError: 💥", entry=entry, logs=[["💥 a line"]], progress={"n": "💥"}), now=now
    )
    found = stored(row)
    assert (found["key"], found["triggered_by_name"], found["organization_id"]) == ("💥", "Ada 💥", "💥")
    assert (found["error"], found["errors"], found["logs"]) == ("ValueError: 💥", [entry], [["💥 a line"]])
    assert (found["payload"], found["progress"], found["status"]) == ({"tag": "𝕏💥"}, {"n": "💥"}, "error")


def keeps_keys_apart() -> None:
    now = clock.now("default")
    keys = ["é", "e\u0301", "E", "e", "É", "e ", "ｅ"]
    for key in keys:
        transitions.insert([JobExecutionFactory.build(now=now, key=key)], now=now, using="default")
    assert [JobExecution.objects.with_key(None, key).get().key for key in keys] == keys
    # Names are as exact as keys are.
    assert claim(WorkerFactory(now=now), now, names=["ACC.MARK", "acc.márk"]) == []


@pytest.mark.django_db
def test_every_character_is_stored_and_read_back() -> None:
    stores_every_character()


@pytest.mark.django_db
def test_keys_that_look_alike_are_different_keys() -> None:
    keeps_keys_apart()


@contextmanager
def migrated_database(name: str, charset: str) -> Iterator[None]:
    """Point the default connection at a new database of the character set, migrated for this app."""
    settings = connection.settings_dict
    own = settings["NAME"]
    connection.close()
    with connection._nodb_cursor() as cursor:
        cursor.execute(f"DROP DATABASE IF EXISTS {name}")
        cursor.execute(f"CREATE DATABASE {name} CHARACTER SET {charset}")
    settings["NAME"] = name
    try:
        MigrationExecutor(connection).migrate([("django_jobs", "0001_initial")])
        yield
    finally:
        connection.close()
        settings["NAME"] = own
        with connection._nodb_cursor() as cursor:
            cursor.execute(f"DROP DATABASE {name}")


@pytest.mark.django_db(transaction=True)
@pytest.mark.mysql
def test_a_database_of_three_byte_characters_stores_every_character_too() -> None:
    """A four-byte character raises on a table of MySQL's utf8(3), and all progress stops. (meeb/tubesync#263)"""
    with migrated_database(f"{connection.settings_dict['NAME']}_utf8mb3", "utf8mb3"):
        stores_every_character()
        JobExecution.objects.all().delete()
        keeps_keys_apart()


class Editor:
    """As much of a schema editor as the operation asks for, on a server with the given row format."""

    collect_sql = False

    def __init__(self, row_format: str) -> None:
        self.row_format = row_format
        self.connection = self

    vendor, alias = "mysql", "default"

    def cursor(self) -> Editor:
        return self

    def __enter__(self) -> Editor:
        return self

    def __exit__(self, *args: object) -> None: ...

    def execute(self, sql: str) -> None:
        assert sql == "SELECT @@innodb_default_row_format"

    def fetchone(self) -> tuple[str]:
        return (self.row_format,)


@pytest.mark.parametrize("row_format", ["compact", "REDUNDANT"])
def test_row_formats_with_short_indexes_are_refused_with_the_mend(row_format: str) -> None:
    """Indexed columns exceed the index size of older row formats, and migrate fails half way.

    Source: celery/django-celery-results PR#287.
    """
    with pytest.raises(NotSupportedError) as caught:
        RefuseCompactRows().database_forwards("django_jobs", Editor(row_format), None, None)
    assert row_format.upper() in str(caught.value)
    assert "SET GLOBAL innodb_default_row_format = DYNAMIC" in str(caught.value)


def test_dynamic_rows_are_welcome() -> None:
    RefuseCompactRows().database_forwards("django_jobs", Editor("dynamic"), None, None)


def test_the_row_format_of_a_database_without_these_tables_is_nobodys_business(settings: Any) -> None:
    settings.DATABASE_ROUTERS = [Nowhere()]
    RefuseCompactRows().database_forwards("django_jobs", Editor("compact"), None, None)


@pytest.mark.django_db(transaction=True)
@pytest.mark.mysql
def test_the_real_server_answers_the_question_about_its_row_format() -> None:
    with connection.schema_editor() as editor:
        RefuseCompactRows().database_forwards("django_jobs", editor, None, None)
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT row_format FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = %s",
            [JobExecution._meta.db_table],
        )
        assert cursor.fetchone()[0].lower() == "dynamic"
