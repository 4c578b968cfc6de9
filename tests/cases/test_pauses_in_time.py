"""A pause is seen by every process within a second, however busy that is, and outlives all of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import pytest

from django_jobs import clock, services
from django_jobs.models import JobExecution
from django_jobs.states import Parked
from tests.acc import jobs
from tests.factories import JobExecutionFactory
from tests.support import Ledger, Runjobs, wait_for

pytestmark = [pytest.mark.subprocess, pytest.mark.slow]

Start = Callable[..., Runjobs]
# What a claim that has begun may still bring, on a machine that is busy with tests.
UNDER_WAY = 0.5
ROWS = 3000


def keep_stage_busy(count: int) -> None:
    """Make rows that are due, in a queue that nobody serves."""
    due = clock.now("default") - timedelta(seconds=5)
    rows = (JobExecutionFactory.build(queue="elsewhere", scheduled=True, scheduled_at=due) for _ in range(count))
    JobExecution.objects.bulk_create(rows, batch_size=500)


@pytest.mark.slow(25)
@pytest.mark.parametrize("what", ["job", "queue"])
def test_nothing_starts_a_second_after_a_pause_in_any_process(runjobs: Start, ledger: Ledger, what: str) -> None:
    keep_stage_busy(3000)
    # Ten slots need fifteen seconds for these.
    jobs.slow.push_many([{"s": 0.05}] * ROWS)
    processes = [runjobs("--queues", "default") for _ in range(2)]
    wait_for(lambda: len({entry.pid for entry in ledger.starts()}) == 2, 20, "both run some")
    if what == "job":
        jobs.slow.pause()
    else:
        services.pause_queue("default")
    paused = time.time()
    wait_for(lambda: time.time() > paused + 2, 20, "two seconds are over")
    assert max(entry.time for entry in ledger.starts()) - paused < 1 + UNDER_WAY
    started = len(ledger.starts())
    assert started < ROWS
    # Those that come later know of it from the beginning.
    processes[0].stop()
    late = runjobs("--queues", "default").wait_ready()
    wait_for(
        lambda: not JobExecution.objects.filter(queue="elsewhere").due(clock.now("default")).exists(), 30, "staged"
    )
    assert len(ledger.starts()) == started
    parked = JobExecution.objects.filter(parked_reason=Parked.PAUSED, queue="default")
    if what == "job":
        wait_for(lambda: parked.count() == ROWS - started, 30, "all that is left is parked")
        jobs.slow.resume()
    else:
        assert not parked.exists()
        services.resume_queue("default")
    wait_for(lambda: len(ledger.starts()) > started, 20, "it goes on")
    for process in (processes[1], late):
        process.stop()
