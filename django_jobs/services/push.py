"""Push: write executions in the caller's transaction and announce them after its commit."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import UUID

from asgiref.sync import sync_to_async
from django.db import connections, transaction

from django_jobs import clock, transitions
from django_jobs.contention import in_transaction, retried
from django_jobs.exceptions import DefinitionError
from django_jobs.models import JobExecution, jobs_alias
from django_jobs.options import attribution
from django_jobs.querysets import key_digest
from django_jobs.services import keys
from django_jobs.services._entry import service
from django_jobs.services.hints import hint
from django_jobs.signals import emit, job_pushed
from django_jobs.states import Status

if TYPE_CHECKING:
    from django_jobs.definition import Item, Job
    from django_jobs.options import PushOptions

logger = logging.getLogger("django_jobs")


@service
def push(job: Job[...], options: PushOptions, payload_json: str) -> JobExecution:
    """Write one execution of the job and return it, or return the live one with its key: `created` is False then.

    The payload comes from `job.schema.dump()`. Inside a transaction, the row exists and runs only if that commits.
    """
    using = jobs_alias()
    now = clock.now(using)
    return store(job, build(job, options, payload_json, now=now), now=now, using=using)


async def apush(job: Job[...], options: PushOptions, payload_json: str) -> JobExecution:
    """See push()."""
    return await sync_to_async(push, thread_sensitive=True)(job, options, payload_json)


@service
def push_many(items: Sequence[Item]) -> list[JobExecution]:
    """Write one execution for each item, all or none, and return them in the order of the items.

    Items are checked when they are made, so only the database can refuse one here.
    """
    if not items:
        return []
    using = jobs_alias()
    now = clock.now(using)
    pairs = [(item.job, build(item.job, item.options, item.payload_json, now=now)) for item in items]
    return store_all(pairs, now=now, using=using)


async def apush_many(items: Sequence[Item]) -> list[JobExecution]:
    """See push_many()."""
    return await sync_to_async(push_many, thread_sensitive=True)(items)


def build(job: Job[...], options: PushOptions, payload_json: str, *, now: datetime) -> JobExecution:
    """Return the execution that these options ask for, not yet written."""
    by, by_name = attribution(options.by)
    digest = None if options.key is None else key_digest(options.organization_id, options.key)
    row = JobExecution(
        job_name=job.name,
        queue=job.queue if options.queue is None else options.queue,
        rank=-(job.priority if options.priority is None else options.priority),
        payload=json.loads(payload_json),
        key=options.key or "",
        key_digest=digest,
        active_key=digest,
        organization_id=options.organization_id,
        max_attempts=job.max_attempts,
        scheduled_at=options.due(now) or now,
        triggered_by=by,
        triggered_by_name=by_name,
    )
    row._payload_json = payload_json
    return row


def store(job: Job[...], row: JobExecution, *, now: datetime, using: str) -> JobExecution:
    """Write a built row, or find the live one with its key; send the signal and the hint if it was written."""
    connection = connections[using]
    if _wait_for_other_commit([(job, row)], connection):
        return row
    if row.active_key is not None:
        row = keys.insert_or_find(row, now=now, using=using)
        if not row.created:
            return row
    else:
        keys.insert(row, now=now, using=using)
        row.created = True
    emit(job_pushed, job, row)
    if row.status == Status.PENDING:
        hint(connection, (row,))
    return row


def store_all(pairs: Sequence[tuple[Job[...], JobExecution]], *, now: datetime, using: str) -> list[JobExecution]:
    """Write built rows, all or none, those without a key in one statement; see store()."""
    connection = connections[using]
    if _wait_for_other_commit(pairs, connection):
        return [row for _job, row in pairs]
    stored = _insert_all([row for _job, row in pairs], now=now, using=using)
    made = [(job, row) for job, row in pairs if stored[row.pk] is row]
    for job, row in made:
        emit(job_pushed, job, row)
    hint(connection, [row for _job, row in made if row.status == Status.PENDING])
    return [stored[row.pk] for _job, row in pairs]


@retried
def _insert_all(rows: Sequence[JobExecution], *, now: datetime, using: str) -> dict[UUID, JobExecution]:
    stored = {row.pk: row for row in rows if row.active_key is None}
    keyed = [row for row in rows if row.active_key is not None]
    # Without keys it is a single statement, which needs no savepoint; a refused key does.
    with transaction.atomic(using=using, savepoint=bool(keyed)):
        if stored:
            transitions.insert(list(stored.values()), now=now, using=using)
            for row in stored.values():
                row.created = True
        # In the same order everywhere, so that two of these wait for each other instead of deadlocking.
        for row in sorted(keyed, key=lambda row: (row.job_name, row.active_key)):
            stored[row.pk] = keys.insert_or_find(row, now=now, using=using)
    return stored


def _wait_for_other_commit(pairs: Sequence[tuple[Job[...], JobExecution]], connection: Any) -> bool:
    """Put the INSERT off, and return True, if a transaction is open on another database than the executions'."""
    if len(connections.settings) == 1 or in_transaction(connection):
        return False
    for other in connections.all(initialized_only=True):
        if other.in_atomic_block and other.alias != connection.alias:
            break
    else:
        return False
    for _job, row in pairs:
        if row.active_key is not None:
            what = f"key={row.key!r}" if row.key else 'overlap="skip"'
            raise DefinitionError(
                f"{row.job_name}: {what} is refused inside a transaction on the database {other.alias!r}: executions "
                "are in another database, so the row would be written after that commit, too late to say whether its "
                f"key is taken. Push after the block, or open a transaction on {connection.alias!r} as well."
            )
    other.on_commit(partial(_store_late, pairs, connection.alias), robust=True)
    return True


def _store_late(pairs: Sequence[tuple[Job[...], JobExecution]], using: str) -> None:
    try:
        store_all(pairs, now=clock.now(using), using=using)
    except Exception:
        # The transaction it belongs to is committed: all that is left is to log what was lost.
        names = ", ".join(str(row) for _job, row in pairs)
        logger.exception("lost, since the other database had already committed: %s", names)
