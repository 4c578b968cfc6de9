"""The best pending rows of queues, which tell the worker where to claim next, and which rows of jobs with a limit."""

from __future__ import annotations

from collections.abc import Sequence

from django.db import connections

from django_jobs import rows
from django_jobs.models import JobExecution
from django_jobs.runtime.portions import portions

HEAD = rows.Columns({"id", "job_name", "queue", "rank", "scheduled_at"}, instants_as_seconds=True)
# The most queues in one statement, fewer if there are many names of jobs: SQLite takes 32,766 parameters, and 500
# parts.
AT_ONCE = 50
PARAMETERS = 10_000


def heads(queues: Sequence[str], names: Sequence[str], *, limit: int, using: str) -> list[JobExecution]:
    """Return up to `limit` of the best rows of each queue with these names, best first; only the columns of HEAD."""
    at_once = max(1, min(AT_ONCE, PARAMETERS // (len(names) + 2)))
    found: list[JobExecution] = []
    for part in portions(queues, at_once):
        found += _read(part, names, limit, using)
    found.sort(key=lambda row: (row.rank, row.scheduled_at, row.pk))
    return found


def _read(queues: Sequence[str], names: Sequence[str], limit: int, using: str) -> list[JobExecution]:
    connection = connections[using]
    known, known_names = rows.of_jobs(names, connection)
    # Each queue on its own, since only then the index returns its rows in order; in one statement, since a worker runs
    # it at every look. SQLite accepts ORDER BY in a part of a UNION only in a subquery.
    head = (
        f"SELECT {HEAD.sql(connection)} FROM {rows.TABLE} WHERE status = 'pending' AND queue = %s AND {known} "  # noqa: S608 - our names
        f"ORDER BY {connection.ops.quote_name('rank')}, scheduled_at, id LIMIT %s"
    )
    statement = " UNION ALL ".join(f"SELECT * FROM ({head}) AS head{number}" for number in range(len(queues)))  # noqa: S608 - as above
    parameters = [value for queue in queues for value in (queue, *known_names, limit)]
    with connection.cursor() as cursor:
        cursor.execute(statement, parameters)
        return HEAD.executions(cursor.fetchall(), connection)
