"""Payloads are held no longer than they are needed."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from django_jobs.execution.finisher import BACKLOG_BYTES, BATCH_BYTES, Finisher
from django_jobs.models import JobExecution
from django_jobs.signals import job_finished
from tests.execution.runs import run_of
from tests.runtime.workers import a_worker, ended, jobs_of
from tests.support import wait_for


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("is_async", [False, True])
def test_an_idle_worker_holds_no_run(is_async: bool) -> None:
    """What a run held is kept until the next one needs its place: with large payloads that is much.

    Source: procrastinate-org/procrastinate#1316.
    """
    seen: list[weakref.ref[JobExecution]] = []

    def hear(execution: JobExecution, **kwargs: Any) -> None:
        seen.append(weakref.ref(execution))

    def large(blob: str) -> None:
        pass

    async def async_large(blob: str) -> None:
        pass

    job_finished.connect(hear)
    try:
        with jobs_of(async_large if is_async else large) as [large_job], a_worker(concurrency=2):
            for row in large_job.push_many([{"blob": "x" * 10_000}] * 20):
                ended(row)
            wait_for(lambda: len(seen) == 20, 10, "all were heard of")
            wait_for(lambda: all(ref() is None for ref in seen), 20, "none is held")
    finally:
        job_finished.disconnect(hear)


@pytest.mark.medium
def test_outcomes_are_written_early_when_they_are_large_and_none_is_claimed_when_they_are_too_many() -> None:
    """See above: those that wait to be written are bounded by their size, not only by their number."""

    def large(blob: str) -> None:
        pass

    finisher = Finisher(using="default", tell=lambda told: None, is_quiet=lambda: False)
    size = BATCH_BYTES * 2 // 5
    count = 0
    while not finisher.is_congested:
        finisher.put(run_of(large, {"blob": "x" * size}))
        count += 1
    assert abs(count - BACKLOG_BYTES / size) < 2
    assert len(finisher._take()) == 3
    assert not finisher.is_congested
    while finisher._take():
        pass
    finisher.put(run_of(lambda: None))
    assert finisher._bytes == 2
