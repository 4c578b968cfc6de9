"""A worker in this process, on the test's database, and jobs made for one test."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from django_jobs import registry
from django_jobs.definition import job
from django_jobs.execution.liveness import Liveness
from django_jobs.models import JobExecution, jobs_alias
from django_jobs.runtime.worker import Worker
from django_jobs.served import Served
from tests.support import wait_for


@contextlib.contextmanager
def jobs_of(*functions: Callable[..., Any], **options: Any) -> Iterator[list[Any]]:
    """Register functions as jobs named tests.<function> for the length of the block, and nothing else."""
    with registry.isolated(empty=True):
        yield [job(name=f"tests.{function.__name__}", **options)(function) for function in functions]


def a_liveness(slots: int = 2) -> Liveness:
    liveness = Liveness(roles=["worker"], queues=None, names=sorted(registry.names()), slots=slots, using=jobs_alias())
    liveness.register()
    return liveness


@contextlib.contextmanager
def a_worker(concurrency: int = 2, **options: Any) -> Iterator[Worker]:
    """A started worker that is shut down whatever the block does."""
    worker = Worker(
        liveness=a_liveness(concurrency),
        served=Served(is_any_but=True),
        concurrency=concurrency,
        using=jobs_alias(),
        **options,
    )
    worker.start()
    try:
        yield worker
    finally:
        worker.shutdown(time.monotonic() + 10)


def ended(row: JobExecution, timeout: float = 15) -> JobExecution:
    """Wait until a row is final, for so many seconds at most, and return it as it is."""

    def final() -> bool:
        row.refresh_from_db()
        return row.is_final

    wait_for(final, timeout, f"{row} is final")
    return row
