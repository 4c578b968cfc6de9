"""Delete finished rows that a job does not keep: the newest n of a status stay; called by the finisher and by trim."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from django.db import transaction
from django.db.models import Q

from django_jobs.clock import EPOCH
from django_jobs.contention import passes_over_locks, retried
from django_jobs.models import JobExecution
from django_jobs.querysets import ExecutionQuerySet
from django_jobs.states import Status

BATCH = 500


@dataclass(slots=True)
class Place:
    """How far the portions of a trim have come: the end of the last row that went; it moves with each portion.

    While anybody's transaction is older than the deletions, MariaDB and PostgreSQL keep the deleted rows in the index.
    Each portion from the start would read all of them again.
    """

    at: datetime = EPOCH


@retried
def trim(
    job_name: str,
    status: Status | str,
    keep: int | None,
    max_age: timedelta | float | None,
    *,
    now: datetime,
    using: str,
    limit: int = BATCH,
    place: Place | None = None,
) -> int:
    """Delete up to `limit` finished rows of one job and status, the oldest first, and return how many went.

    Those beyond the newest `keep` go (None keeps all, 0 none), and those that ended `max_age` (seconds) ago. An
    answer of `limit` says that more may be left: called again with the same `place`, it goes on where this portion
    ended. Safe in any number of processes: rows another one deletes are skipped.
    """
    place = place or Place()
    surplus = _surplus(job_name, status, keep, max_age, place.at, now, using)
    if surplus is None:
        return 0
    oldest = surplus.order_by("completed_at", "pk").values_list("pk", "completed_at")
    if not passes_over_locks(using):
        # SQLite: read before the write, so that no transaction has to turn from reading to writing.
        rows = list(oldest[:limit])
        deleted = surplus.filter(pk__in=[pk for pk, _ in rows]).delete_finished() if rows else 0
    else:
        with transaction.atomic(using=using):
            rows = list(oldest.select_for_update(skip_locked=True)[:limit])
            # By the id alone: they are locked, and a DELETE that read the range again would wait for those passed over.
            found = JobExecution.objects.using(using).filter(pk__in=[pk for pk, _ in rows])
            deleted = found.delete_finished() if rows else 0
    if rows:
        # A finished row has an end, which its type does not say.
        place.at = rows[-1][1] or place.at
    return deleted


@retried
def discard(ids: Collection[UUID], *, using: str) -> int:
    """Delete those of these rows that are finished and that no other transaction holds; return how many went."""
    rows = JobExecution.objects.using(using).filter(pk__in=ids)
    if not passes_over_locks(using):
        return rows.delete_finished()
    with transaction.atomic(using=using):
        free = list(rows.select_for_update(skip_locked=True).values_list("pk", flat=True))
        return JobExecution.objects.using(using).filter(pk__in=free).delete_finished() if free else 0


def _surplus(
    job_name: str,
    status: Status | str,
    keep: int | None,
    max_age: timedelta | float | None,
    since: datetime,
    now: datetime,
    using: str,
) -> ExecutionQuerySet | None:
    """Return the rows to delete of those that ended since then; None when all of them stay."""
    # At first the lower bound is true of every finished row. A range lets the partial index serve, and keeps SQLite and
    # PostgreSQL from passing it over for another one and sorting all rows of the job.
    ended = JobExecution.objects.using(using).filter(job_name=job_name, status=status, completed_at__gte=since)
    if keep == 0:
        return ended
    age = max_age if max_age is None or isinstance(max_age, timedelta) else timedelta(seconds=max_age)
    expired = None if age is None else now - age
    last = None if keep is None else _last_kept(ended, keep)
    if last is None or (expired is not None and expired > last[0]):
        # By age alone: what the count would delete is older still.
        return None if expired is None else ended.filter(completed_at__lt=expired)
    at, pk = last
    # The first condition is the range the index is read by.
    return ended.filter(completed_at__lte=at).filter(Q(completed_at__lt=at) | Q(pk__lt=pk))


def _last_kept(ended: ExecutionQuerySet, keep: int) -> tuple[datetime, UUID] | None:
    """Return when the keep-th newest row ended, and its id; None when there are no more than that."""
    # A plain read: rows locked by other trims count as kept or not all the same.
    newest = ended.order_by("-completed_at", "-pk").values_list("completed_at", "pk")
    for at, pk in newest[keep - 1 : keep]:
        if at is not None:
            return at, pk
    return None
