"""A million rows are swept and trimmed beside the work: in small statements, with little memory, and no job waits."""

from __future__ import annotations

import statistics
import time
from datetime import datetime, timedelta

import pytest
from django.db import connection

from django_jobs import clock
from django_jobs.models import JobExecution
from django_jobs.retention import BATCH
from django_jobs.runtime.portions import PAGE
from django_jobs.runtime.sweep import PAGES, Sweep
from django_jobs.runtime.trim import Trim
from django_jobs.states import Status
from tests.acc import jobs
from tests.cases.copies import analyze, fill
from tests.cases.test_scale import MEGABYTE, memory
from tests.cases.test_stopping import Start, canary
from tests.factories import JobExecutionFactory, WorkerFactory
from tests.support import FULL_SIZE, Ledger, sized

pytestmark = [pytest.mark.slow(30), pytest.mark.subprocess, pytest.mark.scale]

# To make a million rows takes half a minute, and to trim them takes minutes: the end is seen at full size only.
ROWS = sized(200_000, 1_000_000)
# Of these, so many wait in a queue that nobody serves, and are hinted again and again.
WAITING = ROWS // 10
KEPT = 50
WATCHED = 15.0


@pytest.fixture
def a_million_rows(transactional_db: None) -> datetime:
    """Fill the table; return when the rows were pushed."""
    then = clock.now("default") - timedelta(days=100)
    old = {"now": then, "created_at": then, "updated_at": then}
    worker = WorkerFactory(stopped=True)
    fill(JobExecutionFactory(ok=True, worker=worker, **old), 1, ROWS - WAITING)
    waits = JobExecutionFactory(pending=True, queue="elsewhere", **old)
    JobExecution.objects.filter(pk=waits.pk).update(hinted_at=then)
    fill(waits, ROWS - WAITING + 1, WAITING)
    analyze()
    return then


def largest_statement(settings: object) -> int:
    """Sweep and trim here for a moment; return how many rows the largest of their statements read or wrote."""
    counts: list[int] = []

    def count(execute: object, sql: str, params: object, many: bool, context: dict[str, object]) -> object:
        answer = execute(sql, params, many, context)
        counts.append(context["cursor"].rowcount)
        return answer

    now = clock.now("default")
    with connection.execute_wrapper(count):
        assert Sweep(using="default").rehint(now) == min(PAGE * PAGES, WAITING + 1)
        portions = Trim(using="default").portions(now)
        assert sum(next(portions) for _ in range(20)) > 20
    return max(counts)


def test_a_million_rows_are_swept_and_trimmed_in_small_parts_beside_the_work(
    a_million_rows: datetime, runjobs: Start, ledger: Ledger, settings: object
) -> None:
    """Retention is one giant statement, or collects the rows in memory: time-out, lock, or out of memory.

    Sources: celery/django-celery-results#117, PR#483, celery/django-celery#202.
    """
    keep = {"ok": KEPT, "error": KEPT, "cancelled": KEPT}
    settings.DJANGO_JOBS = {"KEEP": keep}
    largest = largest_statement(settings)
    assert largest <= max(BATCH, PAGE)

    process = runjobs("--queues", "default", jobs={"TRIM_CRON": "* * * * * *", "KEEP": keep}).wait_ready()
    # How long it takes to start is not the question.
    canary(ledger, process)
    finished = JobExecution.objects.filter(status=Status.OK, job_name="acc.mark")
    start, before, until = memory(process.pid), finished.count(), time.monotonic() + WATCHED
    most, delays = start, []
    while time.monotonic() < until or (FULL_SIZE and finished[KEPT + 100 : KEPT + 101].exists()):
        row = jobs.slow.push(s=0)
        while not (starts := ledger.starts(row.pk)):
            assert time.time() - row.created_at.timestamp() < 30, "it does not start"
            time.sleep(0.01)
        delays.append(starts[0].time - row.created_at.timestamp())
        most = max(most, memory(process.pid))
    gone = before - finished.count()
    hinted = JobExecution.objects.pending().filter(hinted_at__gt=a_million_rows).count()
    print(f"{gone} rows trimmed and {hinted} hinted, at most {largest} in a statement")
    print(f"memory from {start / MEGABYTE:.0f} to {most / MEGABYTE:.0f} MB")
    print(f"of {len(delays)} jobs the longest delay {max(delays):.2f} s, the median {statistics.median(delays):.2f} s")
    assert gone > sized(0, 1000)
    # More than the first look, above, came to.
    assert hinted > PAGE * PAGES or hinted == WAITING + 1
    assert most - start < 50 * MEGABYTE
    # Speed is asked for only where nothing else runs.
    if FULL_SIZE:
        assert max(delays) < 1
    assert "Traceback" not in process.output
