"""Every write of `status`: one verb per transition, each a guarded UPDATE; workers, services and the runtime call them.

No verb raises because somebody else was faster: the number of rows, or their ids, says what happened. Assignments read
only columns that their statement has not assigned yet, and `status` is last: MariaDB evaluates SET from left to right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from django.db import connections, transaction
from django.db.models import Case, F, Q, Value, When

from django_jobs import concurrency, rows
from django_jobs.contention import passes_over_locks, retried, short_transaction
from django_jobs.fields import UTCDateTimeField
from django_jobs.models import JobExecution, JobState
from django_jobs.querysets import ExecutionQuerySet
from django_jobs.states import FINAL, Status

if TYPE_CHECKING:
    from django_jobs.definition import Job

ERRORS_KEPT = 20
RESCUES_ALLOWED = 2

_unmarked = Q(cancel_requested_at__isnull=True)


def insert(executions: Sequence[JobExecution], *, now: datetime, using: str) -> None:
    """Write new rows, PENDING or, when their time is still to come, SCHEDULED; called by push, copies and cron ticks.

    Runs in the caller's transaction. Raises IntegrityError when a live row of the job holds the same key.
    """
    for row in executions:
        later = row.scheduled_at is not None and row.scheduled_at > now
        row.created_at = row.updated_at = row.hinted_at = now
        if not later:
            row.scheduled_at = now
        row.status = Status.SCHEDULED if later else Status.PENDING
    if len(executions) == 1:
        rows.insert(executions[0], connections[using])
    else:
        JobExecution.objects.using(using).bulk_create(executions)


@retried
def claim(
    *,
    queue: str,
    names: Sequence[str],
    worker_id: UUID,
    limit: int,
    now: datetime,
    lost_after: float,
    using: str,
    max_rank: int | None = None,
    ids: Sequence[UUID] | None = None,
) -> list[JobExecution]:
    """Move up to `limit` pending rows of one queue to RUNNING for this worker, best first; called by workers.

    With `ids` only of those: direct mode was told of them, and of jobs with a limit the best are chosen beforehand.
    Takes nothing unless the worker's own row beat within `lost_after` seconds: a worker that others may already have
    declared dead must not start anything.
    """
    if not names or limit < 1 or ids == []:
        return []
    connection = connections[using]
    table, worker_table = rows.TABLE, rows.WORKER_TABLE
    rank = connection.ops.quote_name("rank")
    fresh = f"EXISTS (SELECT 1 FROM {worker_table} WHERE id = %s AND stopped_at IS NULL AND heartbeat_at > %s)"
    marks = ", ".join(["%s"] * len(names))
    known = f"job_name IN ({marks})"
    if connection.vendor == "postgresql":
        # Beside much history the planner takes job and status for unrelated, expects next to no rows, and would rather
        # fetch and sort all that is pending than walk the claim index. It cannot look into a CASE: it expects half.
        known = f"CASE WHEN {known} THEN true ELSE false END"
    # To spare itself a sort, SQLite would walk the claim index past all that is pending; a plus keeps it from that.
    in_queue = "+queue" if ids is not None and connection.vendor == "sqlite" else "queue"
    told, told_ids = ("", []) if ids is None else rows.among(ids, connection)
    best = (
        f"FROM {table} WHERE status = 'pending' AND {in_queue} = %s AND {known}{told and f' AND id {told}'}"
        f"{'' if max_rank is None else f' AND {rank} <= %s'} AND {fresh} ORDER BY {rank}, scheduled_at, id LIMIT %s"
    )
    moment, worker = rows.instant(now, connection), rows.identity(worker_id, connection)
    alive_since = rows.instant(now - timedelta(seconds=lost_after), connection)
    chosen = [queue, *names, *told_ids, *([] if max_rank is None else [max_rank]), worker, alive_since, limit]
    changed = [moment, moment, worker]
    written = {
        "status": Status.RUNNING,
        "worker_id": worker_id,
        "started_at": now,
        "updated_at": now,
        "completed_at": None,
        # As in every pending row.
        "parked_reason": "",
        "cancel_requested_at": None,
    }
    if connection.vendor == "mysql":
        return _claim_in_two_steps(connection, best, chosen, changed, written)
    if connection.vendor == "postgresql":
        # An array is made once: a plain subquery may run again for each row, and lock more of them than the limit. The
        # planner needs half as long for it as for a join with a CTE.
        those = f"id = ANY (ARRAY (SELECT id {best} FOR NO KEY UPDATE SKIP LOCKED))"
    else:
        those = f"id IN (SELECT id {best}) AND status = 'pending'"
    statement = f"UPDATE {table} SET {_CLAIMED} WHERE {those} RETURNING {rows.columns(connection, rows.CLAIMED)}"
    with connection.cursor() as cursor:
        cursor.execute(statement, [*changed, *chosen])
        claimed = rows.executions(cursor.fetchall(), connection, rows.CLAIMED, **written)
    # RETURNING promises no order.
    claimed.sort(key=lambda row: (row.rank, row.scheduled_at, row.id))
    return claimed


_CLAIMED = (
    "run_no = run_no + 1, attempt = attempt + 1, started_at = %s, updated_at = %s, worker_id = %s, status = 'running'"
)


def _claim_in_two_steps(
    connection: Any, best: str, chosen: list[Any], changed: list[Any], written: dict[str, Any]
) -> list[JobExecution]:
    # MariaDB and MySQL have no UPDATE … RETURNING: lock and read, then write, in one short transaction.
    with transaction.atomic(using=connection.alias), connection.cursor() as cursor:
        cursor.execute(f"SELECT {rows.columns(connection, rows.CLAIMED)} {best} FOR UPDATE SKIP LOCKED", chosen)
        claimed = rows.executions(cursor.fetchall(), connection, rows.CLAIMED, **written)
        if not claimed:
            return []
        those, ids = rows.among([row.pk for row in claimed], connection)
        cursor.execute(f"UPDATE {rows.TABLE} SET {_CLAIMED} WHERE id {those} AND status = 'pending'", [*changed, *ids])
    for row in claimed:
        row.run_no, row.attempt = row.run_no + 1, row.attempt + 1
    return claimed


@retried
def claim_within(job: Job[...], *, limit: int, using: str, **options: Any) -> list[JobExecution]:
    """Claim rows of one job with `concurrency=`, never more than may still run; called by workers.

    Judged under a lock on the job's state: while another process has that, nothing is taken. `options` are those of
    claim().
    """
    if job.concurrency is None:
        raise ValueError(f"{job.name} has no concurrency=; expected a job with one, others are claimed by claim().")
    running = concurrency.running(job, using=using)
    # First without the lock, so that those who come in vain hold up nobody.
    if running.count() >= job.concurrency:
        return []
    is_outermost = not connections[using].in_atomic_block
    with short_transaction(using):
        if is_outermost and connections[using].vendor == "postgresql":
            with connections[using].cursor() as cursor:
                # Above that level the count would not see what was committed until the lock was free.
                cursor.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
        if not _hold_state(job.name, using):
            return []
        free = job.concurrency - running.count()
        return claim(names=job.names, limit=min(limit, free), using=using, **options)


def _hold_state(job_name: str, using: str) -> bool:
    """Lock the state of a job for this transaction; return False while another one has it."""
    states = JobState.objects.using(using).filter(job_name=job_name)
    if passes_over_locks(using):
        # Without waiting: who holds it may be frozen, and there are other jobs to run.
        held = bool(states.select_for_update(skip_locked=True).values_list("pk", flat=True))
    else:
        # SQLite has one lock for all writes, and this is one.
        held = bool(states.update(skips=F("skips")))
    if not held and not states.exists():
        # The first run of the job there ever was: the next look finds it.
        JobState.objects.using(using).bulk_create([JobState(job_name=job_name)], ignore_conflicts=True)
    return held


class Ending(NamedTuple):
    """How one run left RUNNING, ready to be written; made by the verbs below and fenced by `run_no`."""

    execution_id: UUID
    run_no: int
    status: Status
    # Give the attempt back: the run is not held against the job.
    refund: bool = False
    scheduled_at: datetime | None = None
    error: str | None = None
    errors: list[Any] | None = None
    fingerprint: str | None = None
    logs: list[Any] | None = None
    result: Any = None
    progress: Any = None
    # Delete the row instead, since its job keeps none of these.
    drop: bool = False


def succeed(row: JobExecution, **detail: Any) -> Ending:
    """End a run well; a cancel mark that came too late changes nothing."""
    return Ending(execution_id=row.pk, run_no=row.run_no, status=Status.OK, error="", **detail)


def fail(row: JobExecution, *, error: str, entry: dict[str, Any] | None = None, **detail: Any) -> Ending:
    """End a run for good with an error; a row marked for cancel ends CANCELLED."""
    errors = with_entry(row.errors, entry)
    return Ending(execution_id=row.pk, run_no=row.run_no, status=Status.ERROR, error=error, errors=errors, **detail)


def reschedule(
    row: JobExecution, *, at: datetime, error: str | None = None, entry: dict[str, Any] | None = None, **detail: Any
) -> Ending:
    """Park a run for its next try, or, with `refund`, as the handler itself asked; a marked row ends CANCELLED."""
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
    """Hand a run back untried: PENDING, the attempt not counted; a marked row ends CANCELLED."""
    return Ending(execution_id=row.pk, run_no=row.run_no, status=Status.PENDING, refund=True, **detail)


def abort(row: JobExecution, *, entry: dict[str, Any] | None = None, **detail: Any) -> Ending:
    """End a run that obeyed its cancel."""
    errors = with_entry(row.errors, entry)
    return Ending(execution_id=row.pk, run_no=row.run_no, status=Status.CANCELLED, errors=errors, **detail)


def with_entry(errors: list[Any], entry: dict[str, Any] | None) -> list[Any] | None:
    """Return the error history with one more entry, the newest twenty; None when there is nothing to add."""
    return None if entry is None else [*errors, entry][-ERRORS_KEPT:]


class _Incomplete(Exception):
    """Some rows of a batch were no longer this worker's."""


@retried
def finish(endings: Sequence[Ending], *, now: datetime, using: str, wait: bool = True) -> dict[UUID, Status]:
    """Write how runs ended, in one transaction; return the rows that moved with the status they got.

    A row that is missing from the answer was not this run's any more: somebody rescued, finished or deleted it. With
    `wait=False` it may also be one that another transaction holds, which still_running() tells; on SQLite, where one
    writer holds all rows, this waits in any case.
    """
    connection = connections[using]
    wait = wait or not passes_over_locks(using)
    try:
        with transaction.atomic(using=using, savepoint=len(endings) > 1):
            if not wait and connection.vendor == "mysql":
                # No UPDATE passes over locked rows, and none may read its own table for those that are free.
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
    """Return whose rows are still their run's, of those that finish() did not move."""
    expected = {ending.execution_id: ending.run_no for ending in endings}
    found = JobExecution.objects.using(using).running().filter(pk__in=list(expected))
    return {pk for pk, run_no in found.values_list("pk", "run_no") if expected[pk] == run_no}


def _free(endings: Sequence[Ending], connection: Any) -> list[Ending]:
    """Lock the rows that are still their run's and that nobody holds; return their endings."""
    # By the id alone: with the status the plan may go by an index of it, and lock there as well.
    those, ids = rows.among([ending.execution_id for ending in endings], connection)
    statement = f"SELECT id, run_no, status FROM {rows.TABLE} WHERE id {those} FOR UPDATE SKIP LOCKED"
    with connection.cursor() as cursor:
        cursor.execute(statement, ids)
        free = {(UUID(pk), run_no) for pk, run_no, status in cursor.fetchall() if status == Status.RUNNING}
    return [ending for ending in endings if (ending.execution_id, ending.run_no) in free]


def _finish_all(endings: Sequence[Ending], now: datetime, connection: Any, wait: bool) -> dict[UUID, Status]:
    groups: dict[tuple[Status, bool, int], list[Ending]] = {}
    for ending in endings:
        # Rows to drop go together when one number fences them all, which is nearly always.
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
        # Those that are left are marked, and end CANCELLED, or are not this worker's any more.
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
    # By their statement, which outside of PostgreSQL is another one for each number of ids.
    batches: dict[str, list[list[Any]]] = {}
    for (values, run_no), ids in alike.items():
        mine, fence = _mine(ids, run_no, connection, wait)
        batches.setdefault(f"UPDATE {rows.TABLE} SET {_ENDED[first.status]} WHERE {mine}", []).append([*values, *fence])
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
    with connection.cursor() as cursor:
        cursor.execute(f"DELETE FROM {rows.TABLE} WHERE {mine}", fence)
        return int(cursor.rowcount)


def _mine(ids: Sequence[UUID], run_no: int, connection: Any, wait: bool, unmarked: str = "") -> tuple[str, list[Any]]:
    """Return the condition on rows that are still those of their runs, fenced by one number, and its parameters."""
    those, parameters = rows.among(ids, connection)
    mine = f"id {those} AND run_no = %s AND status = 'running'{unmarked}"
    if not wait:
        # An array is made once; a plain IN may ask again for each row.
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
    # Only these could have been turned into CANCELLED by a mark.
    turned = (Status.ERROR, Status.SCHEDULED, Status.PENDING)
    asked = [ending.execution_id for ending in endings if ending.status in turned]
    if asked:
        cancelled = JobExecution.objects.using(connection.alias).filter(pk__in=asked, status=Status.CANCELLED)
        moved.update(dict.fromkeys(cancelled.values_list("pk", flat=True), Status.CANCELLED))
    return moved


@retried
def promote(queryset: ExecutionQuerySet, *, now: datetime) -> int:
    """Make due, unparked rows claimable; called by stage."""
    return queryset.due(now).update(hinted_at=now, updated_at=now, status=Status.PENDING)


@retried
def start_now(queryset: ExecutionQuerySet, *, now: datetime) -> int:
    """Make scheduled rows claimable before their time; called by services."""
    return queryset.scheduled().update(
        parked_reason="", scheduled_at=now, hinted_at=now, updated_at=now, status=Status.PENDING
    )


@retried
def park(queryset: ExecutionQuerySet, reason: str, *, now: datetime) -> int:
    """Set pending rows aside so that no claim wades through them; their due time, and so their order, stays."""
    return queryset.pending().update(parked_reason=reason, updated_at=now, status=Status.SCHEDULED)


@retried
def unpark(queryset: ExecutionQuerySet, *, now: datetime) -> int:
    """Bring parked rows back; called by stage when the reason is gone."""
    return queryset.parked().update(parked_reason="", hinted_at=now, updated_at=now, status=Status.PENDING)


@retried
def cancel(queryset: ExecutionQuerySet, *, now: datetime, by: str, by_name: str) -> int:
    """End rows that wait; called by services."""
    return queryset.filter(status__in=(Status.PENDING, Status.SCHEDULED)).update(
        active_key=None,
        # That of an earlier attempt: from then to now nothing ran.
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
    """Ask running rows to stop; they leave RUNNING when the run obeys. Called by services; marking again is no move."""
    return (
        queryset.running()
        .filter(_unmarked)
        .update(cancelled_by=by, cancelled_by_name=by_name, updated_at=now, cancel_requested_at=now)
    )


@retried
def retry(
    queryset: ExecutionQuerySet, *, now: datetime, retries: int, by: str, by_name: str, active_key: str | None = None
) -> int:
    """Queue failed and cancelled rows again with a fresh budget of `retries` + 1 tries; called by services.

    Raises IntegrityError when `active_key` is held by another live row of the job.
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


Describe = Callable[[UUID | None], tuple[str, dict[str, Any]]]


def rescue(queryset: ExecutionQuerySet, *, now: datetime, describe: Describe) -> list[UUID]:
    """Queue running rows of dead workers again, the attempt counted; a marked row ends CANCELLED. Called by rescue.

    `queryset` says who is lost and is asked again inside each UPDATE. `describe(worker_id)` gives the message and the
    entry for the history. Rows out of attempts, or rescued too often already, are left to bury().
    """
    lost = queryset.running().filter(attempt__lt=F("max_attempts"), rescues__lt=RESCUES_ALLOWED)
    return _leave_lost(lost, Status.PENDING, now, describe)


def bury(queryset: ExecutionQuerySet, *, now: datetime, describe: Describe) -> list[UUID]:
    """End running rows of dead workers with an error; a marked row ends CANCELLED. Called by rescue."""
    return _leave_lost(queryset.running(), Status.ERROR, now, describe)


def _leave_lost(lost: ExecutionQuerySet, target: Status, now: datetime, describe: Describe) -> list[UUID]:
    moved = []
    for pk, run_no, worker_id, attempt, errors in lost.values_list("pk", "run_no", "worker_id", "attempt", "errors"):
        message, entry = describe(worker_id)
        history = with_entry(errors, {**entry, "attempt": attempt})
        if _leave_one(lost.filter(pk=pk, run_no=run_no), pk, target, now, message, history):
            moved.append(pk)
    return moved


# Repeated row by row: a collision must not make us forget which rows were moved before it.
@retried
def _leave_one(
    lost: ExecutionQuerySet, pk: UUID, target: Status, now: datetime, message: str, history: list[Any] | None
) -> int:
    moment = Value(now, output_field=UTCDateTimeField())
    values = {
        "active_key": None if target in FINAL else Case(When(_unmarked, then=F("active_key")), default=None),
        "completed_at": moment if target in FINAL else Case(When(_unmarked, then=None), default=moment),
        "error": message,
        "errors": history,
        "rescues": F("rescues") + 1,
        "hinted_at": now,
        "updated_at": now,
        "status": Case(When(_unmarked, then=Value(target)), default=Value(Status.CANCELLED)),
    }
    using = lost.written_to
    if not passes_over_locks(using):
        return lost.update(**values)
    with transaction.atomic(using=using):
        # Without waiting: who holds one row, perhaps frozen, must not keep all others from being rescued.
        one = JobExecution.objects.using(using).filter(pk=pk).select_for_update(skip_locked=True)
        return lost.update(**values) if one.values_list("pk", flat=True) else 0
