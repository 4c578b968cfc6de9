"""The limits after which a process ends: `--max-jobs` and `--max-memory`."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime

from django_jobs.execution.liveness import memory_in_use
from django_jobs.runtime.worker import Worker

EVERY = 1.0
MEGABYTE = 1_000_000
# Children of one supervisor, which start together and do the same work, should not end together.
SPREAD = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How many runs a process starts, and the megabytes of memory above which it takes no more; None is no limit."""

    max_jobs: int | None = None
    max_memory: float | None = None

    def lowered(self) -> Limits:
        """Return these limits, each lowered at random by up to a tenth."""
        share = 1.0 - random.uniform(0.0, SPREAD)
        return replace(
            self,
            max_jobs=self.max_jobs and max(round(self.max_jobs * share), 1),
            max_memory=self.max_memory and self.max_memory * share,
        )


class MemoryLimit:
    """Checks once a second, if something ran meanwhile, whether the process has grown too large."""

    def __init__(self, megabytes: float, worker: Worker, *, on_limit: Callable[[str], None]) -> None:
        self._megabytes = megabytes
        self._worker = worker
        self._on_limit = on_limit
        self._seen = 0

    def tick(self, now: datetime | None = None) -> float:
        """Look once."""
        ended = self._worker.claimed - len(self._worker.running())
        used = memory_in_use()
        # Only after a run: a process that is too large at its start would not be smaller after a restart.
        if ended > self._seen and used is not None and used > self._megabytes * MEGABYTE:
            self._on_limit(f"{used / MEGABYTE:.0f} MB of memory are in use, more than {self._megabytes:.0f} MB")
        self._seen = ended
        return EVERY
