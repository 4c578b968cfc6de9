"""Delete what is left of jobs that nobody knows any more; `manage.py jobs purge` and the admin's page of jobs call it.

Nothing calls it by itself: a name may be unknown for a while only, as during a deploy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID

from django_jobs import clock, registry, retention, transitions
from django_jobs.clock import EPOCH
from django_jobs.conf import get_settings
from django_jobs.models import JobExecution, Worker
from django_jobs.options import attribution
from django_jobs.querysets import ExecutionQuerySet
from django_jobs.runtime.fleet import LIMIT, UNLISTED_FOR
from django_jobs.runtime.portions import distinct, move
from django_jobs.states import FINAL

BATCH = 500
# Names are asked for one by one, and rows are counted up to here.
NAMES = 10_000
COUNTED = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """The rows of one name that nobody knows; each number goes up to COUNTED + 1."""

    name: str
    finished: int
    parked: int
    # Neither: they wait for their time, for a queue that no worker serves, or run. A purge leaves them alone.
    live: int

    @property
    def purgeable(self) -> int:
        """How many rows a purge takes."""
        return self.finished + self.parked


def unregistered(*, using: str) -> list[str]:
    """Return the names in rows that no job here has and that no process has listed within the last minute."""
    found = set(distinct(JobExecution.objects.using(using).all(), "job_name", limit=NAMES)) - registry.names()
    return sorted(found - _listed(using)) if found else []


def leftovers(names: Iterable[str], *, using: str) -> list[Leftover]:
    """Count the rows of these names."""
    return [_leftover(name, JobExecution.objects.using(using).filter(job_name=name)) for name in names]


def purge(names: Iterable[str], *, using: str, by: Any = None) -> Iterator[int]:
    """Delete the finished and parked rows of these names; yield after each portion how many rows it deleted.

    A name that somebody knows by now is left alone, also in the midst of it. Rows that another transaction holds stay,
    and so do those that wait or run. Parked rows are cancelled first: where this ends half-way, they are seen as what
    they are.
    """
    user, by_name = attribution(by)
    for name in names:
        for ids in _parked(name, using):
            if _is_known(name, using):
                break
            move(ids, partial(_cancel, now=clock.now(using), by=user, by_name=by_name), using=using)
        for status in sorted(FINAL):
            deleted, place = BATCH, retention.Place()
            while deleted == BATCH and not _is_known(name, using):
                deleted = retention.trim(
                    name, status, 0, None, now=clock.now(using), using=using, limit=BATCH, place=place
                )
                if deleted:
                    yield deleted


def _is_known(name: str, using: str) -> bool:
    return name in registry.names() or name in _listed(using)


def _cancel(rows: ExecutionQuerySet, *, now: datetime, by: str, by_name: str) -> int:
    return transitions.cancel(rows.parked(), now=now, by=by, by_name=by_name)


def _parked(name: str, using: str) -> Iterator[list[UUID]]:
    """Yield the ids of the parked rows in pages by key."""
    rest = JobExecution.objects.using(using).filter(job_name=name).parked().order_by("pk")
    page = list(rest.values_list("pk", flat=True)[:BATCH])
    while page:
        yield page
        page = list(rest.filter(pk__gt=page[-1]).values_list("pk", flat=True)[:BATCH])


def _listed(using: str) -> set[str]:
    """Return the names that processes of any role listed lately, whether or not they are live now."""
    since = clock.now(using) - max(UNLISTED_FOR, timedelta(seconds=get_settings().worker_lost_after))
    recent = Worker.objects.using(using).filter(heartbeat_at__gt=since)
    return {name for names in recent.values_list("names", flat=True)[:LIMIT] for name in names}


def _leftover(name: str, rows: ExecutionQuerySet) -> Leftover:
    def count(some: ExecutionQuerySet) -> int:
        return some.order_by().values("pk")[: COUNTED + 1].count()

    finished = rows.finished().filter(completed_at__gt=EPOCH)
    return Leftover(
        name=name, finished=count(finished), parked=count(rows.parked()), live=count(rows.live()) - count(rows.parked())
    )
