"""Tell transient database errors from real ones, and repeat our own statements when two of them collide."""

from __future__ import annotations

import contextlib
import random
import re
import sqlite3
import time
from collections.abc import Callable, Iterator
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from django.db import DatabaseError, InterfaceError, InternalError, OperationalError, connections, router, transaction

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

P = ParamSpec("P")
R = TypeVar("R")

# PostgreSQL: serialization failure, deadlock. MySQL, MariaDB: deadlock, lock wait timeout, record changed since read.
_SQLSTATES = {"40001", "40P01"}
_ERRNOS = {1213, 1205, 1020}
# SQLITE_BUSY, SQLITE_LOCKED.
_BUSY_CODES = {5, 6}
# PostgreSQL: connection exceptions, sessions ended by a shutdown or an operator, timeouts of idle sessions.
_LOSS_SQLSTATES = ("08", "57P", "25P03", "25P04")
# MySQL, MariaDB: shutdown, killed connection, disconnected for inactivity; besides the client's (2000 to 2999).
_LOSS_ERRNOS = {1053, 1927, 4031}
# MySQL, MariaDB: no access to the database, wrong password, no such database, host not allowed, password required.
_REFUSED_ERRNOS = {1044, 1045, 1049, 1130, 1698}
# PostgreSQL: for a refused connection libpq has no code, only the words of the server or of PgBouncer. Messages in
# other languages are not recognized, and treated like a server that is down, which costs a wait.
_REFUSED_WORDS = re.compile(
    r'\b(database|role) ".*" does not exist|authentication failed|no password supplied|no pg_hba\.conf entry'
    r"|is not permitted to log in|no such (database|user)\b"
)
# SQLite: SQLITE_READONLY, SQLITE_IOERR, SQLITE_FULL, SQLITE_CANTOPEN.
_UNABLE_CODES = {8, 10, 13, 14}
# PostgreSQL: disk full, errors of the system below it.
_UNABLE_SQLSTATES = ("53100", "58")
# MySQL, MariaDB: error writing a file, disk full, table full.
_UNABLE_ERRNOS = {3, 1021, 1026, 1114}
TRIES = 8
# Seconds for which a process may be silent in a transaction that holds a lock everybody wants.
SILENCE = 10.0


def is_contention(error: BaseException) -> bool:
    """Whether the database gave up on a statement only because of another one, so that it may be repeated."""
    cause = error.__cause__ or error
    if _sqlstate(cause) in _SQLSTATES:
        return True
    if isinstance(cause, sqlite3.OperationalError):
        return _sqlite_code(cause) in _BUSY_CODES
    return _errno(cause) in _ERRNOS


def is_connection_loss(error: BaseException, using: str) -> bool:
    """Whether the connection is gone or unusable, so that the fate of the last statement is unknown.

    The error is examined first: after a failed commit, Django has often opened a new connection already.
    """
    if isinstance(error, InterfaceError):
        return True
    if isinstance(error, InternalError):
        # psycopg reports the timeout of an idle transaction like this; other such errors leave the connection intact.
        return _sqlstate(error.__cause__).startswith(_LOSS_SQLSTATES)
    if not isinstance(error, OperationalError) or is_contention(error):
        return False
    connection = connections[using]
    if _tells_loss(error.__cause__, connection.vendor):
        return True
    return connection.connection is None or not connection.is_usable()


def _sqlstate(cause: BaseException | None) -> str:
    """Return the state that a driver of PostgreSQL tells, "" if none; psycopg2 has another name for it."""
    return getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None) or ""


def _errno(cause: BaseException) -> int | None:
    """Return the number of an error that a driver of MySQL or MariaDB tells, None if it is another driver's."""
    return cause.args[0] if cause.args and isinstance(cause.args[0], int) else None


def _sqlite_code(cause: BaseException) -> int:
    """Return the primary code of an error of SQLite, which extended codes carry in their low byte; 0 if it has none."""
    return (getattr(cause, "sqlite_errorcode", 0) or 0) & 0xFF


def _tells_loss(cause: BaseException | None, vendor: str) -> bool:
    if cause is None:
        return False
    if vendor == "postgresql":
        # An error without a state comes from the client: the server was not reached, or fell silent.
        state = _sqlstate(cause)
        return not state or state.startswith(_LOSS_SQLSTATES)
    number = _errno(cause)
    return vendor == "mysql" and number is not None and (2000 <= number < 3000 or number in _LOSS_ERRNOS)


def is_unable_to_write(error: BaseException) -> bool:
    """Whether the database has no space left, or its disk fails: nothing of what a row holds is the reason.

    SQLite and InnoDB tell it at the commit, so that a write which is rolled back does not find it out.
    """
    cause = error.__cause__ or error
    if isinstance(cause, sqlite3.Error):
        return _sqlite_code(cause) in _UNABLE_CODES
    if _sqlstate(cause).startswith(_UNABLE_SQLSTATES):
        return True
    return _errno(cause) in _UNABLE_ERRNOS


def is_refusal(error: BaseException) -> bool:
    """Whether a working server refused the connection: no such database or user, or a wrong password."""
    cause = error.__cause__ or error
    if isinstance(cause, sqlite3.Error):
        # SQLITE_NOTADB: the file is not a database.
        return _sqlite_code(cause) == 26
    if (number := _errno(cause)) is not None:
        return number in _REFUSED_ERRNOS
    return isinstance(error, OperationalError) and _REFUSED_WORDS.search(str(cause)) is not None


def retried(verb: Callable[P, R]) -> Callable[P, R]:
    """Repeat an autocommitted statement of ours on contention, with growing pauses; in a transaction it runs once.

    The alias is the argument `using`, that of a queryset as first argument, or the router's for writes.
    """

    @wraps(verb)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        # Not `queryset.db`, which is the alias for reads until the first write.
        using = (
            kwargs.get("using") or (args and getattr(args[0], "_db", None)) or router.db_for_write(_execution_model())
        )
        connection = connections[str(using)]
        for attempt in range(TRIES):
            try:
                return verb(*args, **kwargs)
            except DatabaseError as error:
                if in_transaction(connection) or attempt == TRIES - 1 or not is_contention(error):
                    raise
            time.sleep(random.uniform(0, 0.01 * 2**attempt))
        raise AssertionError("unreachable")

    return call


def passes_over_locks(using: str) -> bool:
    """Whether the database has SKIP LOCKED; on SQLite the UPDATE itself waits its turn."""
    return bool(connections[using].features.has_select_for_update_skip_locked)


@contextlib.contextmanager
def short_transaction(using: str) -> Iterator[None]:
    """Open a transaction for a lock that all processes want; a process that freezes inside it loses the lock.

    Only PostgreSQL can do so, by ending the session after SILENCE seconds. Otherwise the lock would be held for as long
    as the process is frozen or, if its machine is cut off, until the server notices, which may take hours.
    """
    connection = connections[using]
    is_outermost = not connection.in_atomic_block
    with transaction.atomic(using=using):
        if is_outermost and connection.vendor == "postgresql":
            with connection.cursor() as cursor:
                cursor.execute(f"SET LOCAL idle_in_transaction_session_timeout = {int(SILENCE * 1000)}")
        yield


def in_transaction(connection: BaseDatabaseWrapper) -> bool:
    """Whether a write waits for the caller's commit; with autocommit off it always does, without an atomic block."""
    # The attribute is set when the connection is opened.
    is_auto = connection.settings_dict["AUTOCOMMIT"] if connection.connection is None else connection.autocommit
    return connection.in_atomic_block or not is_auto


def _execution_model() -> type:
    from django.apps import apps

    return apps.get_model("django_jobs", "JobExecution")
