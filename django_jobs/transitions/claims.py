"""PENDING to RUNNING: how workers, and processes in direct or immediate mode, take rows for themselves."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.db import connections, transaction
from django.db.models import F

from django_jobs import concurrency, rows
from django_jobs.contention import passes_over_locks, retried, short_transaction
from django_jobs.models import JobExecution, JobState, Worker
from django_jobs.querysets import lost_after
from django_jobs.states import Status

if TYPE_CHECKING:
    from django_jobs.definition import Job

WORKER_TABLE = Worker._meta.db_table
# The columns that a run and its receivers read; others are fetched on access, while the row exists. Each column adds
# to the cost of every row of every claim.
CLAIMED = rows.Columns(
    {
        "id",
        "job_name",
        "queue",
        "rank",
        "payload",
        "key",
        "organization_id",
        "attempt",
        "max_attempts",
        "run_no",
        "scheduled_at",
        "tick_at",
        "created_at",
        "errors",
        "triggered_by",
        "triggered_by_name",
    },
    # They are past.
    instants_as_seconds=True,
)
_CLAIM = (
    "run_no = run_no + 1, attempt = attempt + 1, started_at = %s, updated_at = %s, worker_id = %s, status = 'running'"
)


@retried
def claim(
    *,
    queue: str,
    names: Sequence[str],
    worker_id: UUID,
    limit: int,
    now: datetime,
    using: str,
    max_rank: int | None = None,
    ids: Sequence[UUID] | None = None,
) -> list[JobExecution]:
    """Move up to `limit` pending rows of one queue to RUNNING for this worker, best first; called by workers.

    With `ids`, only among these: those that direct mode was told of, or the best of a job with a limit.
    Takes nothing unless the worker's own row is fresh: a worker that others may have declared dead must not start
    anything.
    """
    if not names or limit < 1 or ids == []:
        return []
    connection = connections[using]
    table = rows.TABLE
    rank = connection.ops.quote_name("rank")
    # As is_fresh() has it.
    fresh = (
        f"EXISTS (SELECT 1 FROM {WORKER_TABLE} WHERE id = %s AND stopped_at IS NULL "
        "AND heartbeat_at > %s AND heartbeat_at < %s)"
    )
    known, known_names = rows.of_jobs(names, connection)
    # To avoid a sort, SQLite would walk the claim index through all pending rows; the plus prevents that.
    in_queue = "+queue" if ids is not None and connection.vendor == "sqlite" else "queue"
    told, told_ids = ("", []) if ids is None else rows.among(ids, connection)
    source = table if ids is not None else rows.by_index("django_jobs_claim", connection)
    best = (
        f"FROM {source} WHERE status = 'pending' AND {in_queue} = %s AND {known}{told and f' AND id {told}'}"
        f"{'' if max_rank is None else f' AND {rank} <= %s'} AND {fresh} ORDER BY {rank}, scheduled_at, id LIMIT %s"
    )
    moment, worker = rows.instant(now, connection), rows.identity(worker_id, connection)
    alive = [rows.instant(now - lost_after(), connection), rows.instant(now + lost_after(), connection)]
    chosen = [queue, *known_names, *told_ids, *([] if max_rank is None else [max_rank]), worker, *alive, limit]
    changed = [moment, moment, worker]
    written = {
        "status": Status.RUNNING,
        "worker_id": worker_id,
        "started_at": now,
        "updated_at": now,
        "completed_at": None,
        # True of every pending row.
        "parked_reason": "",
        "cancel_requested_at": None,
    }
    if connection.vendor == "mysql":
        return _claim_in_two_steps(connection, best, chosen, changed, written)
    if connection.vendor == "postgresql":
        # An array is evaluated once: a plain subquery may run again for each row, and lock more rows than the limit.
        # Planning takes half as long as for a join with a CTE.
        those = f"id = ANY (ARRAY (SELECT id {best} FOR NO KEY UPDATE SKIP LOCKED))"
    else:
        those = f"id IN (SELECT id {best}) AND status = 'pending'"
    statement = f"UPDATE {table} SET {_CLAIM} WHERE {those} RETURNING {CLAIMED.sql(connection)}"
    with connection.cursor() as cursor:
        cursor.execute(statement, [*changed, *chosen])
        claimed = CLAIMED.executions(cursor.fetchall(), connection, **written)
    # RETURNING does not promise an order.
    claimed.sort(key=lambda row: (row.rank, row.scheduled_at, row.id))
    return claimed


def _claim_in_two_steps(
    connection: Any, best: str, chosen: list[Any], changed: list[Any], written: dict[str, Any]
) -> list[JobExecution]:
    # MariaDB and MySQL have no UPDATE … RETURNING: lock and read, then write, in one short transaction.
    with transaction.atomic(using=connection.alias), connection.cursor() as cursor:
        cursor.execute(f"SELECT {CLAIMED.sql(connection)} {best} FOR UPDATE SKIP LOCKED", chosen)
        claimed = CLAIMED.executions(cursor.fetchall(), connection, **written)
        if not claimed:
            return []
        those, ids = rows.among([row.pk for row in claimed], connection)
        table = rows.by_index("PRIMARY", connection)
        cursor.execute(f"UPDATE {table} SET {_CLAIM} WHERE id {those} AND status = 'pending'", [*changed, *ids])
    for row in claimed:
        row.run_no, row.attempt = row.run_no + 1, row.attempt + 1
    return claimed


@retried
def claim_within(job: Job[...], *, limit: int, using: str, **options: Any) -> list[JobExecution]:
    """Claim rows of one job with `concurrency=`, never more than its limit allows; called by workers.

    Checked under a lock on the job's state: while another process holds it, nothing is taken. `options` are those of
    claim().
    """
    if job.concurrency is None:
        raise ValueError(f"{job.name} has no concurrency=; use claim() for such a job.")
    running = concurrency.running(job, using=using)
    # First without the lock, so that a claim in vain does not hold up others.
    if running.count() >= job.concurrency:
        return []
    is_outermost = not connections[using].in_atomic_block
    with short_transaction(using):
        if is_outermost and connections[using].vendor == "postgresql":
            with connections[using].cursor() as cursor:
                # At a higher level the count would not see what was committed before the lock was free.
                cursor.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
        if not _hold_state(job.name, using):
            return []
        free = job.concurrency - running.count()
        return claim(names=job.names, limit=min(limit, free), using=using, **options)


def _hold_state(job_name: str, using: str) -> bool:
    """Lock the state of a job for this transaction; return False while another one has it."""
    states = JobState.objects.using(using).filter(job_name=job_name)
    if passes_over_locks(using):
        # Without waiting: its holder may be frozen, and there are other jobs to run.
        held = bool(states.select_for_update(skip_locked=True).values_list("pk", flat=True))
    else:
        # On SQLite any write takes the only lock.
        held = bool(states.update(skips=F("skips")))
    if not held and not states.exists():
        # The first claim ever of this job: the next one finds the row.
        JobState.objects.using(using).bulk_create([JobState(job_name=job_name)], ignore_conflicts=True)
    return held
