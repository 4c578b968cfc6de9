"""How a run left RUNNING, as a value: made by one verb for each way, written by finish()."""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from django_jobs.models import JobExecution
from django_jobs.states import Status

ERRORS_KEPT = 20


class Ending(NamedTuple):
    """How one run left RUNNING, ready to be written; fenced by `run_no`."""

    execution_id: UUID
    run_no: int
    status: Status
    # Give the attempt back: the run does not count.
    refund: bool = False
    scheduled_at: datetime | None = None
    error: str | None = None
    errors: list[Any] | None = None
    fingerprint: str | None = None
    logs: list[Any] | None = None
    result: Any = None
    progress: Any = None
    # Delete the row instead, since its job keeps no such rows.
    drop: bool = False


def succeed(row: JobExecution, **detail: Any) -> Ending:
    """End a run as OK, even if a cancel mark came too late."""
    return Ending(execution_id=row.pk, run_no=row.run_no, status=Status.OK, error="", **detail)


def fail(row: JobExecution, *, error: str, entry: dict[str, Any] | None = None, **detail: Any) -> Ending:
    """End a run for good with an error; a row marked for cancel ends CANCELLED."""
    errors = with_entry(row.errors, entry)
    return Ending(execution_id=row.pk, run_no=row.run_no, status=Status.ERROR, error=error, errors=errors, **detail)


def reschedule(
    row: JobExecution, *, at: datetime, error: str | None = None, entry: dict[str, Any] | None = None, **detail: Any
) -> Ending:
    """Schedule the next attempt or, with `refund`, a run that the handler asked for; a marked row ends CANCELLED."""
    errors = with_entry(row.errors, entry)
    return Ending(
        execution_id=row.pk,
        run_no=row.run_no,
        status=Status.SCHEDULED,
        scheduled_at=at,
        error=error,
        errors=errors,
        **detail,
    )


def release(row: JobExecution, **detail: Any) -> Ending:
    """Hand a run back: PENDING, and the attempt does not count; a marked row ends CANCELLED."""
    return Ending(execution_id=row.pk, run_no=row.run_no, status=Status.PENDING, refund=True, **detail)


def abort(row: JobExecution, *, entry: dict[str, Any] | None = None, **detail: Any) -> Ending:
    """End a run that obeyed its cancel."""
    errors = with_entry(row.errors, entry)
    return Ending(execution_id=row.pk, run_no=row.run_no, status=Status.CANCELLED, errors=errors, **detail)


def with_entry(errors: list[Any], entry: dict[str, Any] | None) -> list[Any] | None:
    """Return the error history with one more entry, at most the newest twenty; None when there is nothing to add."""
    return None if entry is None else [*errors, entry][-ERRORS_KEPT:]
