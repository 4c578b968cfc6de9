"""`runjobs --processes` with real processes: they die, are told, are killed; what they ran is where it belongs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from django_jobs.models import JobExecution, Worker
from django_jobs.states import Status
from tests.acc import jobs
from tests.factories import JobExecutionFactory
from tests.support import Ledger, Runjobs, assert_consistent, wait_for

pytestmark = pytest.mark.subprocess

Start = Callable[..., Runjobs]


def alive() -> dict[int, list[str]]:
    """The roles of the processes that have registered and did not say goodbye, by process id."""
    return dict(Worker.objects.filter(stopped_at=None).values_list("pid", "roles"))


def workers() -> set[int]:
    return {pid for pid, roles in alive().items() if "worker" in roles}


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return not Path(f"/proc/{pid}/stat").exists() or Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1][1] != "Z"


def status(row: JobExecution) -> str:
    return JobExecution.objects.values_list("status", flat=True).get(pk=row.pk)


def canary(ledger: Ledger, process: Runjobs) -> None:
    """Check that one of its children works."""
    row = jobs.mark.push(tag="canary")
    wait_for(lambda: status(row) == Status.OK, 15, "the canary is ok")
    (entry,) = ledger.ends(row.pk)
    assert entry.pid != process.pid
    assert entry.pid in workers()


def test_a_killed_child_is_replaced_the_others_go_on_and_a_stop_is_0(runjobs: Start, ledger: Ledger) -> None:
    """A child is OOM-killed, the master shuts everything down and exits 0. Source: Bogdanp/dramatiq#376."""
    process = runjobs("--processes", "2").wait_ready(60, workers=3)
    before = alive()
    assert sorted(before.values()) == [["scheduler", "sweep"], ["worker"], ["worker"]]
    row, other = jobs.slow_retry.push(s=3.0), jobs.slow.push(s=4.0)
    wait_for(lambda: ledger.starts(row.pk) and ledger.starts(other.pk), 10, "the handlers have begun")
    victim = ledger.starts(row.pk)[0].pid
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: len(workers() - {victim} - set(before)) == 1, 15, "another worker is there")
    wait_for(lambda: status(row) == Status.OK, 20, "the row of the killed child ran again")
    assert len(ledger.starts(row.pk)) == 2
    if ledger.starts(other.pk)[0].pid != victim:
        wait_for(lambda: status(other) == Status.OK, 10, "what ran elsewhere was not disturbed")
    assert process.process.poll() is None
    assert set(before) - {victim} <= set(alive())
    canary(ledger, process)
    assert process.stop() == 0, process.output
    assert not any(map(is_there, {*before, *workers()}))
    # The killed one's row says nothing about its end.
    assert set(Worker.objects.filter(stopped_at=None).values_list("pid", flat=True)) <= {victim}
    text = process.output
    assert text.count("queues: any; slots: 2 times 10") == text.count("jobs: ") == 1
    assert text.count("System check identified") <= 1
    assert text.count("was killed by SIGKILL; it is replaced in 0.5 s") == 1
    (line,) = [line for line in text.splitlines() if f"ok acc.slow_retry {row.pk}" in line]
    assert f"[{ledger.ends(row.pk)[0].pid}]" in line
    assert "Traceback" not in text
    assert_consistent()


@pytest.mark.slow
def test_a_signal_to_all_of_them_at_once_lets_all_drain(runjobs: Start, ledger: Ledger) -> None:
    """What a terminal and systemd do; a child that hears of it twice must not take that for impatience."""
    process = runjobs("--worker", "--processes", "2", jobs={"CONCURRENCY": 2, "DRAIN_TIMEOUT": 10})
    process.wait_ready(60, workers=2)
    rows = [jobs.slow.push(s=1.5) for _ in range(4)]
    wait_for(lambda: len(ledger.starts()) == 4, 10, "all run")
    assert len({entry.pid for entry in ledger.starts()}) == 2
    process.kill_group(signal.SIGINT)
    assert process.wait(15) == 0, process.output
    assert {status(row) for row in rows} == {Status.OK}
    assert len(ledger.ends()) == 4
    assert_consistent()


@pytest.mark.slow
def test_a_second_signal_ends_all_of_them_at_once(runjobs: Start, ledger: Ledger) -> None:
    process = runjobs("--processes", "2", jobs={"DRAIN_TIMEOUT": 20}).wait_ready(60, workers=3)
    pids = set(alive())
    row = jobs.slow_retry.push(s=30.0)
    wait_for(lambda: ledger.starts(row.pk), 10, "the handler has begun")
    process.kill(signal.SIGTERM)
    wait_for(lambda: "waiting up to 20 s" in process.output, 10, "the signal was taken and passed on")
    assert process.process.poll() is None
    process.kill(signal.SIGTERM)
    assert process.wait(10) == 143
    wait_for(lambda: not any(map(is_there, pids)), 10, "nobody is left")
    assert status(row) == Status.RUNNING


@pytest.mark.slow
def test_a_stop_takes_as_long_as_that_of_one_process_whatever_the_handlers_do(runjobs: Start, ledger: Ledger) -> None:
    """Rows stay "processing" after the 30 s that a platform grants. Source: riverqueue/river PR#1290."""
    process = runjobs(
        "--worker",
        "--processes",
        "3",
        jobs={"DRAIN_TIMEOUT": 0.5, "INTERRUPT_GRACE": 0.5, "CONCURRENCY": 2},
        DJANGO_SETTINGS_MODULE="tests.cases.stubborn.settings",
    ).wait_ready(60, workers=3)
    again = [JobExecutionFactory(pending=True, job_name="stubborn.swallowing_retry", max_attempts=3) for _ in range(3)]
    over = [JobExecutionFactory(pending=True, job_name="stubborn.in_a_system_call") for _ in range(3)]
    wait_for(lambda: len(ledger.starts()) == 6, 20, "all run")
    began = time.monotonic()
    process.kill(signal.SIGTERM)
    code = process.wait(20)
    assert time.monotonic() - began < 0.5 + 7.0
    assert code == 0, process.output
    assert {status(row) for row in again} == {Status.PENDING}
    assert {status(row) for row in over} == {Status.ERROR}
    assert_consistent()


@pytest.mark.slow
@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "busy"])
def test_children_end_in_order_when_their_parent_is_killed(is_busy: bool, runjobs: Start, ledger: Ledger) -> None:
    """Children outlive a killed parent as orphans, and run beside those of the next one."""
    process = runjobs("--processes", "2", jobs={"DRAIN_TIMEOUT": 10}).wait_ready(60, workers=3)
    pids = set(alive())
    row = jobs.slow.push(s=2.0) if is_busy else None
    if row is not None:
        wait_for(lambda: ledger.starts(row.pk), 10, "the handler has begun")
    process.kill(signal.SIGKILL)
    process.wait()
    wait_for(lambda: not any(map(is_there, pids)), 10, "nobody is left")
    assert "stopping: the supervisor is gone" in process.output
    if row is not None:
        assert status(row) == Status.OK
    assert_consistent()


@pytest.mark.slow
def test_the_parent_ends_children_that_start_when_it_is_told(runjobs: Start) -> None:
    """A signal during the start, at which a half-started process dies with a traceback."""
    process = runjobs("--processes", "2")
    wait_for(lambda: "processes: " in process.output, 20, "the children are on their way")
    process.kill_group(signal.SIGINT)
    assert process.wait(15) == 0, process.output
    assert "Traceback" not in process.output
    assert not Worker.objects.filter(stopped_at=None).exists()


@pytest.mark.slow
def test_a_child_whose_scheduler_breaks_is_replaced(runjobs: Start, tmp_path: Path, ledger: Ledger) -> None:
    """See above: exit code 0 is for a requested stop only. Source: Bogdanp/dramatiq#376."""
    breaks = {"DJANGO_SETTINGS_MODULE": "tests.cases.dying_settings", "ACC_CRON": "* * * * * *"}
    process = runjobs("--processes", "1", DIED=str(tmp_path / "died"), **breaks)
    wait_for(lambda: ledger.ends(tag="tick"), 30, "ticks come")
    assert "process 2 (scheduler, sweep), pid " in process.output
    assert "ended with exit code 1; it is replaced in 0.5 s" in process.output
    assert process.output.count("stopping: the scheduler thread died of SystemExit") == 1
    assert process.stop() == 0, process.output
    alone = runjobs(DIED=str(tmp_path / "died again"), **breaks)
    assert alone.wait(20) == 1


@pytest.mark.slow
def test_a_handler_that_does_not_stop_costs_its_own_child_only(runjobs: Start, ledger: Ledger) -> None:
    process = runjobs(
        "--worker",
        "--processes",
        "2",
        jobs={"CONCURRENCY": 2},
        DJANGO_SETTINGS_MODULE="tests.cases.stubborn.settings",
    ).wait_ready(60, workers=2)
    before = workers()
    stuck = JobExecutionFactory(pending=True, job_name="stubborn.silent_peer")
    wait_for(lambda: ledger.starts(stuck.pk), 10, "the handler has begun")
    culprit = ledger.starts(stuck.pk)[0].pid
    wait_for(lambda: status(stuck) == Status.ERROR, 15, "its row has ended")
    wait_for(lambda: len(workers() - before) == 1, 20, "another child is there")
    wait_for(lambda: not is_there(culprit), 10, "the stuck one is gone")
    assert before - {culprit} <= workers()
    assert "is replaced, as it requested" in process.output
    canary(ledger, process)
    assert process.stop() == 0, process.output


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stopped", "without Python's lock"])
def test_a_child_that_hangs_as_a_whole_is_killed_and_replaced(how: str, runjobs: Start, ledger: Ledger) -> None:
    """Its rows are rescued, and without an end of the process its slots would be lost for good."""
    process = runjobs(
        "--worker", "--processes", "2", DJANGO_SETTINGS_MODULE="tests.cases.stubborn.settings"
    ).wait_ready(60, workers=2)
    before = workers()
    name = "acc.slow_retry" if how == "stopped" else "stubborn.holding_the_lock_retry"
    row = JobExecutionFactory(pending=True, job_name=name, max_attempts=3, payload={"s": 1} if how == "stopped" else {})
    wait_for(lambda: ledger.starts(row.pk), 10, "the handler has begun")
    victim = ledger.starts(row.pk)[0].pid
    if how == "stopped":
        os.kill(victim, signal.SIGSTOP)
    wait_for(lambda: not is_there(victim), 20, "it is gone")
    wait_for(lambda: len(workers() - before) == 1, 20, "another child is there")
    wait_for(lambda: status(row) == Status.OK, 20, "its row ran elsewhere")
    assert before - {victim} <= workers()
    text = process.output
    assert f"pid {victim} shows no sign of life and is killed" in text
    assert f"pid {victim} was killed by SIGKILL; it is replaced in 0.5 s" in text
    canary(ledger, process)
    assert process.stop() == 0, process.output
    assert_consistent()


@pytest.mark.slow
def test_children_are_not_blamed_for_what_stops_their_supervisor_or_all_of_them(runjobs: Start, ledger: Ledger) -> None:
    process = runjobs("--worker", "--processes", "2").wait_ready(60, workers=2)
    before = workers()
    canary(ledger, process)
    for stopped in (process.kill, process.kill_group):
        stopped(signal.SIGSTOP)
        # Longer than it takes to be called dead.
        time.sleep(7)
        stopped(signal.SIGCONT)
        canary(ledger, process)
    assert all(map(is_there, before))
    assert "no sign of life" not in process.output
    assert process.stop() == 0, process.output


@pytest.mark.slow
def test_children_are_replaced_after_so_many_runs_and_each_row_runs_once(runjobs: Start, ledger: Ledger) -> None:
    process = runjobs("--worker", "--processes", "2", "--max-jobs", "20").wait_ready(60, workers=2)
    rows = [jobs.mark.push() for _ in range(100)]
    wait_for(lambda: JobExecution.objects.filter(status=Status.OK).count() == len(rows), 60, "all ran")
    runs = [entry.pid for entry in ledger.starts()]
    assert len(runs) == len(rows)
    assert len(set(runs)) >= 5
    assert max(map(runs.count, runs)) <= 20
    assert process.stop() == 0, process.output
    assert "WARNING [" not in process.output
    assert_consistent()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_the_start_method_of_the_project_does_not_matter(
    method: str, runjobs: Start, ledger: Ledger, tmp_path: Path
) -> None:
    """With spawn and forkserver children lack django.setup(). Sources: django-q2 PR#116, coleifer/huey 2.5.4, 3.1.0."""
    (tmp_path / "method_settings.py").write_text(
        f"import multiprocessing\nmultiprocessing.set_start_method({method!r})\nfrom tests.settings import *\n"
    )
    process = runjobs(
        "--worker",
        "--processes",
        "2",
        DJANGO_SETTINGS_MODULE="method_settings",
        PYTHONPATH=f"{os.environ.get('PYTHONPATH', '')}{os.pathsep}{tmp_path}{os.pathsep}{Path.cwd()}",
    ).wait_ready(60, workers=2)
    canary(ledger, process)
    assert process.stop() == 0, process.output
