"""Claim rows of jobs with `concurrency=` that are among the best; for the worker, which claims all others itself."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime
from functools import partial
from uuid import UUID

from django_jobs import registry, transitions
from django_jobs.models import JobExecution
from django_jobs.runtime.heads import heads

# Seconds for which a job is left alone after a claim in vain, usually because it is at its limit; then ever longer.
FIRST_REST = 0.02
LONGEST_REST = 0.25


class LimitedClaims:
    """Knows which jobs with a limit have reached it for now."""

    def __init__(self, *, using: str) -> None:
        self._using = using
        # By job name: until when it rests, and for how long.
        self._rests: dict[str, tuple[float, float]] = {}

    def ready(self, names: Collection[str]) -> list[str]:
        """Return those of the names, all of jobs with a limit, that may be claimed now."""
        moment = time.monotonic()
        return [name for name in names if self._rests.get(registry.get(name).name, (0.0, 0.0))[0] <= moment]

    def wake(self, names: Collection[str]) -> None:
        """Try these jobs again at once, since runs of them ended; safe from any thread."""
        for name in names:
            self._rests.pop(name, None)

    def claims(
        self,
        names: Collection[str],
        others: Collection[str],
        queues: Sequence[str],
        limit: int,
        *,
        worker_id: UUID,
        now: datetime,
    ) -> Iterator[list[JobExecution]]:
        """Claim those rows of these names that are among the `limit` best of these and the other names.

        Yields what is taken of each job and queue.
        """
        chosen: dict[tuple[str, str], list[UUID]] = {}
        wanted = set(names)
        for row in heads(queues, [*names, *others], limit=limit, using=self._using)[:limit]:
            if row.job_name in wanted:
                chosen.setdefault((registry.get(row.job_name).name, row.queue), []).append(row.pk)
        claim = partial(transitions.claim_within, worker_id=worker_id, now=now, using=self._using)
        for (name, queue), ids in chosen.items():
            job = registry.get(name)
            taken = claim(job, queue=queue, ids=ids, limit=len(ids))
            self._note(name, all_taken=len(taken) == len(ids))
            if taken:
                yield taken

    def _note(self, name: str, *, all_taken: bool) -> None:
        if all_taken:
            self._rests.pop(name, None)
            return
        _until, before = self._rests.get(name, (0.0, FIRST_REST / 2))
        rest = min(before * 2, LONGEST_REST)
        self._rests[name] = (time.monotonic() + rest, rest)
