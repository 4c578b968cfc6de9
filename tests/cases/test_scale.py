"""Many rows and many runs cost what few do."""

from __future__ import annotations

import os
import statistics
import time
from datetime import timedelta
from pathlib import Path
from uuid import UUID

import pytest
from django.db import connection

from django_jobs import clock, registry, transitions
from django_jobs.fields import uuid7
from django_jobs.models import JobExecution
from django_jobs.states import Status
from tests.acc import jobs
from tests.cases.copies import analyze, fill
from tests.cases.test_stopping import Start, became, began, canary
from tests.factories import JobExecutionFactory, WorkerFactory
from tests.runtime.workers import a_liveness, a_worker, jobs_of
from tests.support import FULL_SIZE, Ledger, Runjobs, assert_consistent, sized, wait_for
from tests.test_query_plans import CLAIM_BEGINS, goes_by, plan_of

pytestmark = pytest.mark.slow

MEGABYTE = 1_000_000


def memory(pid: int) -> int:
    """Return the resident bytes of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow(20)
@pytest.mark.scale
@pytest.mark.django_db(transaction=True)
def test_many_finished_rows_make_no_claim_slower() -> None:
    """230,000 finished rows make the claim an order of magnitude slower. Source: RealOrangeOne/django-tasks#140."""

    def noop() -> None:
        pass

    def rate() -> float:
        noop_job.push_many([{}] * 1000)
        done = JobExecution.objects.filter(job_name="tests.noop").pending()
        started = time.perf_counter()
        with a_worker(concurrency=10) as worker:
            wait_for(lambda: not done.exists() and worker.is_idle, 60, "all have run")
            return 1000 / (time.perf_counter() - started)

    def look(worker_id: UUID) -> list[JobExecution]:
        return transitions.claim(
            queue="default",
            names=sorted(registry.names()),
            worker_id=worker_id,
            limit=10,
            now=clock.now("default"),
            using="default",
        )

    def poll() -> float:
        """The milliseconds of a look at a queue in which nothing is."""
        worker_id = a_liveness().worker_id
        times = []
        for _ in range(50):
            started = time.perf_counter()
            claimed = look(worker_id)
            times.append(time.perf_counter() - started)
            assert claimed == []
        return statistics.median(times) * 1000

    rows = sized(230_000, 500_000)
    with jobs_of(noop) as [noop_job]:
        rate()
        # The best of several: others use the machine too.
        empty = max(rate() for _ in range(sized(1, 5)))
        fill(JobExecutionFactory(ok=True, worker=WorkerFactory(stopped=True), job_name="tests.noop"), 1, rows)
        analyze()
        full = 0.0
        for _ in range(sized(1, 15)):
            full = max(full, rate())
            if full >= 0.8 * empty:
                break
        took = poll()
        noop_job.push_many([{}] * 1000)
        plan = plan_of(lambda: look(a_liveness().worker_id), CLAIM_BEGINS[connection.vendor])
    print(f"{empty:.0f}/s beside few rows, {full:.0f}/s beside {rows}; a look takes {took:.2f} ms")
    goes_by(plan, "django_jobs_claim")
    # Speed is asked for only where nothing else runs.
    if FULL_SIZE:
        assert full >= 0.7 * empty
        assert took < 5


@pytest.mark.slow(40)
@pytest.mark.scale
@pytest.mark.subprocess
def test_old_rows_go_in_portions_beside_the_work_and_a_kill_does_not_matter(runjobs: Start, ledger: Ledger) -> None:
    """Retention is one giant statement, or collects the rows in memory: time-out, lock, or out of memory.

    Sources: celery/django-celery-results#117, PR#483, celery/django-celery#202.
    """
    rows, kept = sized(30_000, 300_000), 50
    before = clock.now("default") - timedelta(days=100)
    # 10 kB of log in each.
    log = [{"level": "INFO", "message": os.urandom(50).hex()} for _ in range(80)]
    fill(JobExecutionFactory(ok=True, worker=WorkerFactory(stopped=True), now=before, logs=log), 1, rows)
    analyze()
    old = {"now": before, "created_at": before, "updated_at": before}
    elsewhere = WorkerFactory(names=["acc.mark"], queues=["elsewhere"])
    live = [
        JobExecutionFactory(pending=True, queue="elsewhere", **old),
        JobExecutionFactory(running=True, worker=elsewhere, **old),
        JobExecutionFactory(scheduled=True, **{**old, "scheduled_at": clock.now("default") + timedelta(days=1)}),
    ]
    trimming = {
        "TRIM_CRON": "* * * * * *",
        "KEEP": {"ok": kept, "error": kept, "cancelled": kept},
        # The worker elsewhere has beaten once, and nobody is to take it for dead.
        "WORKER_LOST_AFTER": 3600,
    }
    delays: list[float] = []

    def work_until(left: int, process: Runjobs) -> int:
        """Push all the time until so few rows are left; return the most memory that the process held."""
        most = 0
        # How long it takes to start is not the question.
        canary(ledger, process)
        while JobExecution.objects.filter(status=Status.OK).count() > left:
            row = jobs.slow.push(s=0)
            began(ledger, row)
            delays.append(ledger.starts(row.pk)[0].time - row.created_at.timestamp())
            most = max(most, memory(process.pid))
        return most

    first = runjobs("--queues", "default", jobs=trimming).wait_ready()
    start = memory(first.pid)
    most = work_until(rows * 2 // 3, first)
    first.kill()
    first.wait()
    second = runjobs("--queues", "default", jobs=trimming).wait_ready()
    most = max(most, work_until(2 * kept + 5, second))
    print(f"memory from {start / MEGABYTE:.0f} to {most / MEGABYTE:.0f} MB, the longest delay {max(delays):.2f} s")
    assert most - start < 100 * MEGABYTE
    # Speed is asked for only where nothing else runs.
    if FULL_SIZE:
        assert max(delays) < 2
    for row in live:
        before_it, status = row.status, JobExecution.objects.values_list("status", flat=True).get(pk=row.pk)
        assert status == before_it
    # The newest stayed.
    assert not JobExecution.objects.filter(job_name="acc.mark", status=Status.OK).count() > kept
    assert "Traceback" not in first.output + second.output


@pytest.mark.slow(40)
@pytest.mark.subprocess
@pytest.mark.sqlite
def test_thousands_of_runs_leave_no_memory_behind_with_debug_on(runjobs: Start, ledger: Ledger) -> None:
    """A worker that lives long leaks by its log of queries, by cursors and by large payloads.

    Source: procrastinate-org/procrastinate#1316.
    """
    process = runjobs(
        "-v",
        "0",
        "--skip-checks",
        jobs={"PAYLOAD_MAX_BYTES": 2 * MEGABYTE},
        DJANGO_SETTINGS_MODULE="tests.cases.debug_settings",
    ).wait_ready()

    def run(count: int, **payload: str) -> None:
        now = clock.now("default")
        for start in range(0, count, 50):
            rows = [
                JobExecution(id=uuid7(), job_name="stubborn.of_many_queries", payload=payload)
                for _ in range(min(50, count - start))
            ]
            transitions.insert(rows, now=now, using="default")
        unfinished = JobExecution.objects.exclude(status=Status.OK)
        wait_for(lambda: not unfinished.exists(), 120, "all are ok")

    # What ten large payloads at once need is needed once.
    run(300)
    run(200, blob="x" * MEGABYTE)
    early = memory(process.pid)
    run(2300)
    run(200, blob="x" * MEGABYTE)
    late = memory(process.pid)
    print(f"memory from {early / MEGABYTE:.0f} to {late / MEGABYTE:.0f} MB")
    assert late - early < 50 * MEGABYTE
    assert len(ledger.starts()) == 3000
    assert max(int(entry.tag) for entry in ledger.starts()) < 60
    became(jobs.mark.push(tag="canary"), Status.OK)
    assert_consistent()
