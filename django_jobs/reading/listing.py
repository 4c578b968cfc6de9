"""Lists of executions, newest first: the columns they read, and how far a filter without an index searches."""

from __future__ import annotations

import re
from uuid import UUID

from django_jobs.models import JobExecution
from django_jobs.querysets import ExecutionQuerySet
from django_jobs.states import Status

# Without payload, logs, errors and result, which can be megabytes for a hundred rows.
COLUMNS = (
    "id",
    "job_name",
    "queue",
    "status",
    "rank",
    "key",
    "organization_id",
    "attempt",
    "max_attempts",
    "scheduled_at",
    "tick_at",
    "parked_reason",
    "created_at",
    "started_at",
    "completed_at",
    "cancel_requested_at",
    "triggered_by_name",
)
# Filters that no index serves search this many of the newest rows of a status, however large the table is.
WINDOW = 50_000
# A status filter takes a status, or this for scheduled rows that are set aside.
PARKED = "parked"
STATUSES = (*Status.values, PARKED)


def of_status(rows: ExecutionQuerySet, value: str | None) -> ExecutionQuerySet:
    """Return the rows with this value of the status filter; all of them for None."""
    if value is None:
        return rows
    if value == PARKED:
        return rows.parked()
    return rows.filter(status=value) if value in Status.values else rows.none()


def edge(status: str | None, *, using: str) -> UUID | None:
    """Return the id above which a filter without an index searches rows of this status; None when it searches all."""
    rows = of_status(JobExecution.objects.using(using), status)
    return rows.order_by("-pk").values_list("pk", flat=True)[WINDOW : WINDOW + 1].first()


def search(rows: ExecutionQuerySet, term: str, organization_id: str | None) -> ExecutionQuerySet:
    """Return the rows with exactly this key, or else those whose id is or begins with the term; always by an index."""
    term = term.strip()
    keyed = rows.with_key(organization_id, term)
    bounds = id_bounds(term)
    if bounds is None or keyed.order_by().values("pk")[:1].exists():
        return keyed
    return rows.filter(pk__gte=bounds[0], pk__lte=bounds[1])


def id_bounds(term: str) -> tuple[UUID, UUID] | None:
    """Return the lowest and highest id that begin with `term`; None when it is too short or not part of an id."""
    digits = term.replace("-", "").lower()
    if not re.fullmatch(r"[0-9a-f]{6,32}", digits):
        return None
    # Version and variant are those of a time-ordered id: MariaDB sorts ids of other versions differently.
    low, high = list("0" * 12 + "7" + "0" * 3 + "8" + "0" * 15), list("f" * 12 + "7" + "f" * 3 + "b" + "f" * 15)
    low[: len(digits)] = high[: len(digits)] = digits
    return UUID("".join(low)), UUID("".join(high))
