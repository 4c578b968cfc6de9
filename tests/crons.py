"""Helpers for tests of cron jobs: define them, and look at their ticks."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django_jobs import clock, job, registry
from django_jobs.models import JobExecution, JobState
from django_jobs.states import Status


def define(name: str = "acc.cron", cron: str = "* * * * *", **options: Any) -> Any:
    """Register a cron job, replacing one with the same name."""

    def handler() -> None: ...

    registry.unregister(name)
    return job(name=name, cron=cron, **options)(handler)


def put(*jobs: Any) -> None:
    """Register exactly these jobs, like the code of another process."""
    for known in registry.all_jobs():
        registry.unregister(known.name)
    for each in jobs:
        registry.register(each)


def ticks(name: str = "acc.cron") -> list[datetime]:
    """The ticks that became rows, in order; None for triggers."""
    rows = JobExecution.objects.filter(job_name=name)
    return list(rows.order_by("tick_at").values_list("tick_at", flat=True))


def state(name: str = "acc.cron") -> JobState:
    return JobState.objects.get(job_name=name)


def skips(name: str = "acc.cron") -> tuple[str, int]:
    return state(name).last_skip_reason, state(name).skips


def end_all() -> None:
    """End every live row as OK."""
    JobExecution.objects.live().update(active_key=None, completed_at=clock.now("default"), status=Status.OK)
