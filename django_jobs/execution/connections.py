"""Keep a thread's database connections fit for its next run: nothing open, nothing stale, no growing query log."""

from __future__ import annotations

import contextlib
import logging
import threading
from time import monotonic
from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created
from django.dispatch import receiver

logger = logging.getLogger("django_jobs")

# Seconds after which a thread's connections are checked before they are used again: the server, or something on the
# way to it, may have closed them. Django checks only with CONN_HEALTH_CHECKS.
UNUSED = 1.0
_thread = threading.local()


@receiver(connection_created, dispatch_uid="django_jobs.connections")
def _note_opened(**kwargs: Any) -> None:
    """Remember that this thread has opened a connection: until then, there is nothing to tidy after a run."""
    _thread.opened = True


def freshen() -> None:
    """Tidy connections that were idle; recently used ones were tidied after their use."""
    now = monotonic()
    if now - getattr(_thread, "used_at", now) > UNUSED:
        tidy()


def tidy(culprit: str = "", *, close_all: bool = False) -> None:
    """Do for each connection of this thread what Django does around a request, and roll back open transactions.

    `culprit` names the job that ran, for the log. Never raises.
    """
    if not getattr(_thread, "opened", False):
        return
    now = monotonic()
    is_long_ago = now - getattr(_thread, "used_at", now) > UNUSED
    _thread.used_at = now
    for connection in connections.all(initialized_only=True):
        if connection.connection is None:
            continue
        try:
            if is_left_open(connection):
                if culprit:
                    logger.warning("%s left a transaction open on %r; rolling it back", culprit, connection.alias)
                roll_back(connection)
            if connection.queries_log:
                connection.queries_log.clear()
            if close_all or (is_long_ago and not culprit and not connection.is_usable()):
                connection.close()
            else:
                connection.close_if_unusable_or_obsolete()
                if connection.connection is not None and _hides_transactions(connection):
                    connection.connection.rollback()
        except Exception:
            logger.exception("the connection to %r could not be reset and is closed", connection.alias)
            _drop(connection)


def is_left_open(connection: BaseDatabaseWrapper) -> bool:
    """Whether a transaction is open that should not be, according to Django or, where that is cheap, the driver."""
    if connection.in_atomic_block or connection.autocommit != connection.settings_dict["AUTOCOMMIT"]:
        return True
    raw = connection.connection
    if connection.vendor == "sqlite":
        return bool(raw.in_transaction)
    if connection.vendor == "postgresql":
        # In psycopg 2 and 3 alike, 0 is "idle".
        return not raw.closed and raw.info.transaction_status != 0
    # PyMySQL keeps the status of the last answer, whose bit 0 is "in a transaction".
    return not _hides_transactions(connection) and bool(raw.server_status & 1)


def _hides_transactions(connection: BaseDatabaseWrapper) -> bool:
    """Whether the driver does not tell if a transaction is open: mysqlclient; to ask costs as much as to roll back."""
    return connection.vendor == "mysql" and not hasattr(connection.connection, "server_status")


def roll_back(connection: BaseDatabaseWrapper) -> None:
    """Roll back at the driver and make Django forget its blocks, as after a new connect."""
    connection.run_on_commit = []
    connection.savepoint_ids = []
    connection.atomic_blocks = []
    connection.in_atomic_block = False
    connection.needs_rollback = False
    connection.closed_in_transaction = False
    try:
        connection.connection.rollback()
        connection.set_autocommit(connection.settings_dict["AUTOCOMMIT"])
    except Exception:  # noqa: BLE001 - closed by the handler, or lost: the next use opens a new one
        connection.close()


def _drop(connection: BaseDatabaseWrapper) -> None:
    with contextlib.suppress(Exception):
        connection.connection.close()
    connection.connection = None


def close_all() -> None:
    """Close every connection of this thread, which will not be used again."""
    tidy(close_all=True)
