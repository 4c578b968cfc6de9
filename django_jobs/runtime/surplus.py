"""Keep few pending rows of each job with `concurrency=`: park the surplus, and bring it back best first; for stage.

Otherwise claims of other jobs would have to skip all pending rows of a job that is at its limit.
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
from django_jobs.runtime.portions import distinct, portions
from django_jobs.served import Served
from django_jobs.states import Parked

# Rows of a job that stay pending in each queue (or twice its limit): they can start without waiting for stage.
KEPT = 50
# Rows that are looked at, at the head of each queue; those behind them are in nobody's way yet.
WINDOW = 1000
# The best parked rows of a job and queue that are remembered from one look.
REMEMBERED = 1000
# Seconds between surveys, which read all parked rows, and take at most a twentieth of the time.
SURVEY_EVERY = 2.0
SURVEY_SHARE = 20
# Seconds to the next look after rows were brought back: short runs use them up within a fraction of a second.
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
        # The names of jobs with rows near the head of some queue.
        self.seen: frozenset[str] = frozenset()
        self._last_queue = ""
        self._survey_at = 0.0
        self._paused: frozenset[str] = frozenset()
        # The jobs and queues with parked rows; with the best rows, once these have been read.
        self._parked: dict[Pair, deque[Place] | None] = {}

    def tick(self, now: datetime, paused: frozenset[str], deadline: float) -> float:
        """Park and bring back; return the seconds until the next call, 0 if there is more to do now."""
        jobs = [job for job in concurrency.jobs() if job.name not in paused]
        if not jobs:
            self.seen = frozenset()
            return math.inf
        by_name = {name: job for job in jobs for name in job.names}
        heads: dict[Pair, list[Place]] = {}
        edges: dict[str, Place] = {}
        queues = distinct(self._moves.rows().pending(), "queue")
        # Begin after the queue where the last look ended, so that a flood in one queue does not starve the others.
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
        """Whether some parked row could run now: its queue is `served`, its job is neither paused nor at its limit."""
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
        """Read the head of a queue and park the surplus there; return whether there may be more behind it."""
        pending = self._moves.rows().pending().filter(queue=queue).order_by("rank", "scheduled_at", "pk")
        window = list(pending.values_list("rank", "scheduled_at", "pk", "job_name")[:WINDOW])
        for rank, at, pk, name in window:
            if name in by_name:
                heads.setdefault((by_name[name].name, queue), []).append((rank, at, pk))
        surplus: list[UUID] = []
        for (name, there), places in heads.items():
            kept = _kept(by_name[name])
            # Not for every single push.
            if there == queue and len(places) > 2 * kept:
                surplus += [pk for _, _, pk in places[kept:]]
                del places[kept:]
                # The remembered rows may no longer be the best.
                self._parked[name, queue] = None
        for page in portions(surplus):
            self._moves.park(page, Parked.CONCURRENCY, now)
        if len(window) == WINDOW:
            edges[queue] = window[-1][:3]
        return bool(surplus) and len(window) == WINDOW

    def _survey(self, by_name: dict[str, Job[...]]) -> None:
        """Find all parked rows, including those parked by other processes, or while their job was paused."""
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
        """Bring rows back if too few are pending; return whether any came back."""
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
        # Behind the edge they would only be pending for longer, in other claims' way.
        while best and len(coming) < _kept(job) - len(head) and (edge is None or best[0] < edge):
            coming.append(best.popleft())
        if not best:
            del self._parked[pair]
            self._survey_at = 0.0 if coming else self._survey_at
        self._moves.unpark([(queue, rank, pk) for rank, _, pk in coming], now)
        return bool(coming)

    def _parked_rows(self) -> ExecutionQuerySet:
        # After a pause, the rows of these jobs come back this way as well, instead of all at once.
        return self._moves.rows().scheduled().filter(parked_reason__in=(Parked.CONCURRENCY, Parked.PAUSED))


def _kept(job: Job[...]) -> int:
    return max(KEPT, 2 * (job.concurrency or 0))
