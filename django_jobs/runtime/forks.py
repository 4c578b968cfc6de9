"""Detach processes that handlers fork from the connections and signal handlers of the worker; called by runjobs."""

from __future__ import annotations

import os
import signal
import threading
from functools import cache
from typing import Any, NoReturn
from weakref import WeakValueDictionary

from django.db import NotSupportedError, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created

from django_jobs.runtime.stopping import SIGNALS, give_back_signals

# The connections of all threads of this process, by id.
_opened: WeakValueDictionary[int, BaseDatabaseWrapper] = WeakValueDictionary()
# The parent's connections, kept so that nothing closes them: over the shared socket that would end its sessions.
_kept: list[Any] = []
# What the forking thread must remember across the fork, in both processes.
_before = threading.local()


@cache
def detach_forks() -> None:
    """Make every process that is forked from this one begin without its connections and signal handlers.

    multiprocessing ends processes by SIGTERM, which our handler would queue as a request that nobody there waits for.
    """
    connection_created.connect(_remember, dispatch_uid="django_jobs.forks")
    os.register_at_fork(before=_hold_back, after_in_parent=_let_in, after_in_child=_detach)


def _remember(*, connection: BaseDatabaseWrapper, **kwargs: Any) -> None:
    _opened[id(connection)] = connection


def _hold_back() -> None:
    # Now: the child frees what belonged to the other threads, which it does not have, before it calls _detach().
    _before.opened = [connection for ref in _opened.valuerefs() if (connection := ref()) is not None]
    # A signal that came between the fork and the last line of _detach() would be lost.
    _before.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _let_in() -> None:
    del _before.opened
    signal.pthread_sigmask(signal.SIG_SETMASK, _before.mask)


def _detach() -> None:
    _kept.extend(_before.opened)
    if any(connection.vendor == "sqlite" for connection in _before.opened):
        _refuse_sqlite()
    _forget_connections()
    give_back_signals()
    _let_in()


def _forget_connections() -> None:
    for connection in connections.all(initialized_only=True):
        _kept.append(connection)
        # Those of all threads, by alias.
        pools = getattr(connection, "_connection_pools", None)
        if pools:
            _kept.append(dict(pools))
            pools.clear()
        del connections[connection.alias]


def _refuse_sqlite() -> None:
    """Open no SQLite connection here: SQLite records in memory which locks its process has on a file.

    Whatever a thread of the parent had locked at the fork stays locked here for ever, SQLite's allocator included. And
    if one was reading, this process reads without a lock of its own while others write.
    """
    from django.db.backends.sqlite3.base import DatabaseWrapper

    DatabaseWrapper.get_new_connection = _refuse  # type: ignore[assignment,method-assign]


def _refuse(connection: BaseDatabaseWrapper, params: Any) -> NoReturn:
    raise NotSupportedError(
        f"The database {connection.alias!r} was used in a process that a handler forked. On SQLite that may hang on "
        "locks that threads of the worker held, or read half-written data; expected a process that is started afresh: "
        'multiprocessing.get_context("spawn").'
    )
