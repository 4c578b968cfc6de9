"""Factories of consistent rows: a trait sets the columns as the verbs would have left them."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import factory
from factory.django import DjangoModelFactory

from django_jobs import clock, registry
from django_jobs.fields import uuid7
from django_jobs.models import JobExecution, JobState, QueueState, Worker, jobs_alias
from django_jobs.querysets import key_digest
from django_jobs.states import FINAL, LIVE, TRANSITIONS, Status

# Of executions.
TRAITS = ("pending", "scheduled", "parked", "running", "ok", "failed", "cancelled")


def _now() -> Any:
    return clock.now(jobs_alias())


def _digest(row: Any) -> str | None:
    return key_digest(row.organization_id, row.key) if row.key else None


def _errors(row: Any) -> list[dict[str, Any]]:
    if row.status != Status.ERROR:
        return []
    return [
        {
            "attempt": row.attempt,
            "exception": "builtins.ValueError",
            "message": "boom",
            "traceback": "Traceback (most recent call last):\nValueError: boom\n",
            "worker": "host.test pid 10000",
            "started_at": row.started_at.isoformat(),
            "failed_at": row.completed_at.isoformat(),
        }
    ]


class WorkerFactory(DjangoModelFactory[Worker]):
    """A live `runjobs` process with all roles; traits: dead (it fell silent), stopped (it ended in order)."""

    class Meta:
        model = Worker

    class Params:
        now = factory.LazyFunction(_now)
        dead = factory.Trait(heartbeat_at=factory.LazyAttribute(lambda row: row.now - timedelta(hours=1)))
        stopped = factory.Trait(stopped_at=factory.SelfAttribute("now"), stop_reason="shutdown")

    host = "host.test"
    pid = factory.Sequence(lambda n: 10_000 + n)
    version = "0.1.0"
    roles = factory.LazyFunction(lambda: ["worker", "scheduler", "sweep"])
    queues = None
    names = factory.LazyFunction(lambda: sorted(registry.names()))
    slots = 10
    started_at = factory.LazyAttribute(lambda row: row.now - timedelta(hours=2))
    heartbeat_at = factory.SelfAttribute("now")


class JobExecutionFactory(DjangoModelFactory[JobExecution]):
    """An execution of acc.mark; everything follows from its status, which is pending unless a trait or status= sets it.

    Traits: pending, scheduled (due in a minute), parked, running (on a live worker; give worker= for another one), ok,
    failed (status "error"), cancelled. priority=, key= and now= fill the columns that follow from them.
    """

    class Meta:
        model = JobExecution

    class Params:
        now = factory.LazyFunction(_now)
        priority = 0
        worker = None
        pending = factory.Trait(status=Status.PENDING)
        scheduled = factory.Trait(status=Status.SCHEDULED)
        parked = factory.Trait(
            status=Status.SCHEDULED, parked_reason="paused", scheduled_at=factory.SelfAttribute("now")
        )
        running = factory.Trait(status=Status.RUNNING)
        ok = factory.Trait(status=Status.OK)
        failed = factory.Trait(status=Status.ERROR)
        cancelled = factory.Trait(status=Status.CANCELLED)
        was_run = factory.LazyAttribute(lambda row: row.status in {Status.RUNNING, Status.OK, Status.ERROR})

    @classmethod
    def _generate(cls, strategy: Any, params: dict[str, Any]) -> Any:
        # An omitted trait raises an error inside factory_boy, whose message takes longer to build than the row.
        return super()._generate(strategy, dict.fromkeys(TRAITS, False) | params)

    id = factory.LazyFunction(uuid7)
    job_name = "acc.mark"
    queue = "default"
    status = Status.PENDING
    rank = factory.LazyAttribute(lambda row: -row.priority)
    payload = factory.LazyFunction(dict)
    organization_id = None
    key = ""
    key_digest = factory.LazyAttribute(_digest)
    active_key = factory.LazyAttribute(lambda row: (_digest(row) or None) if row.status in LIVE else None)
    max_attempts = 1
    attempt = factory.LazyAttribute(lambda row: int(row.was_run))
    run_no = factory.SelfAttribute("attempt")
    scheduled_at = factory.LazyAttribute(
        lambda row: row.now + timedelta(minutes=1) if row.status == Status.SCHEDULED else row.now
    )
    created_at = factory.LazyAttribute(lambda row: row.now - timedelta(seconds=2))
    updated_at = factory.SelfAttribute("now")
    hinted_at = factory.SelfAttribute("created_at")
    started_at = factory.LazyAttribute(lambda row: row.now - timedelta(seconds=1) if row.was_run else None)
    completed_at = factory.LazyAttribute(lambda row: row.now if row.status in FINAL else None)
    worker_id = factory.LazyAttribute(
        lambda row: (row.worker or WorkerFactory(now=row.now)).pk if row.was_run or row.worker else None
    )
    error = factory.LazyAttribute(lambda row: "ValueError: boom" if row.status == Status.ERROR else "")
    errors = factory.LazyAttribute(_errors)
    cancelled_by_name = factory.LazyAttribute(lambda row: "a person" if row.status == Status.CANCELLED else "")


def ready_for(verb: str, now: datetime) -> JobExecution:
    """Make a row that the verb of a transition may move at this instant."""
    return JobExecutionFactory(
        now=now,
        status=min(TRANSITIONS[verb].sources),
        max_attempts=3,
        scheduled_at=now - timedelta(seconds=1),
        parked_reason="paused" if verb == "unpark" else "",
    )


class JobStateFactory(DjangoModelFactory[JobState]):
    """The shared state of acc.mark; trait: paused."""

    class Meta:
        model = JobState

    class Params:
        now = factory.LazyFunction(_now)
        paused = factory.Trait(paused_at=factory.SelfAttribute("now"), paused_by_name="a person")

    job_name = "acc.mark"


class QueueStateFactory(DjangoModelFactory[QueueState]):
    """The default queue; trait: paused."""

    class Meta:
        model = QueueState

    class Params:
        now = factory.LazyFunction(_now)
        paused = factory.Trait(paused_at=factory.SelfAttribute("now"), paused_by_name="a person")

    queue = "default"
