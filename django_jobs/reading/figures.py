"""How many executions jobs have, by status, from one statement of bounded cost; for reading.overview."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from django.db import connections
from django.db.models import Q

from django_jobs.models import JobExecution
from django_jobs.states import Parked, Status

if TYPE_CHECKING:
    from django_jobs.definition import Job
    from django_jobs.querysets import ExecutionQuerySet

# Counting stops here, and the answer is "more": a full count of a large table takes seconds.
COUNTED = 10_000
KEPT = (Status.OK.value, Status.ERROR.value, Status.CANCELLED.value)
# Rows parked because no live worker knows their job are counted apart, so that other parked rows do not hide them.
UNKNOWN = Parked.UNKNOWN.value
# The kind of pending rows that are counted once more, by queue.
QUEUE = "queue"

# SQL and its parameters.
Statement = tuple[str, list[Any]]


@dataclass(frozen=True, slots=True)
class Figure:
    """A number of rows; `is_cut` says that there may be more, since counting stops at COUNTED."""

    count: int = 0
    is_cut: bool = False

    def __str__(self) -> str:
        return f"{self.count}+" if self.is_cut else str(self.count)

    def __bool__(self) -> bool:
        return self.count > 0 or self.is_cut

    def __add__(self, other: Figure) -> Figure:
        return Figure(self.count + other.count, self.is_cut or other.is_cut)


@dataclass(slots=True)
class Figures:
    """The counts by the name in the rows and their kind: a status, "parked", "unknown", or "queue"."""

    counts: dict[tuple[str, str], Figure] = field(default_factory=dict)
    # The live kinds with more rows than were counted: any job may have more of them.
    cut: frozenset[str] = frozenset()
    # When the latest execution ended, and how.
    ends: dict[str, tuple[datetime, str]] = field(default_factory=dict)

    def of(self, job: Job[...], kind: str) -> Figure:
        """Return how many rows of this kind the job has, under its name and its aliases."""
        return sum((self.counts.get((name, kind), Figure()) for name in job.names), Figure(0, kind in self.cut))

    def last(self, job: Job[...]) -> tuple[datetime, str, str] | None:
        """Return end, status and name of the job's execution that ended last."""
        return max(((*self.ends[name], name) for name in job.names if name in self.ends), default=None)

    def unknown(self) -> dict[str, Figure]:
        """Return the counts of rows whose job no live worker knows, by its name."""
        return {name: figure for (name, kind), figure in sorted(self.counts.items()) if kind == UNKNOWN}

    def queues(self) -> list[str]:
        """Return the queues in which pending rows were found."""
        return [name for name, kind in self.counts if kind == QUEUE]

    def in_queue(self, name: str) -> Figure:
        """Return how many rows are pending in a queue."""
        return self.counts.get((name, QUEUE), Figure(0, QUEUE in self.cut))


def collect(jobs: Iterable[Job[...]], *, using: str) -> Figures:
    """Count the finished rows of these jobs, and the live rows of all, in one statement.

    At most 10,000 are counted of each job and final status, and of each kind of live rows.
    """
    rows = JobExecution.objects.using(using)
    live = _live(rows)
    parts = [_together([_of_job(name, status, rows, using) for name in job.names for status in KEPT]) for job in jobs]
    parts.append(_together([_grouped(kind, found, using) for kind, found in live.items()]))
    sql, params = _together(parts)
    with connections[using].cursor() as cursor:
        cursor.execute(sql, params)
        found = cursor.fetchall()
    return _read(found, live, using)


def _read(found: list[tuple[Any, ...]], live: Iterable[str], using: str) -> Figures:
    counted = {kind: sum(count for _name, each, count, _ended in found if each == kind) for kind in live}
    cut = frozenset(kind for kind, count in counted.items() if count > COUNTED)
    figures, instant = Figures(cut=cut), _converter(using)
    for name, kind, count, ended in found:
        is_cut = kind in cut or count > COUNTED
        figures.counts[name, kind] = Figure(min(count, COUNTED), is_cut)
        if ended is not None:
            end = (instant(ended), kind)
            figures.ends[name] = max(figures.ends.get(name, end), end)
    return figures


def _live(rows: ExecutionQuerySet) -> dict[str, ExecutionQuerySet]:
    """Return the live rows by kind, each in the order of an index."""
    parked = rows.scheduled().order_by("parked_reason", "scheduled_at")
    return {
        "pending": rows.pending().order_by("-pk"),
        QUEUE: rows.pending().order_by("-pk"),
        "running": rows.running().order_by("-pk"),
        "scheduled": rows.scheduled().filter(parked_reason="").order_by("scheduled_at"),
        "parked": parked.filter(~Q(parked_reason=UNKNOWN), parked_reason__gt=""),
        UNKNOWN: rows.scheduled().filter(parked_reason=UNKNOWN).order_by("scheduled_at"),
    }


def _of_job(name: str, status: str, rows: ExecutionQuerySet, using: str) -> Statement:
    # In the order of the retention index, which covers all columns read here.
    newest = rows.filter(job_name=name, status=status, completed_at__isnull=False).order_by("-completed_at")
    inner, params = _bounded(newest.values("completed_at"), using)
    sql = f"SELECT %s AS name, %s AS kind, COUNT(*) AS n, MAX(completed_at) AS ended FROM ({inner}) rows_of_it"  # noqa: S608 - all ours
    return sql, [name, status, *params]


def _grouped(kind: str, rows: ExecutionQuerySet, using: str) -> Statement:
    """Count the rows of each job, or of each queue."""
    by = "queue" if kind == QUEUE else "job_name"
    # These have not ended; the column is there because all parts must agree on its type.
    inner, params = _bounded(rows.values(by, "completed_at"), using)
    columns = f"{by} AS name, %s AS kind, COUNT(*) AS n, MAX(completed_at) AS ended"
    sql = f"SELECT {columns} FROM ({inner}) rows_of_it GROUP BY {by}"  # noqa: S608 - all ours
    return sql, [kind, *params]


def _bounded(rows: Any, using: str) -> Statement:
    sql, params = rows[: COUNTED + 1].query.get_compiler(using).as_sql()
    return sql, list(params)


def _together(parts: list[Statement]) -> Statement:
    """Return one statement with the rows of all parts; they may be nested, since SQLite takes only 500 side by side."""
    each = [f"SELECT name, kind, n, ended FROM ({sql}) part" for sql, _params in parts]  # noqa: S608 - all ours
    return " UNION ALL ".join(each), [value for _sql, params in parts for value in params]


def _converter(using: str) -> Callable[[Any], datetime]:
    """Return a function that makes an aware instant of the column's value as the driver returns it."""
    connection, column = connections[using], JobExecution._meta.get_field("completed_at")
    expression: Any = column.get_col("rows_of_it")
    steps = [*connection.ops.get_db_converters(expression), *column.get_db_converters(connection)]

    def convert(value: Any) -> datetime:
        for step in steps:
            value = step(value, expression, connection)
        return value  # type: ignore[no-any-return]

    return convert
