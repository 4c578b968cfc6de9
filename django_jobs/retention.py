"""Delete finished rows that a job does not keep, except the newest of each status; for the finisher and trim."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from django.db import transaction
from django.db.models import Q

from django_jobs.clock import EPOCH
from django_jobs.contention import passes_over_locks, retried
from django_jobs.models import JobExecution
from django_jobs.querysets import ExecutionQuerySet
from django_jobs.rows import by_id
from django_jobs.states import Status

BATCH = 500


@dataclass(slots=True)
class Place:
    """How far the portions of a trim have come: all that ended before is gone. Each portion moves it.

    While some transaction is older than the deletions, MariaDB and PostgreSQL keep the deleted rows in the index, and
    each portion would read all of them again if it began at the start.
    """

    at: datetime = EPOCH


@retried
def trim(
    job_name: str,
    status: Status | str,
    keep: int | None,
    max_age: float | None,
    *,
    now: datetime,
    using: str,
    limit: int = BATCH,
    place: Place | None = None,
    other_names: Collection[str] = (),
) -> int:
    """Delete up to `limit` finished rows of one job and status, oldest first, and return how many.

    Deletes rows beyond the newest `keep` (None keeps all, 0 none), and rows that ended more than `max_age` (seconds)
    ago. Rows under the job's `other_names` count, but only those under `job_name` are deleted. If it returns `limit`,
    more may be left: another call with the same `place` continues where this one ended.
    Safe in any number of processes: rows that another one is deleting are skipped.
    """
    place = place or Place()
    found = _surplus((job_name, *other_names), status, keep, max_age, place.at, now, using)
    if found is None:
        return 0
    surplus, until = found
    oldest = surplus.order_by("completed_at", "pk").values_list("pk", "completed_at")
    if not passes_over_locks(using):
        # SQLite: read outside the writing transaction, which could not be upgraded from reading to writing.
        rows = list(oldest[:limit])
        deleted = surplus.filter(pk__in=[pk for pk, _ in rows]).delete_finished() if rows else 0
    else:
        with transaction.atomic(using=using):
            rows = list(oldest.select_for_update(skip_locked=True)[:limit])
            # By id alone: these are locked, while a DELETE that read the range again would wait for the skipped ones.
            deleted = _delete([pk for pk, _ in rows], using)
    if until is not None and len(rows) < limit:
        # Others may have deleted more of it than this portion.
        place.at = until
    elif rows:
        # `or` for the type checker: a finished row always has an end.
        place.at = rows[-1][1] or place.at
    return deleted


@retried
def discard(ids: Collection[UUID], *, using: str) -> int:
    """Delete those of the rows that are finished and not locked by another transaction; return how many."""
    rows = JobExecution.objects.using(using).filter(pk__in=ids)
    if not passes_over_locks(using):
        return rows.delete_finished()
    with transaction.atomic(using=using):
        return _delete(list(rows.select_for_update(skip_locked=True).values_list("pk", flat=True)), using)


def _delete(locked: Collection[UUID], using: str) -> int:
    with by_id(using):
        return JobExecution.objects.using(using).filter(pk__in=locked).delete_finished() if locked else 0


def _surplus(
    names: Sequence[str],
    status: Status | str,
    keep: int | None,
    max_age: float | None,
    since: datetime,
    now: datetime,
    using: str,
) -> tuple[ExecutionQuerySet, datetime | None] | None:
    """Return the rows of the first name to delete among those that ended after `since`, and until when.

    Returns None if all of them stay.
    """
    # At first, every finished row is within the lower bound. But a range makes SQLite and PostgreSQL use the partial
    # index, rather than another one with a sort of all rows of the job.
    all_ended = JobExecution.objects.using(using).filter(status=status, completed_at__gte=since)
    ended = all_ended.filter(job_name=names[0])
    if keep == 0:
        return ended, None
    expired = None if max_age is None else now - timedelta(seconds=max_age)
    last = None if keep is None else _last_kept([all_ended.filter(job_name=name) for name in names], keep, using)
    if last is None or (expired is not None and expired > last[0]):
        # By age alone: rows beyond the count are older than that.
        return None if expired is None else (ended.filter(completed_at__lt=expired), expired)
    at, pk = last
    # The first condition is the range for the index.
    return ended.filter(completed_at__lte=at).filter(Q(completed_at__lt=at) | Q(pk__lt=pk)), at


def _last_kept(by_name: Sequence[ExecutionQuerySet], keep: int, using: str) -> tuple[datetime, UUID] | None:
    """Return when the keep-th newest of all these rows ended, and its id; None if there are fewer."""
    # Without SKIP LOCKED: rows that other trims have locked count as well.
    newest = [ended.only("completed_at").order_by("-completed_at", "-pk") for ended in by_name]
    if len(newest) == 1:
        found: Iterable[JobExecution] = newest[0][keep - 1 : keep]
    else:
        # Merged by the database: to fetch `keep` rows of each name would take most of the time of a trim.
        parts = [ended[:keep].query.get_compiler(using).as_sql() for ended in newest]
        united = " UNION ALL ".join(f"SELECT * FROM ({sql}) AS part{number}" for number, (sql, _) in enumerate(parts))  # noqa: S608 - all ours
        last = f"SELECT * FROM ({united}) AS newest ORDER BY completed_at DESC, id DESC LIMIT 1 OFFSET {keep - 1}"  # noqa: S608 - as above
        found = JobExecution.objects.using(using).raw(last, [value for _, values in parts for value in values])
    # `is not None` for the type checker: a finished row always has an end.
    return next(((row.completed_at, row.pk) for row in found if row.completed_at is not None), None)
