"""Which jobs have a limit, `concurrency=`, and which of them are at it; asked by claims, stage and `--once`."""

from __future__ import annotations

from collections.abc import Iterable

from django_jobs import registry
from django_jobs.definition import Job
from django_jobs.models import JobExecution
from django_jobs.querysets import ExecutionQuerySet


def jobs() -> list[Job[...]]:
    """Return the jobs with `concurrency=` that this process knows."""
    return [job for job in registry.all_jobs() if job.concurrency is not None]


def names(of: Iterable[Job[...]] | None = None) -> frozenset[str]:
    """Return all names of these jobs, aliases included; without any given, of all jobs with `concurrency=`."""
    return registry.limited_names() if of is None else frozenset(name for job in of for name in job.names)


def running(job: Job[...], *, using: str) -> ExecutionQuerySet:
    """Return the rows that count for a job: also those of workers that died, until they are rescued."""
    rows: ExecutionQuerySet = JobExecution.objects.using(using).running().among_jobs(job.names)
    return rows


def full(of: Iterable[Job[...]], *, using: str) -> frozenset[str]:
    """Return the names of those among these jobs that are at their limit."""
    return names(
        job for job in of if job.concurrency is not None and running(job, using=using).count() >= job.concurrency
    )
