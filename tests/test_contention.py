"""Faults that pass by themselves, told from those that do not."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pymysql
import pytest
from django.db import (
    DatabaseError,
    IntegrityError,
    InterfaceError,
    OperationalError,
    ProgrammingError,
    connection,
    transaction,
)

from django_jobs import contention
from django_jobs.contention import is_connection_loss, is_contention, retried
from django_jobs.models import JobExecution
from tests.cases.routers import Replica
from tests.threads import in_thread


def wrapped(cause: Exception, kind: type[DatabaseError] = OperationalError) -> DatabaseError:
    """Return the error as Django raises it."""
    error = kind(*cause.args)
    error.__cause__ = cause
    return error


def sqlite_error(code: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("sample")
    error.sqlite_errorcode = code
    return error


def psycopg2_error(state: str) -> Exception:
    """Return an error that tells its state like those of psycopg2, which is not installed here."""
    error = Exception("sample")
    error.pgcode = state  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize(
    "cause",
    [
        psycopg.errors.SerializationFailure("could not serialize access"),
        psycopg.errors.DeadlockDetected("deadlock detected"),
        psycopg2_error("40001"),
        psycopg2_error("40P01"),
        pymysql.err.OperationalError(1213, "Deadlock found"),
        pymysql.err.OperationalError(1205, "Lock wait timeout exceeded"),
        pymysql.err.OperationalError(1020, "Record has changed since last read"),
        sqlite_error(sqlite3.SQLITE_BUSY),
        sqlite_error(sqlite3.SQLITE_BUSY_SNAPSHOT),
        sqlite_error(sqlite3.SQLITE_BUSY_RECOVERY),
        sqlite_error(sqlite3.SQLITE_LOCKED),
        sqlite_error(sqlite3.SQLITE_LOCKED_SHAREDCACHE),
    ],
    ids=repr,
)
def test_a_collision_of_two_statements_is_contention(cause: Exception) -> None:
    assert is_contention(wrapped(cause))
    assert is_contention(cause)


@pytest.mark.parametrize(
    "error",
    [
        wrapped(psycopg.errors.UniqueViolation("duplicate key"), IntegrityError),
        wrapped(psycopg.errors.UndefinedTable("no such table"), ProgrammingError),
        wrapped(psycopg.errors.AdminShutdown("terminating connection")),
        wrapped(psycopg.OperationalError("connection refused")),
        wrapped(psycopg2_error("57P01")),
        wrapped(pymysql.err.IntegrityError(1062, "Duplicate entry"), IntegrityError),
        wrapped(pymysql.err.OperationalError(2013, "Lost connection")),
        wrapped(pymysql.err.InterfaceError("(0, '')"), InterfaceError),
        wrapped(sqlite_error(sqlite3.SQLITE_FULL)),
        wrapped(sqlite_error(sqlite3.SQLITE_IOERR)),
        wrapped(sqlite3.OperationalError("no such table")),
        OperationalError(),
        OperationalError("1213"),
        ValueError("boom"),
    ],
    ids=repr,
)
def test_other_faults_are_not(error: Exception) -> None:
    assert not is_contention(error)


def test_a_real_lock_of_sqlite_is_contention(tmp_path: Path) -> None:
    path = tmp_path / "db"
    with closing(sqlite3.connect(path)) as holder, closing(sqlite3.connect(path, timeout=0)) as other:
        holder.execute("CREATE TABLE t (n)")
        holder.execute("BEGIN IMMEDIATE")
        with pytest.raises(sqlite3.OperationalError) as caught:
            other.execute("BEGIN IMMEDIATE")
    assert is_contention(wrapped(caught.value))


@pytest.mark.django_db(transaction=True)
@pytest.mark.postgres
@pytest.mark.mysql
def test_a_connection_that_the_server_ended_is_lost() -> None:
    def victim() -> tuple[Exception, bool]:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_backend_pid()" if connection.vendor == "postgresql" else "SELECT CONNECTION_ID()")
            number = cursor.fetchone()[0]
        in_thread(lambda: end(number))
        try:
            JobExecution.objects.exists()
        except DatabaseError as error:
            return error, is_connection_loss(error, "default")
        raise AssertionError("the query had an answer")

    error, lost = in_thread(victim)
    assert lost, error
    assert not is_contention(error)


def end(number: int) -> None:
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute("SELECT pg_terminate_backend(%s)", [number])
        else:
            cursor.execute(f"KILL {number}")


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (InterfaceError("connection already closed"), True),
        (IntegrityError("duplicate key"), False),
        (ProgrammingError("syntax error"), False),
        (ValueError("boom"), False),
        # The connection answers: whatever this was, it is not gone.
        (wrapped(psycopg.errors.OutOfMemory("out of memory")), False),
        (wrapped(psycopg.errors.DeadlockDetected("deadlock detected")), False),
    ],
    ids=lambda part: repr(part)[:40],
)
def test_a_fault_on_a_connection_that_answers_is_no_loss(error: Exception, lost: bool) -> None:
    assert JobExecution.objects.count() == 0
    assert is_connection_loss(error, "default") == lost


@pytest.mark.django_db(transaction=True)
def test_a_connection_that_could_not_be_opened_is_lost() -> None:
    def look() -> bool:
        # A thread of its own has no connection yet.
        assert connection.connection is None
        return is_connection_loss(OperationalError("connection refused"), "default")

    assert in_thread(look)


# Repeating


BUSY = wrapped(pymysql.err.OperationalError(1213, "Deadlock found"))


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr(contention, "time", SimpleNamespace(sleep=found.append))
    return found


def failing(times: int, error: Exception = BUSY) -> tuple[Callable[..., str], list[Any]]:
    """Return a verb that fails so often before it succeeds, and what it was called with."""
    calls: list[Any] = []

    @retried
    def verb(*args: Any, **kwargs: Any) -> str:
        """Say that it worked."""
        calls.append((args, kwargs))
        if len(calls) <= times:
            raise error
        return "done"

    return verb, calls


@pytest.mark.django_db(transaction=True)
def test_a_verb_is_repeated_with_growing_pauses(pauses: list[float]) -> None:
    verb, calls = failing(contention.TRIES - 1)
    assert verb(5, using="default", n=6) == "done"
    assert calls == [((5,), {"using": "default", "n": 6})] * contention.TRIES
    assert all(0 <= pause <= 0.01 * 2**n for n, pause in enumerate(pauses))
    assert len(pauses) == contention.TRIES - 1


@pytest.mark.django_db(transaction=True)
def test_it_gives_up_with_the_last_error(pauses: list[float]) -> None:
    verb, calls = failing(99)
    with pytest.raises(OperationalError) as caught:
        verb(using="default")
    assert caught.value is BUSY
    assert (len(calls), len(pauses)) == (contention.TRIES, contention.TRIES - 1)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("error", [IntegrityError("taken"), ProgrammingError("wrong"), ValueError("boom")], ids=repr)
def test_a_real_fault_is_raised_at_once(error: Exception, pauses: list[float]) -> None:
    verb, calls = failing(99, error)
    with pytest.raises(type(error)):
        verb(using="default")
    assert (len(calls), pauses) == (1, [])


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_a_transaction_on_another_database_is_no_reason_to_give_up(pauses: list[float]) -> None:
    verb, calls = failing(1)
    with transaction.atomic(using="other"):
        assert verb(using="default") == "done"
    assert len(calls) == 2


def by_default() -> Any:
    return JobExecution.objects.all()


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(lambda: ((), {"using": "default"}), id="using"),
        pytest.param(lambda: ((JobExecution.objects.using("default"),), {}), id="a bound queryset"),
        pytest.param(lambda: ((JobExecution.objects.all(),), {}), id="a queryset that the router binds"),
        pytest.param(lambda: ((JobExecution.objects,), {}), id="a manager"),
        pytest.param(lambda: ((), {}), id="nothing said"),
        pytest.param(lambda: ((5,), {}), id="something else"),
    ],
)
def test_inside_a_transaction_of_the_alias_for_writes_nothing_is_repeated(
    arguments: Callable[[], Any], settings: Any, pauses: list[float]
) -> None:
    settings.DATABASE_ROUTERS = [Replica()]
    args, kwargs = arguments()
    verb, calls = failing(1)
    with pytest.raises(OperationalError), transaction.atomic():
        verb(*args, **kwargs)
    assert (len(calls), pauses) == (1, [])
    assert verb(*args, **kwargs) == "done"


@contextmanager
def without_autocommit() -> Iterator[None]:
    transaction.set_autocommit(False)
    try:
        yield
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)


@pytest.mark.django_db(transaction=True)
def test_with_autocommit_off_nothing_is_repeated(pauses: list[float]) -> None:
    """A deadlock has rolled back the caller's whole transaction: repeating our part would lose the rest in silence."""
    verb, calls = failing(1)
    with without_autocommit(), pytest.raises(OperationalError):
        verb(using="default")
    assert (len(calls), pauses) == (1, [])


def test_a_repeated_verb_keeps_its_name() -> None:
    verb, _ = failing(0)
    assert (verb.__name__, verb.__doc__) == ("verb", "Say that it worked.")
