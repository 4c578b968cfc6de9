"""The operations on single executions: cancel, retry, copy, start now, and trigger a cron job."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import UUID

from asgiref.sync import sync_to_async
from django.db import IntegrityError, connections

from django_jobs import clock, dispatchers, registry, transitions
from django_jobs.exceptions import AlreadyRunning, Conflict, DefinitionError, KeyTaken, UnknownJob, WrongStatus
from django_jobs.models import JobExecution, jobs_alias
from django_jobs.options import PushOptions, attribution
from django_jobs.services import keys
from django_jobs.services._entry import after_commit, note, savepoint, service
from django_jobs.services.hints import hint
from django_jobs.services.push import build, store
from django_jobs.signals import emit, job_cancelled, job_finished
from django_jobs.states import Status

if TYPE_CHECKING:
    from django_jobs.definition import Job

ROUNDS = 5


@service
def cancel(execution: JobExecution | UUID, by: Any = None) -> JobExecution:
    """Cancel a waiting execution at once, mark a running one so that its handler is told to stop; return it.

    Safe to repeat while it is being cancelled. Raises WrongStatus when it is finished or gone.
    """
    using = jobs_alias()
    connection = connections[using]
    row = subject(execution, using=using)
    user, name = attribution(by)
    one = JobExecution.objects.using(using).filter(pk=row.pk)
    # It may start, or be released, between the two statements.
    for _round in range(ROUNDS):
        now = clock.now(using)
        if transitions.cancel(one, now=now, by=user, by_name=name):
            reload(row, using=using)
            after_cancel(row, using=using)
            return row
        if transitions.mark_cancel(one, now=now, by=user, by_name=name):
            reload(row, using=using)
            after_commit(connection, partial(dispatchers.announce_cancel, [row.pk]))
            return row
        if not reload(row, using=using):
            raise _gone(row)
        if row.is_cancelling:
            return row
        if row.is_final:
            raise WrongStatus(f"{row} cannot be cancelled: it is already {row.status}.", row)
    raise WrongStatus(f"{row} was not cancelled: its status changed {ROUNDS} times in the meantime. Cancel again.", row)


async def acancel(execution: JobExecution | UUID, by: Any = None) -> JobExecution:
    """See cancel()."""
    return await sync_to_async(cancel, thread_sensitive=True)(execution, by)


@service
def retry(execution: JobExecution | UUID, by: Any = None) -> JobExecution:
    """Queue a failed or cancelled execution again, the same row with its history, and return it.

    It gets `retries` + 1 more attempts, as the job is defined now. Raises WrongStatus for other statuses (so a double
    click is harmless), KeyTaken when another live execution has its key, UnknownJob when no job has its name.
    """
    using = jobs_alias()
    row = subject(execution, using=using)
    job = known_job(row)
    user, name = attribution(by)
    active_key = row.key_digest or keys.overlap_key(job)
    one = JobExecution.objects.using(using).filter(pk=row.pk)
    if (holder := keys.held_by_namesake(row, job, active_key, using=using)) is not None:
        raise _held(row, "retried", holder)
    try:
        with savepoint(connections[using]):
            moved = transitions.retry(
                one, now=clock.now(using), retries=job.retries, by=user, by_name=name, active_key=active_key
            )
    except IntegrityError as error:
        if not keys.is_key_conflict(error):
            raise
        raise _held(row, "retried", keys.find_holder(job.names, active_key, using=using, conflict=True)) from error
    return _made_pending(row, moved, "retried", "error or cancelled", using=using)


async def aretry(execution: JobExecution | UUID, by: Any = None) -> JobExecution:
    """See retry()."""
    return await sync_to_async(retry, thread_sensitive=True)(execution, by)


@service
def copy(execution: JobExecution | UUID, by: Any = None) -> JobExecution:
    """Push a new execution with the payload, queue, priority, tenant and key of a finished one, and return it.

    Raises WrongStatus when it is not finished, KeyTaken when a live execution has its key, UnknownJob, and
    InvalidPayload when the job no longer accepts its payload.
    """
    using = jobs_alias()
    source = subject(execution.pk if isinstance(execution, JobExecution) else execution, using=using)
    job = known_job(source)
    if not source.is_final:
        raise WrongStatus(
            f"{source} cannot be run again: it is {source.status}; expected a finished execution.", source
        )
    job.schema.rebuild(source.payload_json)
    now = clock.now(using)
    row = build(job, PushOptions(by=by), source.payload_json, now=now)
    row.queue, row.rank, row.organization_id = source.queue, source.rank, source.organization_id
    row.key, row.key_digest = source.key, source.key_digest
    row.active_key = source.key_digest or keys.overlap_key(job)
    row.context, row.copied_from = source.context, source.pk
    stored = store(job, row, now=now, using=using)
    if stored.created is False:
        raise _held(source, "run again", stored)
    return stored


async def acopy(execution: JobExecution | UUID, by: Any = None) -> JobExecution:
    """See copy()."""
    return await sync_to_async(copy, thread_sensitive=True)(execution, by)


@service
def start_now(execution: JobExecution | UUID, by: Any = None) -> JobExecution:
    """Make a scheduled or parked execution pending now and return it; raise WrongStatus for any other."""
    using = jobs_alias()
    row = subject(execution, using=using)
    _user, by_name = attribution(by)
    one = JobExecution.objects.using(using).filter(pk=row.pk)
    moved = transitions.start_now(one, now=clock.now(using))
    started = _made_pending(row, moved, "started now", "scheduled", using=using)
    note(f"{row} was started before its time", by_name, using=using)
    return started


async def astart_now(execution: JobExecution | UUID, by: Any = None) -> JobExecution:
    """See start_now()."""
    return await sync_to_async(start_now, thread_sensitive=True)(execution, by)


@service
def trigger(job: Job[...], by: Any = None) -> JobExecution:
    """Push one execution of a cron job now and return it.

    Raises AlreadyRunning, with the live execution, when there is one and the job has overlap="skip".
    """
    if job.cron is None:
        raise DefinitionError(
            f"{job.name} is a pushed job and trigger() is for cron jobs; write {job.name}.using(by=…).push(…)."
        )
    using = jobs_alias()
    now = clock.now(using)
    row = build(job, PushOptions(by=by), "{}", now=now)
    row.active_key = keys.overlap_key(job)
    stored = store(job, row, now=now, using=using)
    if stored.created is False:
        raise AlreadyRunning(f"{job.name} was not triggered: {_live(stored)}.", stored)
    return stored


async def atrigger(job: Job[...], by: Any = None) -> JobExecution:
    """See trigger()."""
    return await sync_to_async(trigger, thread_sensitive=True)(job, by)


def mode(job: Job[...]) -> str:
    """Return what starts executions of the job: "cron", or the kind of the dispatcher."""
    return "cron" if job.cron is not None else dispatchers.get_dispatcher().kind


def subject(execution: JobExecution | UUID, *, using: str) -> JobExecution:
    """Return the execution itself, or read the one with this id; raise WrongStatus when there is none."""
    if isinstance(execution, JobExecution):
        return execution
    row = JobExecution.objects.using(using).filter(pk=execution).first()
    if row is None:
        raise WrongStatus(f"There is no execution {execution}; it may have been trimmed after it finished.")
    return row


def known_job(row: JobExecution) -> Job[...]:
    """Return the job of a row; raise UnknownJob, with the remedy, when no job has its name."""
    job = registry.find(row.job_name)
    if job is None:
        raise UnknownJob(
            f"{row} cannot run: no job is called {row.job_name!r}. If it was renamed, add the old name to its aliases."
        )
    return job


def reload(row: JobExecution, *, using: str) -> bool:
    """Read the row again, in place; return whether it still exists."""
    try:
        row.refresh_from_db(using=using)
    except JobExecution.DoesNotExist:
        return False
    return True


def after_cancel(row: JobExecution, *, using: str) -> None:
    """Follow up on a row that ended CANCELLED here: delete it if its job keeps none, and send the signals."""
    job = registry.find(row.job_name)
    if job is None:
        return
    if job.retention(Status.CANCELLED) == 0:
        JobExecution.objects.using(using).filter(pk=row.pk).delete_finished()

    def tell() -> None:
        emit(job_cancelled, job, row)
        emit(job_finished, job, row)

    if job_cancelled.receivers or job_finished.receivers:
        after_commit(connections[using], tell)


def _made_pending(row: JobExecution, moved: int, verb: str, expected: str, *, using: str) -> JobExecution:
    """Return the row as it is now, and announce it; raise WrongStatus when the verb did not change it."""
    is_there = reload(row, using=using)
    if not moved:
        if not is_there:
            raise _gone(row)
        raise WrongStatus(f"{row} cannot be {verb}: it is {row.status}; expected {expected}.", row)
    hint(connections[using], (row,))
    return row


def _gone(row: JobExecution) -> WrongStatus:
    return WrongStatus(f"{row} does not exist any more; its job may keep no such rows.", row)


def _held(row: JobExecution, verb: str, holder: JobExecution | None) -> Conflict:
    if not row.key:
        name = row.job_name if holder is None else _live(holder)
        return AlreadyRunning(f"{row} cannot be {verb}: {name}.", holder)
    by = f"{holder.pk}, which is {holder.status}" if holder is not None else "an execution that ended a moment ago"
    return KeyTaken(f"{row} cannot be {verb}: its key {row.key!r} is held by {by}.", holder)


def _live(holder: JobExecution) -> str:
    return f'{holder} is {holder.status} and overlap="skip" lets one live at a time'
