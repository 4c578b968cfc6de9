"""Check, before `runjobs` starts anything: no open transaction, working pools, a database that answers, all tables."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.db import Error, OperationalError, connections

from django_jobs.contention import is_refusal
from django_jobs.loop import start_thread
from django_jobs.models import JobExecution, JobStat, JobState, QueueState, Worker
from django_jobs.pooling import pooled
from django_jobs.runtime.options import UsageError
from django_jobs.text import one_line

# Seconds; longer than a restart of the database, and well within the minute that process managers allow for a start.
PATIENCE = 30.0

T = TypeVar("T")


class DatabaseNotReady(Exception):
    """The database cannot be reached, refuses us, failed, or lacks our tables."""

    def __init__(self, summary: str, reason: str = "") -> None:
        """Take a summary of ours, and the driver's reason, which may name hosts and users and is not for everybody."""
        super().__init__(f"{summary}: {reason}" if reason else summary)
        self.summary = summary


def failure(using: str, error: Error, what: str = "failed") -> DatabaseNotReady:
    """Return the exception for a database that answered with this error, or did not answer."""
    if is_refusal(error):
        what = f"cannot be used as DATABASES[{using!r}] says"
    return DatabaseNotReady(f"The database {using!r} {what}", one_line(error))


def refuse_transaction(using: str) -> None:
    """Raise UsageError inside a transaction: other threads have their own connections, and would not see its rows."""
    if connections[using].in_atomic_block:
        raise UsageError(
            f"runjobs was called inside a transaction on the database {using!r}: its workers have connections of their "
            "own and see only what is committed. Call it outside; in tests, use TransactionTestCase."
        )


def check_pools() -> None:
    """Raise UsageError when Django cannot make a database's pool: every handler that uses it would fail."""
    for alias in pooled():
        # Not this thread's own connection, which may bypass the pool. Making a pool opens no connection.
        handlers_own: Any = connections.create_connection(alias)
        try:
            getattr(handlers_own, "pool", None)
        except (ImproperlyConfigured, TypeError, ValueError) as error:
            mend = "correct OPTIONS['pool'], where min_size is 4 unless you give it"
            if isinstance(error.__cause__, ImportError):
                mend = 'pip install "psycopg[pool]"'
            raise UsageError(
                f"the pool of the database {alias!r} cannot be opened: {one_line(error).rstrip('.')}; {mend}."
            ) from error


def wait_for_database(using: str, say: Callable[[str], None], *, patience: float = PATIENCE) -> None:
    """Return once the database answers; raises what ask_database() does."""

    def ping(using: str) -> None:
        with connections[using].cursor() as cursor:
            cursor.execute("SELECT 1")

    ask_database(using, ping, say, patience=patience)


def ask_database(using: str, ask: Callable[[str], T], say: Callable[[str], None], *, patience: float) -> T:
    """Return the result of `ask` once the database answers, through one connection, which is closed afterwards.

    Raises DatabaseNotReady when there is no answer within `patience` seconds, and at once when the server refuses us.
    """
    deadline = time.monotonic() + patience
    told = False
    while True:
        try:
            return _ask(using, ask, deadline)
        except Error as error:
            if is_refusal(error) or time.monotonic() > deadline - 1:
                raise failure(using, error, "cannot be reached") from error
            if not told:
                say(f"waiting for the database {using!r} for up to {patience:g} s: {one_line(error)}")
                told = True
        time.sleep(1)


def _ask(using: str, ask: Callable[[str], T], deadline: float) -> T:
    # In a thread of its own: some drivers wait for minutes inside C when the host does not answer.
    results: list[T] = []
    errors: list[BaseException] = []

    def connect() -> None:
        try:
            results.append(ask(using))
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that asked
            errors.append(error)

    thread = start_thread(connect, name="connect")
    while thread.is_alive() and time.monotonic() < deadline:
        thread.join(0.1)
    if results:
        return results[0]
    raise errors[0] if errors else OperationalError("no answer")


def check_tables(using: str) -> None:
    """Raise DatabaseNotReady when a table of ours is missing."""
    connection = connections[using]
    wanted = {model._meta.db_table for model in (JobExecution, JobState, QueueState, Worker, JobStat)}
    with connection.cursor() as cursor:
        missing = wanted - set(connection.introspection.table_names(cursor))
    if missing:
        command = "manage.py migrate" + ("" if using == "default" else f" --database {using}")
        raise DatabaseNotReady(f"The database {using!r} has no table {min(missing)}; run {command} first.")
