"""The best pending rows of queues, for the worker: where to claim next, and which rows of jobs with a limit."""

from __future__ import annotations

from collections.abc import Sequence

from django.db import connections

from django_jobs import rows
from django_jobs.models import JobExecution

HEAD = rows.Columns({"id", "job_name", "queue", "rank", "scheduled_at"}, instants_as_seconds=True)
# So many queues are asked for in one statement, fewer where the names of the jobs are many: SQLite takes 32,766
# parameters, and 500 parts.
AT_ONCE = 50
PARAMETERS = 10_000


def heads(queues: Sequence[str], names: Sequence[str], *, limit: int, using: str) -> list[JobExecution]:
    """Return up to `limit` of the best rows of each queue under these names, best first; of their fields only HEAD."""
    at_once = max(1, min(AT_ONCE, PARAMETERS // (len(names) + 2)))
    found: list[JobExecution] = []
    for start in range(0, len(queues), at_once):
        found += _read(queues[start : start + at_once], names, limit, using)
    found.sort(key=lambda row: (row.rank, row.scheduled_at, row.pk))
    return found


def _read(queues: Sequence[str], names: Sequence[str], limit: int, using: str) -> list[JobExecution]:
    connection = connections[using]
    known, known_names = rows.of_jobs(names, connection)
    # Each queue by itself, since only then the index gives its rows in order; in one statement, since a worker asks at
    # every look. SQLite takes an ORDER BY in parts of a UNION only in a subquery.
    head = (
        f"SELECT {HEAD.sql(connection)} FROM {rows.TABLE} WHERE status = 'pending' AND queue = %s AND {known} "  # noqa: S608 - our names
        f"ORDER BY {connection.ops.quote_name('rank')}, scheduled_at, id LIMIT %s"
    )
    statement = " UNION ALL ".join(f"SELECT * FROM ({head}) AS head{number}" for number in range(len(queues)))  # noqa: S608 - as above
    parameters = [value for queue in queues for value in (queue, *known_names, limit)]
    with connection.cursor() as cursor:
        cursor.execute(statement, parameters)
        return HEAD.executions(cursor.fetchall(), connection)
