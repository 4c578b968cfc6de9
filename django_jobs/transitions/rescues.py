"""RUNNING rows of dead workers: queued again, or ended with an error."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import transaction
from django.db.models import Case, F, Q, Value, When

from django_jobs.contention import passes_over_locks, retried
from django_jobs.fields import UTCDateTimeField
from django_jobs.models import JobExecution
from django_jobs.querysets import ExecutionQuerySet
from django_jobs.rows import by_id
from django_jobs.states import FINAL, Status
from django_jobs.transitions.endings import with_entry

RESCUES_ALLOWED = 2

_unmarked = Q(cancel_requested_at__isnull=True)


def rescue(queryset: ExecutionQuerySet, *, now: datetime, error: str, entry: dict[str, Any]) -> list[UUID]:
    """Queue running rows of dead workers again, counting the attempt; a marked row ends CANCELLED. Called by rescue.

    `queryset` selects lost rows, and is evaluated again inside each UPDATE. `entry` is for the history, without the
    attempt. Rows without attempts left, or rescued too often, are left to bury().
    """
    lost = queryset.running().filter(attempt__lt=F("max_attempts"), rescues__lt=RESCUES_ALLOWED)
    return _leave_lost(lost, Status.PENDING, now, error, entry)


def bury(queryset: ExecutionQuerySet, *, now: datetime, error: str, entry: dict[str, Any]) -> list[UUID]:
    """End running rows of dead workers with an error; a marked row ends CANCELLED. Called by rescue."""
    return _leave_lost(queryset.running(), Status.ERROR, now, error, entry)


def _leave_lost(
    lost: ExecutionQuerySet, target: Status, now: datetime, error: str, entry: dict[str, Any]
) -> list[UUID]:
    moved = []
    for pk, run_no, attempt, errors in lost.values_list("pk", "run_no", "attempt", "errors"):
        history = with_entry(errors, {**entry, "attempt": attempt})
        if _leave_one(lost.filter(pk=pk, run_no=run_no), pk, target, now, error, history):
            moved.append(pk)
    return moved


# Repeated row by row: a collision must not lose track of the rows that were moved before it.
@retried
def _leave_one(
    lost: ExecutionQuerySet, pk: UUID, target: Status, now: datetime, error: str, history: list[Any] | None
) -> int:
    moment = Value(now, output_field=UTCDateTimeField())
    values = {
        "active_key": None if target in FINAL else Case(When(_unmarked, then=F("active_key")), default=None),
        "completed_at": moment if target in FINAL else Case(When(_unmarked, then=None), default=moment),
        "error": error,
        "errors": history,
        "rescues": F("rescues") + 1,
        "hinted_at": now,
        "updated_at": now,
        "status": Case(When(_unmarked, then=Value(target)), default=Value(Status.CANCELLED)),
    }
    using = lost.written_to
    if not passes_over_locks(using):
        return lost.update(**values)
    with transaction.atomic(using=using):
        # Without waiting: the holder of one row, perhaps frozen, must not keep all others from being rescued.
        one = JobExecution.objects.using(using).filter(pk=pk).select_for_update(skip_locked=True)
        with by_id(using):
            return lost.update(**values) if one.values_list("pk", flat=True) else 0
