"""Find the database before `runjobs` starts anything: no transaction around it, its pool, an answer, all tables."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import Error, connections

from django_jobs.models import JobExecution, JobStat, JobState, QueueState, Worker
from django_jobs.pooling import bypass_pool, pooled
from django_jobs.runtime.options import UsageError
from django_jobs.text import one_line

# Longer than a restart of the database takes, and well within the minute in which a supervisor wants to know.
PATIENCE = 30.0


class DatabaseNotReady(Exception):
    """The database cannot be reached, or has no tables of ours."""


def refuse_transaction(using: str) -> None:
    """Raise UsageError inside a transaction: threads have connections of their own, and would see none of its rows."""
    if connections[using].in_atomic_block:
        raise UsageError(
            f"runjobs was called inside a transaction on the database {using!r}: its workers have connections of their "
            "own and see only what is committed. Call it outside; in tests, use TransactionTestCase."
        )


def check_pools() -> None:
    """Raise UsageError when Django cannot make the pool of a database: each handler that uses it would fail."""
    for alias in pooled():
        # Not this thread's own, which may go past the pool. Making a pool opens no connection.
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
    """Return once the database answers; raise DatabaseNotReady when it did not within `patience` seconds."""
    deadline = time.monotonic() + patience
    told = False
    while True:
        fault = _try(using, deadline)
        if fault is None:
            return
        if time.monotonic() > deadline - 1:
            raise DatabaseNotReady(f"The database {using!r} cannot be reached: {fault}")
        if not told:
            say(f"waiting for the database {using!r} for up to {patience:g} s: {fault}")
            told = True
        time.sleep(1)


def _try(using: str, deadline: float) -> str | None:
    """Return what is wrong with the connection, in one line; None when it works."""
    # In a thread of its own: some drivers wait for minutes inside C when the host does not answer.
    results: list[BaseException | None] = []

    def connect() -> None:
        try:
            bypass_pool()
            with connections[using].cursor() as cursor:
                cursor.execute("SELECT 1")
            results.append(None)
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that asked
            results.append(error)
        finally:
            connections[using].close()

    thread = threading.Thread(target=connect, name="django_jobs connect", daemon=True)
    thread.start()
    while thread.is_alive() and time.monotonic() < deadline:
        thread.join(0.1)
    if not results:
        return "no answer"
    error = results[0]
    if isinstance(error, Error):
        return one_line(error)
    if error is not None:
        raise error
    return None


def check_tables(using: str) -> None:
    """Raise DatabaseNotReady when a table of ours is missing."""
    connection = connections[using]
    wanted = {model._meta.db_table for model in (JobExecution, JobState, QueueState, Worker, JobStat)}
    with connection.cursor() as cursor:
        missing = wanted - set(connection.introspection.table_names(cursor))
    if missing:
        command = "manage.py migrate" + ("" if using == "default" else f" --database {using}")
        raise DatabaseNotReady(f"The database {using!r} has no table {min(missing)}; run {command} first.")
