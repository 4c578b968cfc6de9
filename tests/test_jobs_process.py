"""`manage.py jobs` as a process: its exit codes, Ctrl-C, and a reader that leaves early."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.factories import JobExecutionFactory
from tests.support import child_environment, manage, wait_for

pytestmark = [pytest.mark.subprocess, pytest.mark.django_db(transaction=True)]

COMMAND = [sys.executable, "-m", "django", "jobs"]
FULL = Path("/dev/full")


def test_a_follower_sees_ends_as_they_come_and_leaves_well_with_ctrl_c(tmp_path: Path) -> None:
    first = JobExecutionFactory(ok=True)
    output = tmp_path / "output"
    with output.open("w") as file:
        follower = subprocess.Popen(
            [*COMMAND, "tail", "--follow"], env=child_environment(), stdout=file, stderr=subprocess.STDOUT
        )
    try:
        wait_for(lambda: str(first.pk) in output.read_text(), 20, "it shows what ended before")
        second = JobExecutionFactory(failed=True)
        wait_for(lambda: str(second.pk) in output.read_text(), 20, "it shows what ended since")
        follower.send_signal(signal.SIGINT)
        assert follower.wait(20) == 0
    finally:
        follower.kill()
        follower.wait()
    assert len(output.read_text().splitlines()) == 2


def test_mistakes_and_missing_tables_have_their_exit_codes_and_one_line(tmp_path: Path) -> None:
    JobExecutionFactory()
    wrong = manage("jobs", "push", "acc.mrk", "--settings=tests.settings")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.strip() == "CommandError: No job is called 'acc.mrk'; did you mean 'acc.mark'?"
    empty = manage("jobs", "list", ENGINE="sqlite", DATABASE_URL="", DATABASE_NAME=str(tmp_path / "empty.sqlite3"))
    assert empty.returncode == 3
    assert empty.stderr.strip().endswith("run manage.py migrate first.")
    assert len(empty.stderr.strip().splitlines()) == 1


@pytest.mark.sqlite
def test_what_an_output_has_no_letters_for_is_spelled_out() -> None:
    row = JobExecutionFactory(key="наряд")
    listed = manage("jobs", "list", PYTHONIOENCODING="ascii")
    assert (listed.returncode, listed.stderr) == (0, "")
    assert str(row.pk) in listed.stdout
    assert r"\u043d\u0430\u0440\u044f\u0434" in listed.stdout


@pytest.mark.slow
def test_streams_that_are_closed_keep_nothing_from_being_done() -> None:
    row = JobExecutionFactory()
    script = f"{shlex.join([*COMMAND, 'cancel', str(row.pk)])} <&- >&- 2>&-"
    assert subprocess.run(script, shell=True, env=child_environment(), timeout=60, check=False).returncode == 0
    row.refresh_from_db()
    assert row.status == "cancelled"
    script = f"{shlex.join([*COMMAND, 'retry', '--job', row.job_name, '--status', 'cancelled'])} <&-"
    nobody = subprocess.run(
        script, shell=True, env=child_environment(), timeout=60, capture_output=True, text=True, check=False
    )
    assert nobody.returncode == 2
    assert "no terminal to ask on" in nobody.stderr


@pytest.mark.skipif(not FULL.exists(), reason="Linux has a device that is always full")
def test_a_disk_that_is_full_is_told_in_one_line() -> None:
    """Fault: a traceback, and another one from Python's own end, which made it exit code 120."""
    with FULL.open("w") as full:
        lister = subprocess.run(
            [*COMMAND, "list"],
            env=child_environment(PYTHONUNBUFFERED=""),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert lister.returncode == 1
    assert lister.stderr == "CommandError: The output cannot be written: No space left on device.\n"


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_causes_no_error() -> None:
    for _ in range(2):
        JobExecutionFactory()
    lister = subprocess.Popen(
        [*COMMAND, "list", "--json"], env=child_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert lister.stdout is not None
    assert lister.stderr is not None
    lister.stdout.close()
    with lister.stderr:
        assert lister.stderr.read() == ""
    assert lister.wait(20) == 0
