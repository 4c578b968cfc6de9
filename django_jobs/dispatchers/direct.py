"""Direct mode: the process that pushes runs the rows itself, right after commit, in a few slots of its own."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - its hook must be there before ours, see at_exit()
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from uuid import UUID

from django.utils.autoreload import DJANGO_AUTORELOAD_ENV

from django_jobs.conf import get_settings
from django_jobs.dispatchers.base import Suspensions
from django_jobs.dispatchers.database import DatabaseDispatcher
from django_jobs.execution.direct import DirectRunner
from django_jobs.models import jobs_alias

logger = logging.getLogger("django_jobs.direct")

# Seconds. A person waits for the reload, so running handlers are told to stop soon.
RELOAD_DRAIN = 1.0


class DirectDispatcher(DatabaseDispatcher):
    """Runs what this process pushes in this process, and leaves rows that it does not get to to `runjobs`.

    Nothing starts before the first hint, and a forked child starts afresh. In a process of runjobs the worker is woken
    instead, as by the database dispatcher, which has the same options.
    """

    kind = "direct"

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        # By process id: a forked child must not touch what its parent started, whose threads it does not have. The
        # entry is kept, since its destruction might close a connection that is the parent's.
        self._processes: dict[int, _Process] = {}

    def hint(self, queue: str, ids: Sequence[UUID], *, priority: int = 0) -> None:
        """Run these rows here, as slots become free; wake other workers for those that do not fit in."""
        if left := self._here().run(queue, ids, priority):
            super().hint(queue, left, priority=priority)

    def cancel_hint(self, ids: Sequence[UUID]) -> None:
        """Have cancel marks looked at, in this process and others."""
        self._here().look()
        super().cancel_hint(ids)

    def without_running(self) -> AbstractContextManager[None]:
        """See Dispatcher.without_running()."""
        return self._here().suspensions.block()

    def describe(self) -> str:
        """See Dispatcher.describe()."""
        return f"each process runs what it pushes; for the rest {super().describe()}"

    def close(self) -> None:
        """End what runs here as at the end of the process; the next hint starts afresh. See Dispatcher.close()."""
        self._here().end("the dispatcher was closed")
        super().close()

    def _here(self) -> _Process:
        # setdefault() is atomic: two threads that come first after a fork get the same object.
        return self._processes.setdefault(os.getpid(), _Process(os.getpid()))


class _Process:
    """The runner of one process, made by the first hint."""

    def __init__(self, pid: int) -> None:
        self.suspensions = Suspensions()
        self._pid = pid
        self._lock = threading.Lock()
        self._runner: DirectRunner | None = None
        self._is_exiting = False
        self._is_known_at_exit = False

    def run(self, queue: str, ids: Sequence[UUID], priority: int) -> Sequence[UUID]:
        """Run these rows; return those that are left to others."""
        runner = self._runner
        if runner is None or runner.is_broken:
            if self.suspensions or not ids:
                return ids
            runner = self._start()
        return ids if runner is None else runner.put(queue, ids, priority=priority)

    def look(self) -> None:
        if (runner := self._runner) is not None:
            runner.look()

    def end(self, reason: str, *, drain: float | None = None) -> None:
        with self._lock:
            runner = self._runner
        if runner is None:
            return
        runner.end(reason, drain=get_settings().drain_timeout if drain is None else drain)
        # Not before: what is pushed meanwhile would be started by another one.
        with self._lock:
            if self._runner is runner:
                self._runner = None

    def _start(self) -> DirectRunner | None:
        """Return a runner; None when the process is ending, and nothing would end what was started."""
        with self._lock:
            if self._is_exiting:
                return None
            if self._runner is None or self._runner.is_broken:
                if not self._is_known_at_exit:
                    try:
                        at_exit(self._exit)
                    except RuntimeError:
                        return None
                    self._is_known_at_exit = True
                runner = DirectRunner(using=jobs_alias())
                runner.start()
                self._runner = runner
            return self._runner

    def _exit(self) -> None:
        """End with the process, as runjobs does on a signal."""
        if self._pid != os.getpid():
            # In a forked child: the runner is its parent's.
            return
        self._is_exiting = True
        is_reload = os.environ.get(DJANGO_AUTORELOAD_ENV) == "true"
        try:
            self.end("the process ends", drain=RELOAD_DRAIN if is_reload else None)
        except KeyboardInterrupt:
            logger.warning("interrupted while waiting for what runs; its rows will be rescued")


def at_exit(call: Callable[[], object]) -> None:
    """Have `call` run when this process ends, while handlers can still use executors; raises RuntimeError after that.

    Python runs these hooks before those of atexit, in reverse order of registration, so that this one comes before that
    of concurrent.futures, after which no executor takes work. The hook is undocumented, but concurrent.futures uses it.
    """
    getattr(threading, "_register_atexit", atexit.register)(call)
