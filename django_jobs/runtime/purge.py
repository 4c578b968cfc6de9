"""Delete executions of jobs that no process knows any more, for `manage.py jobs purge` and the admin's page of jobs.

Never called automatically: during a deploy, a name may be unknown for a while.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

from django_jobs import clock, registry, retention, transitions
from django_jobs.clock import EPOCH
from django_jobs.models import JobExecution, Worker
from django_jobs.options import attribution
from django_jobs.querysets import ExecutionQuerySet, lost_after
from django_jobs.runtime.fleet import LIMIT, UNLISTED_FOR
from django_jobs.runtime.portions import distinct, move
from django_jobs.services.bulk import pages
from django_jobs.states import FINAL

logger = logging.getLogger("django_jobs")

BATCH = 500
# Names are looked up one by one, at most so many, and rows are counted up to here.
NAMES = 10_000
COUNTED = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """The rows of one unknown name; each number goes up to COUNTED + 1."""

    name: str
    finished: int
    parked: int
    # Neither: they are running, or wait for their time or for a queue that no worker serves. A purge leaves them alone.
    live: int

    @property
    def purgeable(self) -> int:
        """How many rows a purge would delete."""
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

    A name that becomes known is left alone from then on. Rows that another transaction holds stay, and so do waiting
    and running ones. Parked rows are cancelled first, so that they show as cancelled if the purge ends half-way.
    """
    user, by_name = attribution(by)
    for name in names:
        parked = JobExecution.objects.using(using).filter(job_name=name).parked()
        for page in pages(parked.only("pk")):
            if _is_known(name, using):
                break
            move(
                [row.pk for row in page], partial(_cancel, now=clock.now(using), by=user, by_name=by_name), using=using
            )
        gone = 0
        for status in sorted(FINAL):
            deleted, place = BATCH, retention.Place()
            while deleted == BATCH and not _is_known(name, using):
                deleted = retention.trim(
                    name, status, 0, None, now=clock.now(using), using=using, limit=BATCH, place=place
                )
                if deleted:
                    gone += deleted
                    yield deleted
        if gone:
            logger.info("%d executions of %s were purged by %s", gone, name, by_name or "somebody")


def _is_known(name: str, using: str) -> bool:
    return name in registry.names() or name in _listed(using)


def _cancel(rows: ExecutionQuerySet, *, now: datetime, by: str, by_name: str) -> int:
    return transitions.cancel(rows.parked(), now=now, by=by, by_name=by_name)


def _listed(using: str) -> set[str]:
    """Return the names that processes of any role listed lately, whether or not they are live now."""
    since = clock.now(using) - max(UNLISTED_FOR, lost_after())
    recent = Worker.objects.using(using).filter(heartbeat_at__gt=since)
    return {name for names in recent.values_list("names", flat=True)[:LIMIT] for name in names}


def _leftover(name: str, rows: ExecutionQuerySet) -> Leftover:
    def count(some: ExecutionQuerySet) -> int:
        return some.order_by().values("pk")[: COUNTED + 1].count()

    finished = rows.finished().filter(completed_at__gt=EPOCH)
    return Leftover(
        name=name, finished=count(finished), parked=count(rows.parked()), live=count(rows.live()) - count(rows.parked())
    )
