"""Delete finished rows that are no longer kept, in small portions with pauses: the sweep role of runjobs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from datetime import datetime

from django_jobs import clock, registry, retention
from django_jobs.models import JobExecution
from django_jobs.policies import Policy
from django_jobs.runtime.portions import contained, distinct
from django_jobs.runtime.sweep import seconds_until
from django_jobs.schedules import configured
from django_jobs.states import FINAL, Status

logger = logging.getLogger("django_jobs.trim")

# Seconds between portions, or as long as the last one took: half of the time the database is left to the jobs.
PAUSE = 0.05
# Seconds. A portion that takes longer is too large for these rows, or for a busy disk.
PORTION_SECONDS = 0.5
SMALLEST = 100


class Trim:
    """Runs at each tick of TRIM_CRON: one portion per tick() until nothing is left."""

    def __init__(self, *, using: str, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._using = using
        self._monotonic = monotonic
        self._due_at: datetime | None = None
        self._left: Iterator[int] | None = None
        self._size = retention.BATCH

    def tick(self, now: datetime | None = None) -> float:
        """Delete one portion if it is time; return a short pause while there is more, else the time to the next run."""
        now = now or clock.now(self._using)
        if self._left is None:
            due, self._due_at = self._due_at, self._due_at or configured("TRIM_CRON").next_after(now)
            if due is None or now < due:
                return seconds_until(self._due_at, now)
            self._left = self.portions(now)
        started = self._monotonic()
        try:
            # Empty portions cost a few reads and need no pause.
            if next((deleted for deleted in self._left if deleted), 0):
                return max(PAUSE, self._monotonic() - started)
        except Exception:
            # The connection is lost and the generator has ended: start over when the loop tries again.
            self._left = None
            raise
        self._left = None
        self._due_at = configured("TRIM_CRON").next_after(now)
        return seconds_until(self._due_at, now)

    def portions(self, now: datetime) -> Iterator[int]:
        """Trim every job and status; yield after each portion how many rows it deleted."""
        for name in distinct(JobExecution.objects.using(self._using).all(), "job_name"):
            for status in sorted(FINAL):
                yield from self._trim(name, status, now)

    def _trim(self, name: str, status: Status, now: datetime) -> Iterator[int]:
        with contained(logger, f"the {status} executions of {name} could not be trimmed", using=self._using):
            policy, place = _policy(name), retention.Place()
            while True:
                started, size = self._monotonic(), self._size
                deleted = retention.trim(
                    name,
                    status,
                    policy.retention(status),
                    policy.effective_max_age,
                    now=now,
                    using=self._using,
                    limit=size,
                    place=place,
                    other_names=policy.names_besides(name),
                )
                self._adapt(deleted, self._monotonic() - started)
                yield deleted
                if deleted < size:
                    return

    def _adapt(self, deleted: int, seconds: float) -> None:
        """Choose the size of the next portion by the seconds that the last one took."""
        if seconds > PORTION_SECONDS:
            self._size = max(self._size // 2, SMALLEST)
        elif deleted == self._size and seconds < PORTION_SECONDS / 4:
            self._size = min(self._size * 2, retention.BATCH)


def _policy(name: str) -> Policy:
    """Return what decides how many rows are kept; for a job that is not registered here, KEEP alone.

    Without RECORD, as the job may say otherwise where it is known: rows that nobody knows are not purged by themselves.
    """
    return registry.find(name) or Policy(name=name, record="all")
