"""RUNNING to the outcome of a run: write endings, many at once, each fenced by the number of its run."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import connections, transaction

from django_jobs import rows
from django_jobs.contention import passes_over_locks, retried
from django_jobs.models import JobExecution
from django_jobs.states import FINAL, Status
from django_jobs.transitions.endings import Ending


class _Incomplete(Exception):
    """Some rows of a batch no longer belonged to this worker."""


@retried
def finish(endings: Sequence[Ending], *, now: datetime, using: str, wait: bool = True) -> dict[UUID, Status]:
    """Write how runs ended, in one transaction; return the rows that moved with the status they got.

    A row that is missing in the answer no longer belonged to its run: it was rescued, finished or deleted. With
    `wait=False` it may also be held by another transaction, which still_running() tells; on SQLite, where one writer
    holds all rows, this waits in any case.
    """
    connection = connections[using]
    wait = wait or not passes_over_locks(using)
    try:
        with transaction.atomic(using=using, savepoint=len(endings) > 1):
            if not wait and connection.vendor == "mysql":
                # An UPDATE cannot skip locked rows, nor read its own table to find those that are free.
                endings, wait = _free(endings, connection), True
            return _finish_all(endings, now, connection, wait)
    except _Incomplete:
        with transaction.atomic(using=using):
            moved: dict[UUID, Status] = {}
            for ending in endings:
                if _write([ending], now, connection, wait) == 1:
                    moved |= _statuses([ending], connection)
            return moved


def still_running(endings: Sequence[Ending], *, using: str) -> set[UUID]:
    """Return those of the rows that finish() did not move which still belong to their runs."""
    expected = {ending.execution_id: ending.run_no for ending in endings}
    found = JobExecution.objects.using(using).running().filter(pk__in=list(expected))
    return {pk for pk, run_no in found.values_list("pk", "run_no") if expected[pk] == run_no}


def _free(endings: Sequence[Ending], connection: Any) -> list[Ending]:
    """Lock the rows that still belong to their runs and that nobody else holds; return their endings."""
    # By id alone: with the status, the plan might use an index on it, and lock that as well.
    those, ids = rows.among([ending.execution_id for ending in endings], connection)
    statement = f"SELECT id, run_no, status FROM {rows.TABLE} WHERE id {those} FOR UPDATE SKIP LOCKED"
    with connection.cursor() as cursor:
        cursor.execute(statement, ids)
        free = {(UUID(pk), run_no) for pk, run_no, status in cursor.fetchall() if status == Status.RUNNING}
    return [ending for ending in endings if (ending.execution_id, ending.run_no) in free]


def _finish_all(endings: Sequence[Ending], now: datetime, connection: Any, wait: bool) -> dict[UUID, Status]:
    groups: dict[tuple[Status, bool, int], list[Ending]] = {}
    for ending in endings:
        # Rows to drop go together if one run number fences them all, which is nearly always so.
        groups.setdefault((ending.status, ending.drop, ending.run_no if ending.drop else 0), []).append(ending)
    written = sum(_write(group, now, connection, wait) for group in groups.values())
    if written == len(endings):
        return _statuses(endings, connection)
    if len(endings) > 1:
        raise _Incomplete
    return {}


def _write(endings: list[Ending], now: datetime, connection: Any, wait: bool) -> int:
    """Write endings of one kind; return how many rows moved."""
    first = endings[0]
    if first.drop:
        deleted = _delete(endings, connection, wait)
        if first.status is not Status.ERROR or deleted == len(endings):
            return deleted
        # The remaining rows are marked, and end CANCELLED, or no longer belong to this worker.
        return deleted + _write([ending._replace(drop=False) for ending in endings], now, connection, wait)
    moment = rows.instant(now, connection)
    alike: dict[tuple[Any, ...], list[UUID]] = {}
    for ending in endings:
        values = (
            int(ending.refund),
            moment,
            rows.instant(ending.scheduled_at, connection),
            ending.error,
            rows.text(ending.errors),
            ending.fingerprint,
            rows.text(ending.logs),
            rows.text(ending.result),
            rows.text(ending.progress),
            moment,
            moment,
        )
        alike.setdefault((values, ending.run_no), []).append(ending.execution_id)
    table = rows.by_index("PRIMARY", connection)
    # By statement, which differs with the number of ids except on PostgreSQL.
    batches: dict[str, list[list[Any]]] = {}
    for (values, run_no), ids in alike.items():
        mine, fence = _mine(ids, run_no, connection, wait)
        batches.setdefault(f"UPDATE {table} SET {_ENDED[first.status]} WHERE {mine}", []).append([*values, *fence])
    written = 0
    with connection.cursor() as cursor:
        for statement, parameters in batches.items():
            if len(parameters) == 1:
                cursor.execute(statement, parameters[0])
            else:
                cursor.executemany(statement, parameters)
            written += int(cursor.rowcount)
    return written


def _delete(endings: list[Ending], connection: Any, wait: bool) -> int:
    first = endings[0]
    ids = [ending.execution_id for ending in endings]
    unmarked = " AND cancel_requested_at IS NULL" if first.status is Status.ERROR else ""
    mine, fence = _mine(ids, first.run_no, connection, wait, unmarked)
    table = connection.ops.quote_name(rows.TABLE)
    with rows.by_id(connection.alias), connection.cursor() as cursor:
        cursor.execute(f"DELETE FROM {table} WHERE {mine}", fence)
        return int(cursor.rowcount)


def _mine(ids: Sequence[UUID], run_no: int, connection: Any, wait: bool, unmarked: str = "") -> tuple[str, list[Any]]:
    """Return the condition for rows that still belong to their runs, fenced by one number, and its parameters."""
    those, parameters = rows.among(ids, connection)
    mine = f"id {those} AND run_no = %s AND status = 'running'{unmarked}"
    if not wait:
        # An array is evaluated once; a plain IN may run its subquery for each row.
        mine = f"id = ANY (ARRAY (SELECT id FROM {rows.TABLE} WHERE {mine} FOR UPDATE SKIP LOCKED))"
    return mine, [*parameters, run_no]


def _ended(target: Status) -> str:
    marked = "cancel_requested_at IS NOT NULL"
    if target in FINAL:
        key, completed = "NULL", "%s"
    else:
        key = f"CASE WHEN {marked} THEN NULL ELSE active_key END"
        completed = f"CASE WHEN {marked} THEN %s ELSE NULL END"
    turned = target not in (Status.OK, Status.CANCELLED)
    status = f"CASE WHEN {marked} THEN 'cancelled' ELSE '{target.value}' END" if turned else f"'{target.value}'"
    return (
        f"attempt = attempt - %s, active_key = {key}, completed_at = {completed}, "
        "scheduled_at = COALESCE(%s, scheduled_at), error = COALESCE(%s, error), errors = COALESCE(%s, errors), "
        "fingerprint = COALESCE(%s, fingerprint), logs = COALESCE(%s, logs), result = %s, "
        f"progress = COALESCE(%s, progress), hinted_at = %s, updated_at = %s, status = {status}"
    )


_ENDED: dict[Status, str] = {target: _ended(target) for target in Status if target is not Status.RUNNING}


def _statuses(endings: Sequence[Ending], connection: Any) -> dict[UUID, Status]:
    moved = {ending.execution_id: ending.status for ending in endings}
    # Only these can have become CANCELLED by a mark.
    turned = (Status.ERROR, Status.SCHEDULED, Status.PENDING)
    asked = [ending.execution_id for ending in endings if ending.status in turned]
    if asked:
        cancelled = JobExecution.objects.using(connection.alias).filter(pk__in=asked, status=Status.CANCELLED)
        moved.update(dict.fromkeys(cancelled.values_list("pk", flat=True), Status.CANCELLED))
    return moved
