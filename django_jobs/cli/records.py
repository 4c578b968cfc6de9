"""Executions as JSON objects; instants in ISO 8601, in UTC."""

from __future__ import annotations

from typing import Any

from django_jobs import registry
from django_jobs.models import JobExecution
from django_jobs.reading.detail import is_masked, worker_name


def brief(row: JobExecution) -> dict[str, Any]:
    """Return the part of an execution that lists show; reads no column beyond reading.listing.COLUMNS."""
    return {
        "id": str(row.pk),
        "job": row.job_name,
        "status": row.status,
        "queue": row.queue,
        "priority": row.priority,
        "key": row.key or None,
        "organization_id": row.organization_id,
        "attempt": row.attempt,
        "max_attempts": row.max_attempts,
        "parked_reason": row.parked_reason or None,
        "is_cancelling": row.is_cancelling,
        "triggered_by": row.triggered_by_name or None,
        "created_at": moment(row.created_at),
        "scheduled_at": moment(row.scheduled_at),
        "tick_at": moment(row.tick_at),
        "started_at": moment(row.started_at),
        "completed_at": moment(row.completed_at),
    }


def ending(row: JobExecution) -> dict[str, Any]:
    """Return the part that the list of jobs shows of a job's last execution."""
    return {"id": str(row.pk), "status": row.status, "completed_at": moment(row.completed_at)}


def full(row: JobExecution) -> dict[str, Any]:
    """Return everything about an execution; payload, result and logs only if its job is not sensitive."""
    masked = is_masked(row)
    return {
        **brief(row),
        "is_registered": registry.find(row.job_name) is not None,
        "is_masked": masked,
        "payload": None if masked else row.payload,
        "result": None if masked else row.result,
        "logs": None if masked else row.logs,
        "progress": row.progress,
        "error": row.error or None,
        "errors": row.errors,
        "rescues": row.rescues,
        "worker_id": None if row.worker_id is None else str(row.worker_id),
        "worker": worker_name(row),
        "updated_at": moment(row.updated_at),
        "cancel_requested_at": moment(row.cancel_requested_at),
        "cancelled_by": row.cancelled_by_name or None,
        "retried_at": moment(row.retried_at),
        "retried_by": row.retried_by_name or None,
        "copied_from": None if row.copied_from is None else str(row.copied_from),
    }


def moment(value: Any) -> str | None:
    """Return an instant in ISO 8601; None stays None."""
    return None if value is None else value.isoformat()
