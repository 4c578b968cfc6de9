"""Cron ticks with real processes: many at once, killed, frozen, deployed anew."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest

from django_jobs import clock
from django_jobs.models import JobExecution, JobState, Worker
from django_jobs.states import Status
from tests.acc import jobs
from tests.support import ROOT, Ledger, Runjobs, assert_consistent, child_environment, wait_for

pytestmark = pytest.mark.subprocess

Start = Callable[..., Runjobs]
SECOND = timedelta(seconds=1)
# Six fields: the seconds come last.
EACH_SECOND = {"ACC_CRON": "* * * * * *", "ACC_CRON_OVERLAP": "allow"}

WEB = """
import threading
from django.core.wsgi import get_wsgi_application
from django.test import RequestFactory
application = get_wsgi_application()
answers = []
application(RequestFactory().get("/admin/login/").environ, lambda status, headers: answers.append(status))
assert answers == ["200 OK"], answers
# Whatever fired a tick later would need a thread.
assert threading.enumerate() == [threading.main_thread()], threading.enumerate()
"""


def state() -> JobState:
    return JobState.objects.get(job_name="acc.tick")


def cursor() -> datetime | None:
    return JobState.objects.filter(job_name="acc.tick").values_list("last_tick_at", flat=True).first()


def ticks(since: datetime | None = None) -> list[datetime]:
    rows = JobExecution.objects.filter(job_name="acc.tick").order_by("tick_at")
    found = list(rows.values_list("tick_at", flat=True))
    return [tick for tick in found if since is None or tick > since]


def pass_ticks(number: int) -> JobState:
    """Wait until so many ticks have come; return the state before them."""
    wait_for(cursor, 20, "a scheduler saw the job")
    before = state()
    wait_for(lambda: cursor() >= before.last_tick_at + number * SECOND, 2 * number + 10, f"{number} ticks came")
    return before


def mid_second() -> None:
    """Wait for the half of a second, when no process is about a tick."""
    fraction = clock.now("default").microsecond / 1e6
    time.sleep((0.5 - fraction) % 1)


def assert_each_tick_once(ledger: Ledger, before: JobState) -> None:
    """Check that every tick since is one row or one counted skip, that it came in time, and that each row ran once."""
    last = state()
    found = ticks(before.last_tick_at)
    found = [tick for tick in found if tick <= last.last_tick_at]
    assert len(found) == len(set(found))
    passed = int(last.last_tick_at.timestamp()) - int(before.last_tick_at.timestamp())
    assert len(found) + last.skips - before.skips == passed
    # Of a second in which this machine did nothing at all.
    assert last.skips - before.skips <= max(2, len(found) // 10)
    for row in JobExecution.objects.filter(job_name="acc.tick"):
        assert timedelta(0) <= row.created_at - row.tick_at < 5 * SECOND, row
    began = Counter(entry.row_id for entry in ledger.starts())
    assert set(began.values()) == {1}


def is_quiet(process: Runjobs) -> bool:
    return not any(word in process.output for word in ("Traceback", "ERROR", "IntegrityError"))


@pytest.mark.slow
def test_four_processes_fire_each_tick_once_and_quietly(runjobs: Start, ledger: Ledger) -> None:
    """Two schedulers handle the same tick, and "update or create" lets both enqueue.

    Sources: knifecake/steady-queue PR#54, rails/solid_queue#636.
    """
    processes = [runjobs(**EACH_SECOND) for _ in range(4)]
    for process in processes:
        wait_for(lambda process=process: "queues: any" in process.output, 30, "it has begun")
    before = pass_ticks(3)
    assert_each_tick_once(ledger, before)
    assert all(process.stop() == 0 for process in processes)
    assert all(is_quiet(process) for process in processes)
    assert len(ledger.ends()) == JobExecution.objects.filter(status=Status.OK).count()
    assert_consistent()


@pytest.mark.sqlite
def test_web_processes_fire_nothing(transactional_db: None) -> None:
    """Registering a job at process start makes one copy per web process, each firing for ever.

    Sources: django-background-tasks/django-background-tasks#233, mwmbl/mwmbl PR#351, Koed00/django-q#566.
    """
    started = [
        subprocess.Popen(
            [sys.executable, "-c", WEB],
            cwd=ROOT,
            env=child_environment(**EACH_SECOND),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(3)
    ]
    for process in started:
        output, _ = process.communicate(timeout=60)
        assert (process.returncode, output) == (0, "")
    for model in (JobState, JobExecution, Worker):
        assert not model.objects.exists()


@pytest.mark.slow
def test_a_tick_that_ran_does_not_come_again_after_a_kill_though_its_row_is_gone(
    runjobs: Start, ledger: Ledger
) -> None:
    """After a restart the "missed run" logic fires a slot again that already ran.

    Sources: NousResearch/hermes-agent PR#68211, openclaw/openclaw#42640.
    """
    # One tick a minute; whoever comes within half a minute would still make up for it.
    second = (clock.now("default") + 10 * SECOND).second
    once: dict[str, Any] = {"ACC_CRON": f"* * * * * {second}", "ACC_PULSE": "1"}
    process = runjobs(**once).wait_ready()
    wait_for(lambda: JobExecution.objects.filter(job_name="acc.tick", status=Status.OK).exists(), 20, "the tick ran")
    [tick] = ticks()
    for is_pruned in (False, True):
        process.kill_group()
        process.wait()
        if is_pruned:
            JobExecution.objects.filter(job_name="acc.tick").delete()
        process = runjobs(**once).wait_ready()
        row = jobs.mark.push(tag=f"after {is_pruned}")
        wait_for(lambda row=row: ledger.ends(row.pk), 15, "the new process works")
        # The first of these may have been missed before it came; with the second its scheduler has looked at every job.
        pulses = JobExecution.objects.filter(job_name="acc.pulse", created_at__gt=row.created_at)
        wait_for(lambda pulses=pulses: pulses.count() >= 2, 15, "its scheduler has fired")
        assert clock.now("default") - tick < 30 * SECOND
        assert ticks() == ([] if is_pruned else [tick])
        assert len(ledger.starts(tag="tick")) == 1
        assert cursor() == tick
    assert_consistent()


@pytest.mark.slow
def test_each_tick_is_a_row_in_time_while_the_only_slot_is_busy(runjobs: Start, ledger: Ledger) -> None:
    """Periodic deferral happens on the loop of the jobs: long ones delay it, and missed slots are dropped.

    Source: procrastinate-org/procrastinate#292.
    """
    runjobs("--concurrency", "1", **EACH_SECOND).wait_ready()
    row = jobs.slow.using(priority="high").push(s=10, tag="slow")
    wait_for(lambda: ledger.starts(row.pk), 15, "the slot is taken")
    before = pass_ticks(4)
    assert not ledger.ends(row.pk)
    waiting = JobExecution.objects.filter(job_name="acc.tick", tick_at__gt=before.last_tick_at)
    assert waiting.count() >= 3
    assert all(each.created_at - each.tick_at < 2 * SECOND for each in waiting)
    assert all(each.status == Status.PENDING for each in waiting)
    wait_for(lambda: all(ledger.ends(each.pk) for each in waiting), 20, "the ticks that waited ran")
    assert_each_tick_once(ledger, before)


@pytest.mark.slow(65)
def test_sixty_ticks_come_once_with_three_schedulers_of_which_one_is_frozen_and_one_killed(
    runjobs: Start, ledger: Ledger
) -> None:
    """The advance of the next time is not stored when a process is frozen or dies, and its slots fire again in a burst.

    Sources: NousResearch/hermes-agent PR#68211, openclaw/openclaw#42640, django-q2/django-q2#266.
    """
    worker = runjobs("--worker", **EACH_SECOND).wait_ready()
    frozen, killed, spared = (runjobs("--scheduler", **EACH_SECOND).wait_ready() for _ in range(3))
    first = pass_ticks(10)
    mid_second()
    frozen.freeze()
    pass_ticks(15)
    frozen.kill(signal.SIGCONT)
    pass_ticks(5)
    mid_second()
    killed.kill()
    killed.wait()
    pass_ticks(10)
    # The one that was frozen does it alone.
    mid_second()
    spared.freeze()
    pass_ticks(10)
    spared.kill(signal.SIGCONT)
    pass_ticks(10)
    assert len(ticks(first.last_tick_at)) >= 54
    assert_each_tick_once(ledger, first)
    assert all(process.stop() == 0 for process in (frozen, spared))
    assert worker.stop() == 0
    assert all(is_quiet(process) for process in (worker, frozen, spared))
    assert_consistent()


@pytest.mark.slow
def test_in_a_rolling_deploy_old_code_stops_firing_and_no_tick_is_doubled(runjobs: Start, ledger: Ledger) -> None:
    """Old code and new code side by side during a rolling deploy create doubles.

    Sources: rails/solid_queue#382, celery/django-celery#54, procrastinate-org/procrastinate#1331, jobrunr/jobrunr#490.
    """
    old = [runjobs(**EACH_SECOND).wait_ready() for _ in range(2)]
    pass_ticks(2)
    for _ in range(2):
        runjobs(**{**EACH_SECOND, "ACC_CRON": "* * * * * */2"}).wait_ready()
    wait_for(lambda: state().schedule == "* * * * * */2 UTC", 20, "the new schedule is in force")
    swapped_at = clock.now("default")
    pass_ticks(6)
    assert all(process.process.poll() is None for process in old)
    assert state().schedule == "* * * * * */2 UTC"
    found = ticks()
    assert len(found) == len(set(found))
    after = ticks(swapped_at)
    assert len(after) >= 2
    assert [tick for tick in after if tick.second % 2] == []
    wait_for(lambda: len(ledger.starts()) >= len(found), 10, "all have run")
    assert set(Counter(entry.row_id for entry in ledger.starts()).values()) == {1}
    for process in old:
        assert process.stop() == 0
    assert_consistent()
