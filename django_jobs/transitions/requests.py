"""Transitions that people ask for: start now, cancel, retry."""

from __future__ import annotations

from datetime import datetime

from django.db.models import F

from django_jobs.contention import retried
from django_jobs.querysets import ExecutionQuerySet
from django_jobs.states import Status


@retried
def start_now(queryset: ExecutionQuerySet, *, now: datetime) -> int:
    """Make scheduled rows claimable before their time; called by services."""
    return queryset.scheduled().update(
        parked_reason="", scheduled_at=now, hinted_at=now, updated_at=now, status=Status.PENDING
    )


@retried
def cancel(queryset: ExecutionQuerySet, *, now: datetime, by: str, by_name: str) -> int:
    """End waiting rows as CANCELLED; called by services."""
    return queryset.filter(status__in=(Status.PENDING, Status.SCHEDULED)).update(
        active_key=None,
        # The start of an earlier attempt: it did not run until now.
        started_at=None,
        cancel_requested_at=now,
        cancelled_by=by,
        cancelled_by_name=by_name,
        parked_reason="",
        completed_at=now,
        updated_at=now,
        status=Status.CANCELLED,
    )


@retried
def mark_cancel(queryset: ExecutionQuerySet, *, now: datetime, by: str, by_name: str) -> int:
    """Mark running rows for cancel; they leave RUNNING when the run obeys. Called by services; safe to repeat."""
    return (
        queryset.running()
        .filter(cancel_requested_at__isnull=True)
        .update(cancelled_by=by, cancelled_by_name=by_name, updated_at=now, cancel_requested_at=now)
    )


@retried
def retry(
    queryset: ExecutionQuerySet, *, now: datetime, retries: int, by: str, by_name: str, active_key: str | None = None
) -> int:
    """Queue failed and cancelled rows again with `retries` + 1 more attempts; called by services.

    Raises IntegrityError when another live row of the job holds `active_key`.
    """
    return queryset.filter(status__in=(Status.ERROR, Status.CANCELLED)).update(
        max_attempts=F("attempt") + 1 + retries,
        rescues=0,
        active_key=active_key,
        cancel_requested_at=None,
        completed_at=None,
        scheduled_at=now,
        hinted_at=now,
        updated_at=now,
        retried_at=now,
        retried_by=by,
        retried_by_name=by_name,
        status=Status.PENDING,
    )
