"""Detach processes that handlers fork from the connections and signal handlers of the worker; called by runjobs."""

from __future__ import annotations

import os
import signal
import threading
from functools import cache
from typing import Any

from django.db import connections

from django_jobs.runtime.stopping import SIGNALS, give_back_signals

# The parent's connections, kept so that nothing closes them: over the shared socket that would end its sessions.
_kept: list[Any] = []
_mask = threading.local()


@cache
def detach_forks() -> None:
    """Make every process that is forked from this one begin without its connections and signal handlers.

    multiprocessing ends processes by SIGTERM, which our handler would queue as a request that nobody there waits for.
    """
    os.register_at_fork(before=_hold_back, after_in_parent=_let_in, after_in_child=_detach)


def _hold_back() -> None:
    # A signal that came between the fork and the last line of _detach() would be lost.
    _mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _let_in() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.before)


def _detach() -> None:
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
