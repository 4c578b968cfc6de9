"""A process that is asked to stop ends in time, and what it ran is where it belongs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from django_jobs.models import JobExecution, Worker
from django_jobs.runtime.exits import LINGER
from django_jobs.runtime.stopping import StopRequest, StopRequests
from django_jobs.states import Status
from tests.acc import jobs
from tests.factories import JobExecutionFactory
from tests.forwarder import forwarded_database
from tests.support import SHORT, Ledger, Runjobs, assert_consistent, became, child_environment, wait_for

Start = Callable[..., Runjobs]

STUBBORN = {"DJANGO_SETTINGS_MODULE": "tests.cases.stubborn.settings"}
# What follows a drain: to interrupt, to write, to say goodbye.
AFTER_DRAIN = 7.0

WITH_RETRY = ("stubborn.asleep_retry", "stubborn.swallowing_retry")
WITHOUT = (
    "stubborn.in_a_system_call",
    "stubborn.shielded",
    "stubborn.uninterruptible",
    "stubborn.async_deaf",
    "stubborn.async_in_a_thread",
    "stubborn.async_in_the_pool",
)


def pending(name: str, **values: Any) -> JobExecution:
    """A row of a job that only the processes know."""
    return JobExecutionFactory(pending=True, job_name=name, **values)


def began(ledger: Ledger, *rows: JobExecution) -> None:
    wait_for(lambda: all(ledger.starts(row.pk) for row in rows), 20, "the handlers began")


def canary(ledger: Ledger, process: Runjobs) -> None:
    """Check that this process, the only one that works, still does."""
    row = became(jobs.mark.push(tag="canary"), Status.OK, 30)
    assert [entry.pid for entry in ledger.ends(row.pk)] == [process.pid]


def seconds_to_end(process: Runjobs, number: int = signal.SIGTERM, *, within: float) -> float:
    started = time.monotonic()
    process.kill(number)
    process.wait(within)
    return time.monotonic() - started


# Whatever the handlers do


@pytest.mark.subprocess
@pytest.mark.slow(30)
@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        pytest.param({"DRAIN_TIMEOUT": 0.5, "INTERRUPT_GRACE": 0.5}, 0.5 + AFTER_DRAIN, id="short"),
        pytest.param({"DRAIN_TIMEOUT": 20, "INTERRUPT_GRACE": 5}, 27, id="the defaults"),
    ],
)
def test_a_stop_takes_27_seconds_at_most_whatever_the_handlers_do(
    settings: dict[str, Any], limit: float, runjobs: Start, ledger: Ledger
) -> None:
    """Handlers that cannot be stopped keep the process alive until the platform kills it, and their rows "processing".

    Sources: riverqueue/river PR#1290, dabapps/django-db-queue PR#44.
    """
    process = runjobs("--worker", jobs={**settings, "CONCURRENCY": 12}, **STUBBORN).wait_ready()
    again = [pending(name, max_attempts=3) for name in WITH_RETRY]
    over = [pending(name) for name in WITHOUT]
    left = became(pending("stubborn.leaving_a_thread"), Status.OK)
    began(ledger, *again, *over)
    # Once it runs, no other coroutine does.
    over.append(pending("stubborn.async_blocking"))
    began(ledger, *over)
    took = seconds_to_end(process, within=limit + 10)
    assert took < limit, process.output
    assert process.process.returncode == 0, process.output
    for row in again:
        row.refresh_from_db()
        assert (row.status, row.attempt) == (Status.PENDING, 0)
    for row in over:
        row.refresh_from_db()
        assert (row.status, row.attempt) == (Status.ERROR, 1)
        assert "interrupted by shutdown" in row.error
    assert ledger.ends() == ledger.ends(left.pk)
    assert Worker.objects.get().stopped_at is not None
    assert_consistent()
    after = runjobs("--worker", jobs={"CONCURRENCY": 12}, **STUBBORN).wait_ready()
    wait_for(lambda: all(len(ledger.starts(row.pk)) == 2 for row in again), 15, "what has retry runs again")
    assert all(len(ledger.starts(row.pk)) == 1 for row in over)
    canary(ledger, after)


@pytest.mark.subprocess
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_process_ends_within_a_second_of_a_signal(
    number: signal.Signals, runjobs: Start, ledger: Ledger
) -> None:
    """Threads of timers and heartbeats keep the process alive after SIGTERM. Source: knifecake/steady-queue#16."""
    # More than once only where others keep the machine busy.
    for _ in range(3):
        process = runjobs().wait_ready()
        canary(ledger, process)
        took = seconds_to_end(process, number, within=5)
        assert process.process.returncode == 0
        assert Worker.objects.latest("started_at").stop_reason == number.name
        if took < 1:
            break
    assert took < 1
    assert_consistent()


@pytest.mark.subprocess
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_at_any_moment_of_the_start_ends_the_process(number: signal.Signals, runjobs: Start) -> None:
    """See above. Before the command is reached it is Python's own end; from then on the exit code is 0."""
    codes: list[int | None] = []
    for tenths in range(0, 100, 2):
        process = runjobs()
        time.sleep(tenths / 10)
        assert seconds_to_end(process, number, within=10) < 5, process.output
        codes.append(process.process.returncode)
        assert codes[-1] == 0 or "queues: " not in process.output, process.output
        if codes.count(0) == 2:
            break
    assert codes[-1] == 0
    assert not Worker.objects.filter(stopped_at=None).exists()


@pytest.mark.subprocess
@pytest.mark.slow
def test_what_a_deploy_interrupts_is_run_at_once_by_another_process_as_the_same_attempt(
    runjobs: Start, ledger: Ledger
) -> None:
    """A job interrupted by a deploy waits out the back-off of an error, or burns one of its attempts.

    Sources: riverqueue/river PR#1290, dabapps/django-db-queue PR#44.
    """
    brief = {"DRAIN_TIMEOUT": 0.2, "INTERRUPT_GRACE": 0.2, "CONCURRENCY": 1}
    processes = {process.pid: process for process in (runjobs("--worker", jobs=brief) for _ in range(2))}
    wait_for(lambda: Worker.objects.count() == 2, 30, "both have registered")
    row = jobs.slow_retry.push(s=1)
    began(ledger, row)
    first = processes.pop(ledger.starts(row.pk)[0].pid)
    (second,) = processes.values()
    assert first.stop(10) == 0, first.output
    stopped = Worker.objects.get(pid=first.pid).stopped_at
    became(row, Status.OK)
    assert [(entry.attempt, entry.pid) for entry in ledger.starts(row.pk)] == [(1, first.pid), (1, second.pid)]
    assert len(ledger.ends(row.pk)) == 1
    assert (row.attempt, row.errors) == (1, [])
    assert stopped is not None
    assert ledger.starts(row.pk)[1].time - stopped.timestamp() < 1
    canary(ledger, second)
    assert_consistent()


def test_handlers_that_do_not_stop_ask_for_one_new_beginning_which_a_signal_still_stops() -> None:
    """See above; a process that took the second request for a stop was gone, with its work undone."""
    requests = StopRequests()
    for _ in range(3):
        requests.put(StopRequest(reason="a handler does not stop", is_recycle=True))
    assert requests.wait(0) is not None
    assert requests.overrides() is None
    requests.put(StopRequest(reason="a handler does not stop", is_recycle=True))
    requests.put(StopRequest(reason="SIGTERM"))
    assert requests.overrides() == StopRequest(reason="SIGTERM")


# A database that takes connections and never answers


@pytest.mark.subprocess
@pytest.mark.postgres
@pytest.mark.mysql
@pytest.mark.slow
@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "busy"])
def test_a_stop_takes_27_seconds_at_most_also_when_the_database_has_fallen_silent(
    is_busy: bool, runjobs: Start, ledger: Ledger
) -> None:
    """See above: threads that wait for an answer keep the process alive. Source: knifecake/steady-queue#16."""
    with forwarded_database() as (cable, url):
        process = runjobs(DATABASE_URL=url).wait_ready()
        canary(ledger, process)
        rows = [jobs.slow.push(s=1.5), jobs.slow_retry.push(s=1.5)] if is_busy else []
        began(ledger, *rows)
        cable.hush()
        time.sleep(1)
        # What the silence does not keep from its turn is a drain of 2 s.
        took = seconds_to_end(process, within=20)
        assert took < 2 + AFTER_DRAIN, process.output
        if is_busy:
            assert process.process.returncode == 1, process.output
    after = runjobs(jobs={"HEARTBEAT_INTERVAL": 0.5, "WORKER_LOST_AFTER": 2}).wait_ready()
    if is_busy:
        became(rows[0], Status.ERROR)
        became(rows[1], Status.OK)
        assert [len(ledger.starts(row.pk)) for row in rows] == [1, 2]
    canary(ledger, after)
    assert_consistent()


@pytest.mark.subprocess
@pytest.mark.postgres
@pytest.mark.mysql
def test_a_signal_ends_the_start_also_when_the_database_never_answers(runjobs: Start) -> None:
    """See above."""
    with forwarded_database() as (cable, url):
        cable.hush()
        process = runjobs("--skip-checks", DATABASE_URL=url)
        assert cable.reached.wait(30), process.output
        assert process.process.poll() is None, process.output
        assert seconds_to_end(process, within=10) < 5
        assert process.process.returncode == 0, process.output


# A reader of its output that reads no more


@pytest.mark.subprocess
@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--processes", "1"]], ids=["one", "supervised"])
@pytest.mark.parametrize(("stream", "code"), [("stdout", 0), ("stderr", 1)])
def test_a_stop_takes_27_seconds_at_most_also_when_nobody_reads_what_it_says(
    stream: str, code: int, options: list[str], transactional_db: None
) -> None:
    """Fault: it waited to log that it stops, or to flush what it has printed, until it was killed."""
    reader, writer = os.pipe()
    streams: dict[str, int] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, stream: writer}
    environment = child_environment(
        DJANGO_JOBS_OVERRIDES=json.dumps({**SHORT, "DRAIN_TIMEOUT": 0.5}), PYTHONUNBUFFERED=""
    )
    process = subprocess.Popen([sys.executable, "-m", "django", "runjobs", *options], env=environment, **streams)
    try:
        became(jobs.mark.push(), Status.OK, 60)
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, b".")
        os.set_blocking(writer, True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(0.5 + AFTER_DRAIN + 2 * LINGER + 1) == code
    finally:
        process.kill()
        process.wait()
        os.close(reader)
        os.close(writer)
