"""Run pushed rows at once, in the thread that pushed them: for tests and scripts."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from uuid import UUID

from django_jobs.dispatchers.base import Suspensions
from django_jobs.dispatchers.database import DatabaseDispatcher
from django_jobs.execution.immediate import run_now
from django_jobs.models import jobs_alias

Rows = tuple[str, Sequence[UUID]]


class ImmediateDispatcher(DatabaseDispatcher):
    """Runs rows when their transaction commits, before the push, or the block around it, returns.

    What a handler pushes runs when that handler has ended. In a process of runjobs the worker is woken instead, as by
    the database dispatcher, which has the same options.
    """

    kind = "immediate"

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self._suspensions = Suspensions()
        self._thread = threading.local()

    def hint(self, queue: str, ids: Sequence[UUID], *, priority: int = 0) -> None:
        """Run these rows now."""
        if self._suspensions:
            super().hint(queue, ids, priority=priority)
        elif (waiting := getattr(self._thread, "waiting", None)) is not None:
            waiting.append((queue, ids))
        elif ids:
            self._run_all(deque([(queue, ids)]))

    def without_running(self) -> AbstractContextManager[None]:
        """See Dispatcher.without_running()."""
        return self._suspensions.block()

    def describe(self) -> str:
        """See Dispatcher.describe()."""
        return f"each process runs what it pushes, at once; for the rest {super().describe()}"

    def _run_all(self, waiting: deque[Rows]) -> None:
        self._thread.waiting = waiting
        try:
            while waiting:
                queue, ids = waiting.popleft()
                run_now(queue, ids, using=jobs_alias())
        finally:
            self._thread.waiting = None
