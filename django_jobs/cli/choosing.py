"""Which executions a command is about, by ids or by filters; whatever is unknown or malformed is a UsageError."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from datetime import UTC, datetime, timedelta
from uuid import UUID

from django.utils import timezone
from django.utils.dateparse import parse_datetime

from django_jobs import registry
from django_jobs.cli.errors import UsageError
from django_jobs.fields import uuid7_at
from django_jobs.models import JobExecution
from django_jobs.querysets import ExecutionQuerySet
from django_jobs.reading.listing import edge, id_bounds, of_status
from django_jobs.runtime.portions import distinct
from django_jobs.text import some, storable

UNITS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
NEAR = 5
# The most executions in one list.
MOST = 1_000_000
NONE_BEGINS = "none begins with it."
# Seconds. Ids carry the time of the machine that made them, created_at that of the database.
SKEW = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """The filters of a list; None lets everything pass."""

    job: str | None = None
    queue: str | None = None
    status: str | None = None
    key: str | None = None
    organization: str | None = None
    since: str | None = None

    @property
    def is_empty(self) -> bool:
        """Whether everything passes."""
        return all(value is None for value in astuple(self))


def filtered(filters: Filters, *, now: datetime, using: str) -> ExecutionQuerySet:
    """Return the executions that pass. Raises UsageError for an unknown job and for a malformed time."""
    rows = of_status(JobExecution.objects.using(using).all(), filters.status)
    if filters.job is not None:
        rows = rows.filter(job_name__in=job_names(filters.job, using=using))
    if filters.queue is not None:
        rows = rows.filter(queue=_storable(filters.queue))
    if filters.key is not None:
        organization = None if filters.organization is None else _storable(filters.organization)
        rows = rows.with_key(organization, _storable(filters.key))
    elif filters.organization is not None:
        rows = rows.filter(organization_id=_storable(filters.organization))
    if filters.since is not None:
        since = moment(filters.since, now=now)
        rows = rows.filter(created_at__gte=since, pk__gte=_first_id(since))
    return rows


def newest(filters: Filters, *, now: datetime, using: str) -> tuple[ExecutionQuerySet, bool]:
    """Return filtered(), newest first; and whether it is limited to the newest rows, as no index serves the filters."""
    rows = filtered(filters, now=now, using=using).order_by("-pk")
    if filters.key is not None or (filters.queue is None and filters.organization is None):
        return rows, False
    above = edge(filters.status, using=using)
    return (rows, False) if above is None else (rows.filter(pk__gt=above), True)


def job_names(name: str, *, using: str) -> tuple[str, ...]:
    """Return all names of a job; raise UsageError when it is not registered and no row has its name."""
    job = registry.find(name)
    if job is not None:
        return job.names
    known = distinct(JobExecution.objects.using(using).all(), "job_name")
    if name in known:
        return (name,)
    near = difflib.get_close_matches(name, registry.names().union(known), n=1)
    mend = f"did you mean {near[0]!r}?" if near else "is it in the jobs.py of an installed app?"
    raise UsageError(f"No job is called {name!r}, and no execution belongs to one; {mend}")


def whole_id(text: str, *, using: str) -> UUID:
    """Return a whole id, which commands that change rows require; raise UsageError with those that begin like it."""
    if (pk := _uuid(text)) is not None:
        return pk
    near = _beginning_with(text, using=using)
    raise UsageError(
        f"{text!r} is not a whole id; " + (f"these begin with it: {some(near, NEAR)}" if near else NONE_BEGINS)
    )


def begun_id(text: str, *, using: str) -> UUID:
    """Return the id, or the only one that begins with this text; raise UsageError when there is none, or several."""
    if (pk := _uuid(text)) is not None:
        return pk
    near = _beginning_with(text, using=using)
    if not near:
        raise UsageError(f"{text!r} is not the id of an execution; {NONE_BEGINS}")
    if len(near) > 1:
        raise UsageError(f"{text!r} is the beginning of several ids, newest first: {some(near, NEAR)}")
    return near[0].pk


def _uuid(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None


def _beginning_with(text: str, *, using: str) -> list[JobExecution]:
    """Return the newest executions whose id begins with the text, one more than a message names."""
    bounds = id_bounds(text)
    if bounds is None:
        raise UsageError(
            f"{text!r} is not the id of an execution, or at least its first 6 digits; manage.py jobs list shows them."
        )
    rows = JobExecution.objects.using(using).filter(pk__gte=bounds[0], pk__lte=bounds[1])
    return list(rows.order_by("-pk").only("pk", "job_name")[: NEAR + 1])


def executions(texts: Sequence[str], *, using: str) -> tuple[ExecutionQuerySet, list[UUID]]:
    """Return the executions with these ids, and the ids without an execution.

    Raises UsageError when a text is not an id, or when none of the executions exists.
    """
    ids = list(dict.fromkeys(whole_id(text, using=using) for text in texts))
    rows = JobExecution.objects.using(using).filter(pk__in=ids)
    found = set(rows.values_list("pk", flat=True))
    if not found:
        raise UsageError(gone(ids[0]) if len(ids) == 1 else f"None of these {len(ids)} executions exists.")
    return rows, [pk for pk in ids if pk not in found]


def gone(pk: UUID) -> str:
    """Return the message for an id without a row."""
    return f"There is no execution {pk}; it may have been trimmed after it finished."


def moment(text: str, *, now: datetime) -> datetime:
    """Return an instant: a length of time before now ("90", "30min", "2h", "7d"), or a date with or without a time."""
    if re.fullmatch(r"[\d.]+\s*[a-z]*", text):
        try:
            return now - timedelta(seconds=seconds(text, "--since"))
        except OverflowError as error:
            raise UsageError(f"--since is {text!r}; that is outside the years 1 to 9999.") from error
    try:
        found = parse_datetime(text if len(text) > 10 else f"{text} 00:00")
    except ValueError:
        found = None
    if found is None:
        raise UsageError(f"--since is {text!r}; expected a length of time, as 30min or 7d, or 2026-03-01T12:00.")
    found = timezone.make_aware(found) if timezone.is_naive(found) else found
    try:
        found.astimezone(UTC)
    except OverflowError as error:
        raise UsageError(f"--since is {text!r}; that is outside the years 1 to 9999.") from error
    return found


def seconds(text: str, option: str) -> float:
    """Return a length of time in seconds, which is also the unit of a bare number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text)
    unit = 1 if match is None or not match[2] else UNITS.get(match[2])
    if match is None or unit is None:
        raise UsageError(f"{option} is {text!r}; expected seconds, or a number with one of {', '.join(UNITS)}.")
    return float(match[1]) * unit


def checked_limit(limit: int, *, least: int) -> int:
    """Return the limit of a list; raise UsageError if it is too small or too large."""
    if not least <= limit <= MOST:
        raise UsageError(f"--limit is {limit}; expected a whole number from {least} to {MOST}.")
    return limit


def _first_id(since: datetime) -> UUID:
    """Return the lowest id that can be made from this instant on, by any machine's clock."""
    return uuid7_at(max(int((since.timestamp() - SKEW) * 1000), 0))


def _storable(text: str) -> str:
    # Databases refuse to search for it. Python turns bytes on a command line that are not UTF-8 into lone surrogates.
    if storable(text) != text:
        raise UsageError(f"{text!r} contains NUL or bytes that are not UTF-8, which no execution does.")
    return text
