"""Which jobs have a limit (`concurrency=`), and which have reached it; for claims, stage and `--once`."""

from __future__ import annotations

from collections.abc import Iterable

from django_jobs import registry
from django_jobs.definition import Job
from django_jobs.models import JobExecution
from django_jobs.querysets import ExecutionQuerySet


def jobs() -> list[Job[...]]:
    """Return the registered jobs with `concurrency=`."""
    return [job for job in registry.all_jobs() if job.concurrency is not None]


def names(of: Iterable[Job[...]]) -> frozenset[str]:
    """Return all names of these jobs, aliases included."""
    return frozenset(name for job in of for name in job.names)


def running(job: Job[...], *, using: str) -> ExecutionQuerySet:
    """Return the rows that count against a job's limit, including those of dead workers until they are rescued."""
    rows: ExecutionQuerySet = JobExecution.objects.using(using).running().among_jobs(job.names)
    return rows


def full(of: Iterable[Job[...]], *, using: str) -> frozenset[str]:
    """Return the names of those of the jobs that are at their limit."""
    return names(
        job for job in of if job.concurrency is not None and running(job, using=using).count() >= job.concurrency
    )
