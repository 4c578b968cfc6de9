"""Between SCHEDULED and PENDING: stage makes rows claimable, parks them and brings them back."""

from __future__ import annotations

from datetime import datetime

from django_jobs.contention import retried
from django_jobs.querysets import ExecutionQuerySet
from django_jobs.states import Status


@retried
def promote(queryset: ExecutionQuerySet, *, now: datetime) -> int:
    """Make due, unparked rows claimable; called by stage."""
    return queryset.due(now).update(hinted_at=now, updated_at=now, status=Status.PENDING)


@retried
def park(queryset: ExecutionQuerySet, reason: str, *, now: datetime) -> int:
    """Park pending rows, so that claims need not skip them; they keep their due time, and so their order."""
    return queryset.pending().update(parked_reason=reason, updated_at=now, status=Status.SCHEDULED)


@retried
def unpark(queryset: ExecutionQuerySet, *, now: datetime) -> int:
    """Bring parked rows back; called by stage when the reason is gone."""
    return queryset.parked().update(parked_reason="", hinted_at=now, updated_at=now, status=Status.PENDING)
