"""A real `runjobs` process: it registers itself, runs what was pushed, and ends when asked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from django_jobs.models import JobExecution, Worker
from django_jobs.states import Status
from tests.acc import jobs
from tests.support import ROOT, Ledger, Runjobs, assert_consistent, child_environment, wait_for

pytestmark = pytest.mark.subprocess


def test_a_process_runs_what_is_pushed_and_ends_with_zero_when_asked(
    runjobs: Callable[..., Runjobs], ledger: Ledger
) -> None:
    before = jobs.mark.push(tag="before it started")
    process = runjobs().wait_ready()
    after = jobs.mark.push(tag="while it runs")
    wait_for(lambda: JobExecution.objects.filter(status=Status.OK).count() == 2, 20, "both rows are ok")
    assert process.stop() == 0, process.output
    assert [entry.tag for entry in ledger.ends(before.pk)] == ["before it started"]
    assert {entry.pid for entry in ledger.starts(after.pk)} == {process.pid}
    assert Worker.objects.get(pid=process.pid).stopped_at is not None
    assert_consistent()


def test_a_killed_process_is_reaped_and_leaves_its_row_running(runjobs: Callable[..., Runjobs], ledger: Ledger) -> None:
    process = runjobs().wait_ready()
    row = jobs.slow.push(s=30)
    wait_for(lambda: ledger.starts(row.pk), 20, "the handler began")
    process.kill()
    assert process.wait() == -signal.SIGKILL
    row.refresh_from_db()
    assert row.status == Status.RUNNING
    assert ledger.ends(row.pk) == []


def test_a_second_ctrl_c_that_comes_when_all_is_over_but_the_exit_hooks_shows_no_traceback(
    runjobs: Callable[..., Runjobs], tmp_path: Path
) -> None:
    begun = tmp_path / "begun"
    (tmp_path / "slow_exit.py").write_text(
        "import atexit, pathlib, time\n"
        "from tests.settings import *\n"
        f"atexit.register(lambda: (pathlib.Path({str(begun)!r}).touch(), time.sleep(30)))\n"
    )
    process = runjobs(DJANGO_SETTINGS_MODULE="slow_exit", PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}").wait_ready()
    process.kill(signal.SIGINT)
    wait_for(begun.exists, 20, "the exit hooks have begun")
    process.kill(signal.SIGINT)
    process.wait(10)
    assert "KeyboardInterrupt" not in process.output


def test_a_reader_of_its_output_that_has_left_makes_no_failure_of_its_end(transactional_db: None) -> None:
    """Fault: exit code 120, and with --processes a failure of all, once a handler had printed something."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        process = subprocess.run(
            [sys.executable, "-m", "django", "runjobs", "--once"],
            # What is printed waits for the end, as in any process whose output is a pipe.
            env=child_environment(PYTHONUNBUFFERED=""),
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(writer)
    assert process.returncode == 0, process.stderr
    assert "BrokenPipeError" not in process.stderr
