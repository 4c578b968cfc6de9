"""Keep few pending rows of each job with `concurrency=`: park what is more, and bring it back best first; for stage.

Claims of other jobs wade through the pending rows of a job that may not start any more of them.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Collection
from datetime import datetime
from uuid import UUID

from django_jobs import concurrency
from django_jobs.definition import Job
from django_jobs.querysets import ExecutionQuerySet
from django_jobs.runtime.moves import Moves
from django_jobs.runtime.portions import PAGE, distinct
from django_jobs.served import Served
from django_jobs.states import Parked

# So many rows of a job stay pending in each queue, or twice its limit: they start without waiting for stage.
KEPT = 50
# So many rows at the head of each queue are looked at; what is behind them is in nobody's way yet.
WINDOW = 1000
# The best of the parked rows of a job and queue that are remembered from one look.
REMEMBERED = 1000
# Parked rows are surveyed so often at most, and for at most a twentieth of the time: it reads all of them.
SURVEY_EVERY = 2.0
SURVEY_SHARE = 20
# After rows came back, look again so soon: short runs use up what is kept long before a second is over.
SOON = 0.2

# Rank, due time and id: the order of claims.
Place = tuple[int, datetime, UUID]
# The name of a job and a queue.
Pair = tuple[str, str]


class Surplus:
    """Parks and brings back rows of the jobs that this process knows to have a limit."""

    def __init__(self, moves: Moves, *, using: str) -> None:
        self._moves = moves
        self._using = using
        # The names of the jobs that have rows near the head of some queue.
        self.seen: frozenset[str] = frozenset()
        self._last_queue = ""
        self._survey_at = 0.0
        self._paused: frozenset[str] = frozenset()
        # Where rows are parked, with the best of them once they were asked for.
        self._parked: dict[Pair, deque[Place] | None] = {}

    def tick(self, now: datetime, paused: frozenset[str], deadline: float) -> float:
        """Park and bring back; return the seconds after which to do so again, 0 if there is more to do now."""
        jobs = [job for job in concurrency.jobs() if job.name not in paused]
        if not jobs:
            self.seen = frozenset()
            return math.inf
        by_name = {name: job for job in jobs for name in job.names}
        heads: dict[Pair, list[Place]] = {}
        edges: dict[str, Place] = {}
        queues = distinct(self._moves.rows().pending(), "queue")
        # From where the last look ended, so that a flood in one queue keeps none of the others from being looked at.
        queues.sort(key=lambda queue: (queue <= self._last_queue, queue))
        more, unseen = False, set(queues)
        for queue in queues:
            if more and time.monotonic() > deadline:
                break
            more |= self._look_at(queue, by_name, heads, edges, now)
            unseen.discard(queue)
            self._last_queue = queue
        self.seen = concurrency.names(by_name[name] for name, _queue in heads) | (self.seen if unseen else frozenset())
        if paused != self._paused:
            self._paused, self._survey_at = paused, 0.0
        self._survey(by_name)
        pairs = [pair for pair in self._parked if pair[1] not in unseen]
        came_back = [self._refill(pair, by_name, heads.get(pair, []), edges, now) for pair in pairs]
        return 0.0 if more else SOON if any(came_back) else math.inf

    def waits(self, paused: Collection[str], served: Served) -> bool:
        """Whether parked rows could run now: their queue is `served`, their job is neither paused nor at its limit."""
        jobs = [job for job in concurrency.jobs() if job.name not in paused]
        names = concurrency.names(jobs) - concurrency.full(jobs, using=self._using)
        return bool(names) and self._parked_rows().filter(served.condition()).among_jobs(names).exists()

    def _look_at(
        self,
        queue: str,
        by_name: dict[str, Job[...]],
        heads: dict[Pair, list[Place]],
        edges: dict[str, Place],
        now: datetime,
    ) -> bool:
        """Note what is at the head of a queue and park the surplus there; return whether more may be behind it."""
        pending = self._moves.rows().pending().filter(queue=queue).order_by("rank", "scheduled_at", "pk")
        window = list(pending.values_list("rank", "scheduled_at", "pk", "job_name")[:WINDOW])
        for rank, at, pk, name in window:
            if name in by_name:
                heads.setdefault((by_name[name].name, queue), []).append((rank, at, pk))
        surplus: list[UUID] = []
        for (name, there), places in heads.items():
            kept = _kept(by_name[name])
            # Not for each single row that is pushed.
            if there == queue and len(places) > 2 * kept:
                surplus += [pk for _, _, pk in places[kept:]]
                del places[kept:]
                # What is remembered of the parked rows may not be the best any more.
                self._parked[name, queue] = None
        for start in range(0, len(surplus), PAGE):
            self._moves.park(surplus[start : start + PAGE], Parked.CONCURRENCY, now)
        if len(window) == WINDOW:
            edges[queue] = window[-1][:3]
        return bool(surplus) and len(window) == WINDOW

    def _survey(self, by_name: dict[str, Job[...]]) -> None:
        """Find where rows are parked: also those that other processes parked, or while their job was paused."""
        started = time.monotonic()
        if started < self._survey_at:
            return
        pairs = self._parked_rows().order_by().values_list("job_name", "queue").distinct()
        self._parked = {(by_name[name].name, queue): None for name, queue in pairs[:WINDOW] if name in by_name}
        ended = time.monotonic()
        self._survey_at = ended + max(SURVEY_EVERY, (ended - started) * SURVEY_SHARE)

    def _refill(
        self, pair: Pair, by_name: dict[str, Job[...]], head: list[Place], edges: dict[str, Place], now: datetime
    ) -> bool:
        """Bring rows back if too few of them are pending; return whether any did."""
        name, queue = pair
        job = by_name.get(name)
        if job is None or len(head) > _kept(job) // 2:
            return False
        best = self._parked[pair]
        if best is None:
            parked = self._parked_rows().filter(queue=queue).among_jobs(job.names)
            ordered = parked.order_by("rank", "scheduled_at", "pk").values_list("rank", "scheduled_at", "pk")
            best = self._parked[pair] = deque(ordered[:REMEMBERED])
        edge = edges.get(queue)
        coming: list[Place] = []
        # Behind the edge they would only be pending for longer.
        while best and len(coming) < _kept(job) - len(head) and (edge is None or best[0] < edge):
            coming.append(best.popleft())
        if not best:
            del self._parked[pair]
            self._survey_at = 0.0 if coming else self._survey_at
        self._moves.unpark([(queue, rank, pk) for rank, _, pk in coming], now)
        return bool(coming)

    def _parked_rows(self) -> ExecutionQuerySet:
        # After a pause the rows of these jobs come back by this, too, instead of all at once.
        return self._moves.rows().scheduled().filter(parked_reason__in=(Parked.CONCURRENCY, Parked.PAUSED))


def _kept(job: Job[...]) -> int:
    return max(KEPT, 2 * (job.concurrency or 0))
