"""Time limits: they hold in every thread, to the fraction of a second, and what has none is left alone."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connections
from django.utils import timezone

from django_jobs import JobContext
from django_jobs.models import JobExecution, Worker
from django_jobs.states import Status
from tests.acc import jobs
from tests.cases.test_stopping import STUBBORN, Start, became, canary, pending
from tests.runtime.workers import a_worker, ended, jobs_of
from tests.support import Ledger, assert_consistent, wait_for

# Seconds, for a process whose slots all hang for ever; a busy machine adds to the half second they are given.
IN_TIME = 8.0


def nap(s: float) -> None:
    """Sleep in steps between which an exception can land."""
    deadline = time.monotonic() + s
    while time.monotonic() < deadline:
        time.sleep(0.01)


def took(row: JobExecution) -> float:
    assert row.started_at is not None and row.completed_at is not None
    return (row.completed_at - row.started_at).total_seconds()


@pytest.mark.django_db(transaction=True)
@pytest.mark.medium
def test_a_run_that_is_too_long_ends_at_its_limit_and_is_not_started_again() -> None:
    """A task that times out is started again and again, though one attempt is all it has.

    Sources: django-q2/django-q2#114, #173.
    """
    tries: list[int] = []

    def long(ctx: JobContext) -> None:
        tries.append(ctx.attempt)
        nap(20)

    def mark() -> None:
        pass

    with jobs_of(long, mark, timeout=0.5) as [long_job, mark_job], a_worker(concurrency=1):
        row = ended(long_job.push())
        assert (row.status, row.error, row.attempt) == (Status.ERROR, "TimedOut: timed out after 0.5 s", 1)
        assert 0.5 <= took(row) < 10
        assert ended(mark_job.push()).status == Status.OK
        time.sleep(0.3)
    row.refresh_from_db()
    assert (row.status, tries) == (Status.ERROR, [1])
    assert_consistent()


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("timeout", [0.3, timedelta(milliseconds=300)])
@pytest.mark.medium
def test_a_limit_below_a_second_is_a_limit(timeout: Any) -> None:
    """A limit of half a second is cut down to 0, which switches it off. Source: coleifer/huey 3.0.2 changelog."""

    def long() -> None:
        nap(20)

    with jobs_of(long, timeout=timeout) as [long_job], a_worker():
        row = ended(long_job.push())
    assert row.status == Status.ERROR
    assert 0.3 <= took(row) < 10
    assert_consistent()


@pytest.mark.subprocess
def test_a_delay_below_a_second_is_waited_for_and_none_or_less_is_none(runjobs: Start, ledger: Ledger) -> None:
    """See above. Source: coleifer/huey 3.0.2 changelog."""
    process = runjobs().wait_ready()
    canary(ledger, process)
    pushed_at = time.time()
    rows = {
        delay: jobs.mark.using(delay=delay).push(tag=str(delay)) for delay in (0, -5, 0.3, timedelta(milliseconds=300))
    }
    assert [row.status for row in rows.values()] == [Status.PENDING] * 2 + [Status.SCHEDULED] * 2
    past = jobs.mark.using(scheduled_at=timezone.now() - timedelta(seconds=5)).push(tag="past")
    assert past.status == Status.PENDING
    for row in (*rows.values(), past):
        became(row, Status.OK)
    for delay, row in rows.items():
        waited = ledger.starts(row.pk)[0].time - pushed_at
        least = delay.total_seconds() if isinstance(delay, timedelta) else delay
        assert least <= waited
        assert waited < max(least, 0) + 10
    canary(ledger, process)
    assert_consistent()


@pytest.mark.django_db(transaction=True)
@pytest.mark.medium
def test_limits_hold_in_every_slot_of_a_command_that_runs_outside_the_main_thread(ledger: Ledger) -> None:
    """Limits by SIGALRM raise ValueError outside the main thread, or never fire for work in threads.

    Sources: rq/rq#2135, #734.
    """
    outcome: list[BaseException | None] = []

    def command() -> None:
        try:
            call_command("runjobs", "--worker", "--once", "--concurrency", "4", verbosity=0)
            outcome.append(None)
        except BaseException as error:
            outcome.append(error)
        finally:
            connections.close_all()

    def long() -> None:
        nap(20)

    with jobs_of(long, timeout=0.5) as [long_job]:
        rows = long_job.push_many([{}] * 8)
        thread = threading.Thread(target=command)
        thread.start()
        thread.join(20)
        assert outcome == [None]
    for row in rows:
        row.refresh_from_db()
        assert row.error == "TimedOut: timed out after 0.5 s"
        assert took(row) < 10
    starts = sorted(row.started_at for row in rows if row.started_at is not None)
    # Four at once, then four more.
    assert starts[3] < min(row.completed_at for row in rows if row.completed_at is not None)
    assert_consistent()


@pytest.mark.subprocess
@pytest.mark.slow
@pytest.mark.parametrize("limit", [1, None])
def test_what_has_no_time_limit_is_neither_ended_nor_rescued_and_none_inherits_it(
    limit: float | None, runjobs: Start, ledger: Ledger
) -> None:
    """Zero and None mean one thing to the worker and another to the rescuer, who takes what may run without limit.

    Sources: riverqueue/river PR#1331, PR#1288.
    """
    hasty = {"TIMEOUT": limit, "HEARTBEAT_INTERVAL": 0.5, "WORKER_LOST_AFTER": 1.5}
    # The second one sweeps and rescues.
    processes = [runjobs(jobs=hasty, **STUBBORN).wait_ready() for _ in range(2)]
    rows = {
        name: pending(f"stubborn.{name}", payload={"s": 5}, max_attempts=1)
        for name in ("inherits", "unlimited", "limited")
    }
    became(rows["limited"], Status.ERROR)
    assert took(rows["limited"]) < 5
    became(rows["inherits"], Status.OK if limit is None else Status.ERROR)
    became(rows["unlimited"], Status.OK)
    assert took(rows["unlimited"]) >= 5
    for row in rows.values():
        row.refresh_from_db()
        assert (row.attempt, row.rescues) == (1, 0)
        assert row.status == Status.OK or "timed out after" in row.error
    assert processes[1].stop() == 0
    canary(ledger, processes[0])
    assert_consistent()


@pytest.mark.subprocess
@pytest.mark.slow
def test_slots_that_hang_in_a_system_call_are_ended_in_time_and_the_process_begins_anew(
    runjobs: Start, ledger: Ledger
) -> None:
    """Threads in a system call cannot be interrupted: slot after slot hangs, and only "limit exceeded" is logged.

    Sources: Bogdanp/dramatiq#653, #211.
    """
    process = runjobs("--worker", jobs={"CONCURRENCY": 2, "INTERRUPT_GRACE": 0.5}, **STUBBORN).wait_ready()
    stuck = [pending("stubborn.silent_peer") for _ in range(3)]
    marks = jobs.mark.push_many([{"tag": str(n)} for n in range(3)])
    for row in stuck:
        became(row, Status.ERROR)
        assert row.error == "TimedOut: timed out after 0.5 s, and its handler did not stop"
        assert took(row) < IN_TIME
        # Where it hung.
        assert "ours.recv(1)" in row.errors[0]["traceback"]
    for row in marks:
        became(row, Status.OK)
    wait_for(lambda: Worker.objects.filter(pid=process.pid).count() >= 2, 20, "the process began anew")
    live = Worker.objects.filter(pid=process.pid, stopped_at=None)
    wait_for(lambda: live.count() == 1, 20, "it has said goodbye and registered again")
    assert process.process.poll() is None
    assert all(len(ledger.starts(row.pk)) == 1 for row in [*stuck, *marks])
    canary(ledger, process)
    # Two long ones side by side: both slots are there.
    pair = [jobs.slow.push(s=1) for _ in range(2)]
    for row in pair:
        became(row, Status.OK)
    assert max(ledger.starts(row.pk)[0].time for row in pair) < min(ledger.ends(row.pk)[0].time for row in pair)
    assert_consistent()
