"""Claim rows for the free slots of an engine, best first: the worker role of runjobs."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime
from uuid import UUID

from django_jobs import clock, registry, transitions
from django_jobs.conf import get_settings
from django_jobs.execution.engine import Engine
from django_jobs.execution.liveness import Liveness
from django_jobs.execution.run import Run
from django_jobs.loop import Loop
from django_jobs.models import JobExecution
from django_jobs.pauses import Paused
from django_jobs.runtime.heads import heads
from django_jobs.runtime.limited_claims import LimitedClaims
from django_jobs.served import Served

logger = logging.getLogger("django_jobs.worker")

# Seconds between looks for work after a wake-up and after work was found: more may follow at once, with a hint that is
# held back for a moment. After these, the pauses grow up to POLL_INTERVAL.
SOON = (0.005, 0.010, 0.025)


class Observed:
    """What stage last saw in the tables, for claims; this base class has seen nothing."""

    # Names whose rows are not claimed.
    paused_jobs: frozenset[str] = frozenset()
    # Queues that are not claimed from.
    paused_queues: frozenset[str] = frozenset()
    # Queues with pending rows, found on behalf of a worker that serves any queue.
    pending_queues: frozenset[str] = frozenset()
    # Names of jobs with `concurrency=` that have rows near the head of a queue.
    limited_jobs: frozenset[str] = frozenset()

    def recent_pauses(self) -> Paused:
        """Return what is paused, as of less than a second ago."""
        return Paused(self.paused_jobs, self.paused_queues)


class Worker:
    """The worker role: one thread claims rows for an engine, never more than there are free slots."""

    def __init__(
        self,
        *,
        liveness: Liveness,
        served: Served,
        concurrency: int,
        using: str,
        observed: Observed | None = None,
        max_jobs: int | None = None,
        on_recycle: Callable[[bool], None] = lambda usable: None,
        on_spent: Callable[[], None] = lambda: None,
        on_death: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._liveness = liveness
        self._served = served
        self._using = using
        self._observed = observed or Observed()
        self._max_jobs = max_jobs
        self._on_spent = on_spent
        self._claiming = True
        self._expect_work()
        self._limited = LimitedClaims(using=using)
        self._engine = Engine(
            concurrency,
            liveness=liveness,
            using=using,
            on_free=self.wake,
            on_fewer=self._wake_limited,
            on_recycle=on_recycle,
            on_death=on_death,
        )
        self._loop = Loop(self.tick, name="claim", on_death=on_death)
        self.claimed = 0

    def start(self) -> None:
        """Start claiming."""
        self._engine.start()
        self._loop.start()

    def wake(self) -> None:
        """Look for work now; safe from any thread."""
        self._expect_work()
        self._loop.wake()

    def _expect_work(self) -> None:
        self._soon = iter(SOON)
        self._delay = SOON[-1]

    def _wake_limited(self, names: Collection[str]) -> None:
        self._limited.wake(names)
        self.wake()

    def look(self) -> None:
        """Look for cancel marks now; safe from any thread."""
        self._engine.look()

    def wanted(self) -> int:
        """Return how many rows it would claim now: 0 while it is full, congested, spent or ending; from any thread."""
        if not self._claiming:
            return 0
        room = self._engine.room
        return room if self._max_jobs is None else min(room, self._max_jobs - self.claimed)

    def tick(self, now: datetime | None = None) -> float:
        """Claim once for the free slots; return the seconds until the next look."""
        settings = get_settings()
        free = self.wanted()
        if not free:
            # A slot that becomes free wakes this loop.
            return settings.poll_interval
        claimed = 0
        # Each part starts at once: the claim of the next one may fail, and these are this worker's already.
        for rows in self.claims(free, now):
            claimed += len(rows)
            self.claimed += len(rows)
            self._expect_work()
            self._engine.is_hungry = claimed < free
            self._engine.submit(rows)
            if self.claimed == self._max_jobs:
                self._on_spent()
        if claimed:
            # Fewer rows came than there was room for, so nothing more waits: another query at once would only take
            # the interpreter from the slots that are about to start.
            return min(next(self._soon), settings.poll_interval) if self._engine.is_hungry else 0.0
        if not self._engine.is_hungry:
            self._engine.is_hungry = True
            if not self._engine.running():
                self._engine.hurry()
        if (soon := next(self._soon, None)) is not None:
            return min(soon, settings.poll_interval)
        self._delay = min(self._delay * 2, settings.poll_interval)
        return self._delay * random.uniform(0.8, 1.0)

    def claims(self, limit: int, now: datetime | None = None) -> Iterator[list[JobExecution]]:
        """Take up to `limit` rows in parts, none of them empty, best first over all queues this worker serves."""
        paused = self._observed.recent_pauses()
        known = registry.names() - paused.jobs
        queues = self._queues(self._served - paused.queues)
        if not known or not queues:
            return
        now, worker_id = now or clock.now(self._using), self._liveness.worker_id
        limited = known & registry.limited_names()
        names = sorted(known - limited)
        if limited and (seen := self._limited.ready(limited.intersection(self._observed.limited_jobs))):
            for rows in self._limited.claims(seen, names, queues, limit, worker_id=worker_id, now=now):
                limit -= len(rows)
                yield rows
        for rows in self._other_claims(names, list(queues), limit, now):
            limit -= len(rows)
            yield rows
        # When nothing else is left, it costs nothing to look for rows of these jobs that stage has not seen yet.
        if limited and limit and (ready := self._limited.ready(limited)):
            yield from self._limited.claims(ready, (), queues, limit, worker_id=worker_id, now=now)

    def _other_claims(
        self, names: list[str], queues: list[str], limit: int, now: datetime
    ) -> Iterator[list[JobExecution]]:
        while names and limit and queues:
            queue, bound = self._best_queue(queues, names)
            if queue is None:
                break
            rows = transitions.claim(
                queue=queue,
                names=names,
                worker_id=self._liveness.worker_id,
                limit=limit,
                now=now,
                using=self._using,
                max_rank=bound,
            )
            if not rows or bound is None:
                # Other workers were faster, or this queue is empty now.
                queues.remove(queue)
            if rows:
                limit -= len(rows)
                yield rows

    def served_queues(self) -> list[str]:
        """Return the queues to claim from now: the named ones, or any that a job declares or that has pending rows."""
        return self._queues(self.served)

    @property
    def served(self) -> Served:
        """The queues from which it would claim now, whether it has seen them or not."""
        return self._served - self._observed.paused_queues

    def _queues(self, served: Served) -> list[str]:
        return sorted(served.among(registry.queues() | self._observed.pending_queues))

    def _best_queue(self, queues: list[str], names: list[str]) -> tuple[str | None, int | None]:
        """Return the queue with the best head, and the rank of the next queue's head, up to which to claim from it."""
        if len(queues) == 1:
            return queues[0], None
        best = heads(queues, names, limit=1, using=self._using)
        if not best:
            return None, None
        return best[0].queue, best[1].rank if len(best) > 1 else None

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs, nothing is unwritten and the last look found nothing."""
        return self._engine.is_hungry and self._engine.is_idle

    @property
    def ended(self) -> Mapping[str, int]:
        """How many runs ended and were written, by the status that their rows got."""
        return self._engine.ended

    @property
    def loops(self) -> Sequence[Loop]:
        """The loops that have to turn while it works."""
        return self._loop, *self._engine.loops

    def running(self) -> Mapping[UUID, Run]:
        """Runs in slots, by execution id."""
        return self._engine.running()

    def stop_claiming(self) -> None:
        """Start nothing new; running executions go on."""
        self._claiming = False
        self._loop.stop()
        self._engine.is_hungry = True
        self._engine.hurry()

    def drain(self, timeout: float) -> bool:
        """Stop claiming and wait for what runs; return whether all of it ended and was written in time."""
        deadline = time.monotonic() + timeout
        self.stop_claiming()
        # A claim that is under way may still bring rows; until it is over, an idle engine means nothing.
        self._loop.join(timeout)
        return self._engine.wait_idle(deadline)

    def shutdown(self, deadline: float) -> bool:
        """Signal and interrupt running executions, write all ends, stop the threads; by the monotonic `deadline`."""
        self.stop_claiming()
        written = self._engine.shutdown(deadline)
        self._loop.join(max(deadline - time.monotonic(), 0.1))
        return written
