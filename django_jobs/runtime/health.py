"""Whether a `runjobs` process is alive and ready to work, for its health port and its heartbeat file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from django_jobs.conf import get_settings
from django_jobs.dispatchers import Subscription
from django_jobs.loop import Loop

# Seconds. Rescuing thousands of rows, or waiting for a migration that locks a table, takes less; a statement whose
# answer the network lost takes longer.
STUCK_AFTER = 300.0
# In heartbeat intervals: two beats failed, rather than one being a little late.
BEATS_LATE = 2.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to a probe: a status and the problems, in words without secrets."""

    status: str
    problems: Sequence[str] = ()

    @property
    def is_good(self) -> bool:
        """Whether the probe passes; "degraded" costs latency only."""
        return self.status in {"ok", "degraded"}


class Probes(Protocol):
    """Answers to probes; at once, in any thread, and without the database."""

    def alive(self) -> Answer:
        """Return whether all loops still turn; if not, only a new process helps."""

    def ready(self) -> Answer:
        """Return whether this process can do its work now."""


class Health:
    """Answers for one process, from what its runner reports; an outage of the database is no reason to restart it."""

    def __init__(self) -> None:
        self._loops: tuple[Loop, ...] = ()
        self._beaten_at: float | None = None
        self._is_draining = False
        self._subscription: Subscription | None = None

    def watch(self, *loops: Loop) -> None:
        """Take these loops, which have been started, into account."""
        self._loops += loops

    def listen(self, subscription: Subscription | None) -> None:
        """Report the problems of this subscription."""
        self._subscription = subscription

    def beaten(self) -> None:
        """Note that a beat has just reached the database."""
        self._beaten_at = time.monotonic()

    def drain(self) -> None:
        """Note that the process stops, and takes nothing new."""
        self._is_draining = True

    def alive(self) -> Answer:
        """See Probes.alive()."""
        problems = [problem for loop in self._loops if (problem := _trouble(loop))]
        return Answer(status="failing" if problems else "ok", problems=problems)

    def ready(self) -> Answer:
        """See Probes.ready()."""
        if self._is_draining:
            return Answer(status="draining", problems=["it is stopping and takes nothing new"])
        if self._beaten_at is None:
            return Answer(status="starting", problems=["it has not reached the database yet"])
        alive, age = self.alive(), time.monotonic() - self._beaten_at
        if age > BEATS_LATE * get_settings().heartbeat_interval:
            late = f"its last sign of life reached the database {age:.0f} s ago"
            return Answer(status="failing", problems=[late, *alive.problems])
        if not alive.is_good:
            return alive
        if self._subscription is not None and (problem := self._subscription.problem()):
            return Answer(status="degraded", problems=[f"no wake-ups arrive, work is found by polling: {problem}"])
        return Answer(status="ok")


def _trouble(loop: Loop) -> str | None:
    if loop.is_stopped:
        return None
    if not loop.is_alive:
        return f"the {loop.name} thread is dead"
    return f"the {loop.name} thread has not turned for {loop.overdue:.0f} s" if loop.overdue > STUCK_AFTER else None
