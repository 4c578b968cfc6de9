"""Tell passing database faults from real ones, and repeat our own statements when two of them collided."""

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
# PostgreSQL: connection exceptions, the server's or an operator's end of a session, its time limits for idle ones.
_LOSS_SQLSTATES = ("08", "57P", "25P03", "25P04")
# MySQL, MariaDB: besides the client's own (2000 to 2999) shutdown, killed connection, ended for inactivity.
_LOSS_ERRNOS = {1053, 1927, 4031}
# MySQL, MariaDB: no such database, no access to it, with this password, without one, from this host.
_REFUSED_ERRNOS = {1044, 1045, 1049, 1130, 1698}
# PostgreSQL: libpq tells no code of a connection that was refused, only the words of the server, or of PgBouncer. Those
# of another language are not known here, which costs their reader the wait for a server that is down.
_REFUSED_WORDS = re.compile(
    r'\b(database|role) ".*" does not exist|authentication failed|no password supplied|no pg_hba\.conf entry'
    r"|is not permitted to log in|no such (database|user)\b"
)
TRIES = 8
# For so many seconds a process may be silent in a transaction that holds what all want.
SILENCE = 10.0


def is_contention(error: BaseException) -> bool:
    """Whether the database gave up on a statement only because of another one, so that repeating it is right."""
    cause = error.__cause__ or error
    if getattr(cause, "sqlstate", None) in _SQLSTATES:
        return True
    if isinstance(cause, sqlite3.OperationalError):
        # The extended codes of SQLITE_BUSY (5) and SQLITE_LOCKED (6) carry them in their low byte.
        return (getattr(cause, "sqlite_errorcode", 0) or 0) & 0xFF in (5, 6)
    return bool(cause.args) and isinstance(cause.args[0], int) and cause.args[0] in _ERRNOS


def is_connection_loss(error: BaseException, using: str) -> bool:
    """Whether the connection is gone or unusable, so that nothing is known of the last statement.

    The error has the first word: when a commit fails Django has often connected anew by the time one can ask.
    """
    if isinstance(error, InterfaceError):
        return True
    if isinstance(error, InternalError):
        # To psycopg the end of an idle transaction is one; others of that kind leave the connection as it is.
        return str(getattr(error.__cause__, "sqlstate", None) or "").startswith(_LOSS_SQLSTATES)
    if not isinstance(error, OperationalError) or is_contention(error):
        return False
    connection = connections[using]
    if _tells_loss(error.__cause__, connection.vendor):
        return True
    return connection.connection is None or not connection.is_usable()


def _tells_loss(cause: BaseException | None, vendor: str) -> bool:
    if cause is None:
        return False
    if vendor == "postgresql":
        # Without a state the error is of the client: the server was not reached, or fell silent.
        state = getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)
        return state is None or state.startswith(_LOSS_SQLSTATES)
    if vendor == "mysql" and cause.args and isinstance(cause.args[0], int):
        return 2000 <= cause.args[0] < 3000 or cause.args[0] in _LOSS_ERRNOS
    return False


def is_refusal(error: BaseException) -> bool:
    """Whether a server that works refused the connection: no such database or user, or a wrong password."""
    cause = error.__cause__ or error
    if isinstance(cause, sqlite3.Error):
        # SQLITE_NOTADB: the file is of another kind.
        return (getattr(cause, "sqlite_errorcode", 0) or 0) & 0xFF == 26
    if cause.args and isinstance(cause.args[0], int):
        return cause.args[0] in _REFUSED_ERRNOS
    return isinstance(error, OperationalError) and _REFUSED_WORDS.search(str(cause)) is not None


def retried(verb: Callable[P, R]) -> Callable[P, R]:
    """Repeat an autocommit statement of ours on contention, with growing pauses; inside a transaction it runs once.

    The alias is the keyword `using`, the one a queryset in first place was bound to, or the router's answer for writes.
    """

    @wraps(verb)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        # Not `queryset.db`: before its first write a queryset gives the alias for reads.
        using = (
            kwargs.get("using") or (args and getattr(args[0], "_db", None)) or router.db_for_write(_execution_model())
        )
        connection = connections[str(using)]
        for attempt in range(TRIES):
            try:
                return verb(*args, **kwargs)
            except DatabaseError as error:
                if _in_transaction(connection) or attempt == TRIES - 1 or not is_contention(error):
                    raise
            time.sleep(random.uniform(0, 0.01 * 2**attempt))
        raise AssertionError("unreachable")

    return call


def passes_over_locks(using: str) -> bool:
    """Whether a read can lock rows and pass over those that others hold; on SQLite the UPDATE itself waits its turn."""
    return bool(connections[using].features.has_select_for_update_skip_locked)


@contextlib.contextmanager
def short_transaction(using: str) -> Iterator[None]:
    """Open a transaction for a lock that all processes want, which one that freezes in the midst of it loses.

    Only PostgreSQL can be told so: it ends the session after SILENCE. Else the lock would be kept for as long as the
    process is frozen or, when its machine is cut off, until the server notices, which may take hours.
    """
    connection = connections[using]
    is_outermost = not connection.in_atomic_block
    with transaction.atomic(using=using):
        if is_outermost and connection.vendor == "postgresql":
            with connection.cursor() as cursor:
                cursor.execute(f"SET LOCAL idle_in_transaction_session_timeout = {int(SILENCE * 1000)}")
        yield


def _in_transaction(connection: BaseDatabaseWrapper) -> bool:
    # With autocommit off there is no atomic block around the caller's transaction.
    return connection.in_atomic_block or (connection.connection is not None and not connection.autocommit)


def _execution_model() -> type:
    from django.apps import apps

    return apps.get_model("django_jobs", "JobExecution")
