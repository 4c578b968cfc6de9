"""Pause and resume jobs and queues, in all processes and until somebody resumes them; the admin calls this as well.

Every process notices within a second. Running executions go on; pushed ones are accepted, and wait.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, cast

from asgiref.sync import sync_to_async
from django.db.models import F

from django_jobs import clock, registry
from django_jobs.contention import retried
from django_jobs.models import JobState, QueueState, jobs_alias
from django_jobs.options import attribution
from django_jobs.options import queue as checked_queue
from django_jobs.services._entry import note, service
from django_jobs.states import Skip
from django_jobs.text import storable

RESUMED: dict[str, Any] = {"paused_at": None, "paused_by": "", "paused_by_name": ""}
# The most skipped ticks that are counted at once.
COUNTED = 100
ROUNDS = 5


@service
def pause_job(name: str, by: Any = None) -> bool:
    """Start no execution of this job and fire none of its ticks until it is resumed; return False if already paused.

    Raises UnknownJob for a name that is not registered and has no state in the database.
    """
    using = jobs_alias()
    return _pause(JobState, _names_of(name, using), by, using=using)


async def apause_job(name: str, by: Any = None) -> bool:
    """See pause_job()."""
    return await sync_to_async(pause_job, thread_sensitive=True)(name, by)


@service
def resume_job(name: str, by: Any = None) -> bool:
    """Let executions of this job start again, the waiting ones first; return False if it was not paused.

    Ticks that came in the meantime are not made up for: the next one fires. Raises UnknownJob as pause_job() does.
    """
    using = jobs_alias()
    _user, by_name = attribution(by)
    resumed = [_resume_job(each, using=using) for each in _names_of(name, using)]
    if any(resumed):
        note(f"{name} was resumed", by_name, using=using)
    return any(resumed)


async def aresume_job(name: str, by: Any = None) -> bool:
    """See resume_job()."""
    return await sync_to_async(resume_job, thread_sensitive=True)(name, by)


@service
def pause_queue(queue: str, by: Any = None) -> bool:
    """Claim nothing from this queue until it is resumed; return False if already paused.

    The queue may be empty and undeclared. Raises DefinitionError for a name that no queue can have.
    """
    return _pause(QueueState, (checked_queue(queue),), by, using=jobs_alias())


async def apause_queue(queue: str, by: Any = None) -> bool:
    """See pause_queue()."""
    return await sync_to_async(pause_queue, thread_sensitive=True)(queue, by)


@service
def resume_queue(queue: str, by: Any = None) -> bool:
    """Let workers claim from this queue again; return False if it was not paused. Raises DefinitionError."""
    using = jobs_alias()
    _user, by_name = attribution(by)
    resumed = _resume_queue(checked_queue(queue), using=using)
    if resumed:
        note(f"the queue {queue} was resumed", by_name, using=using)
    return resumed


async def aresume_queue(queue: str, by: Any = None) -> bool:
    """See resume_queue()."""
    return await sync_to_async(resume_queue, thread_sensitive=True)(queue, by)


def _names_of(name: str, using: str) -> tuple[str, ...]:
    """Return the names of the job, its current one first."""
    job = registry.find(name)
    if job is not None:
        return job.names
    # Code that is deployed elsewhere, or gone, has left a state. For any other name get() raises, with the remedy.
    if storable(name) != name or not JobState.objects.using(using).filter(job_name=name).exists():
        registry.get(name)
    return (name,)


@retried
def _pause(model: type[JobState] | type[QueueState], names: tuple[str, ...], by: Any, *, using: str) -> bool:
    user, by_name = attribution(by)
    states = model._default_manager.using(using)
    if states.filter(pk__in=names, paused_at__isnull=False).exists():
        return False
    running = states.filter(pk=names[0], paused_at__isnull=True)
    values = {"paused_at": clock.now(using), "paused_by": user, "paused_by_name": by_name}
    if running.update(**values):
        return True
    # There was no such row yet, or somebody else pauses at this very moment.
    states.bulk_create([cast("Any", model(pk=names[0]))], ignore_conflicts=True)
    return bool(running.update(**values))


@retried
def _resume_job(name: str, *, using: str) -> bool:
    paused = JobState.objects.using(using).filter(job_name=name, paused_at__isnull=False)
    for _round in range(ROUNDS):
        state = paused.first()
        if state is None:
            return False
        if paused.filter(last_tick_at=state.last_tick_at).update(**RESUMED, **_left_out(state, clock.now(using))):
            return True
        # A scheduler has just moved the cursor itself.
    return bool(paused.update(**RESUMED))


@retried
def _resume_queue(queue: str, *, using: str) -> bool:
    return bool(QueueState.objects.using(using).filter(queue=queue, paused_at__isnull=False).update(**RESUMED))


def _left_out(state: JobState, now: datetime) -> dict[str, Any]:
    """Return the changes that move the cursor past ticks no scheduler has skipped yet: they would fire late."""
    cursor, job = state.last_tick_at, registry.find(state.job_name)
    if cursor is None or cursor >= now:
        return {}
    if job is None or job.cron is None or str(job.cron) != state.schedule:
        # The schedule belongs to other code.
        return {"last_tick_at": now}
    ticks = job.cron.between(cursor, now, COUNTED)
    if not ticks:
        return {}
    newest = ticks[-1] if len(ticks) < COUNTED else now
    return {
        "last_tick_at": newest,
        "last_skip_at": newest,
        "last_skip_reason": Skip.PAUSED,
        "skips": F("skips") + len(ticks),
    }
