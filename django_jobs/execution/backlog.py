"""Rows that this process was told of and is to run itself, best first, up to a limit; kept by the direct runner."""

from __future__ import annotations

import heapq
import math
import threading
import time
from collections.abc import Collection, Iterable
from typing import NamedTuple
from uuid import UUID

# Seconds for which the other rows of a job wait at least after a few of them came back.
REST = 1.0


class Entry(NamedTuple):
    """One row; entries sort in the order of claims: by priority, then by id, which is by age."""

    rank: int
    pk: UUID
    queue: str


class Backlog:
    """Holds at most `limit` rows, each once; safe from any thread."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._heap: list[Entry] = []
        self._known: set[UUID] = set()
        # Heaps of rows that could not be claimed, by the job at its limit ("" for another reason).
        self._later: dict[str, list[Entry]] = {}
        # When each heap is looked at again, in monotonic seconds.
        self._due: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._known)

    def put(self, rows: Iterable[Entry]) -> list[UUID]:
        """Add rows that are not here yet; return those that do not fit."""
        left_out = []
        with self._lock:
            for row in rows:
                if row.pk in self._known:
                    continue
                if len(self._known) >= self._limit:
                    left_out.append(row.pk)
                    continue
                self._known.add(row.pk)
                heapq.heappush(self._heap, row)
        return left_out

    def take(self, limit: int) -> list[Entry]:
        """Take out the best due rows, up to `limit`, all from the queue of the first."""
        with self._lock:
            self._bring_back(limit)
            taken: list[Entry] = []
            while self._heap and len(taken) < limit and (not taken or self._heap[0].queue == taken[0].queue):
                taken.append(heapq.heappop(self._heap))
            self._known.difference_update(row.pk for row in taken)
        return taken

    def put_back(self, rows: Iterable[Entry], *, delay: float, job: str = "") -> None:
        """Put taken rows back for another try in `delay` seconds, those of a job at its limit a few at a time."""
        with self._lock:
            for row in rows:
                # Regardless of the limit.
                if row.pk not in self._known:
                    self._known.add(row.pk)
                    heapq.heappush(self._later.setdefault(job, []), row)
                    self._due[job] = min(self._due.get(job, math.inf), time.monotonic() + delay)

    def hasten(self, jobs: Collection[str]) -> None:
        """Make the rows of these jobs due now, since runs of them ended."""
        with self._lock:
            self._due.update(dict.fromkeys(self._due.keys() & jobs, 0.0))

    def _bring_back(self, few: int) -> None:
        now = time.monotonic()
        for job in [job for job, at in self._due.items() if at <= now]:
            waiting = self._later[job]
            for _ in range(min(few, len(waiting)) if job else len(waiting)):
                heapq.heappush(self._heap, heapq.heappop(waiting))
            if waiting:
                # Usually the rows that came back are put back soon, or a run of the job ends.
                self._due[job] = now + REST
            else:
                del self._later[job], self._due[job]
