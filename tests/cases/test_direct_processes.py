"""Direct mode in many processes at once, and across a fork: each row runs once, in one of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
from django.db import connection

from django_jobs.models import JobExecution, Worker
from django_jobs.states import Status
from tests.engines import die_with_parent
from tests.support import ROOT, Ledger, assert_consistent, child_environment, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.subprocess, pytest.mark.django_db(transaction=True)]


def pusher(argument: str, **jobs: Any) -> subprocess.Popen[str]:
    overrides = {"KEEP": {"ok": None, "error": None, "cancelled": None}, **jobs}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.cases.web.pusher", argument],
        cwd=ROOT,
        env=child_environment(
            DJANGO_SETTINGS_MODULE="tests.cases.web.settings", DJANGO_JOBS_OVERRIDES=json.dumps(overrides)
        ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=die_with_parent,
    )


def end_of(process: subprocess.Popen[str], timeout: float) -> None:
    output, _ = process.communicate(timeout=timeout)
    assert process.returncode == 0, output
    assert "Traceback" not in output, output


def test_of_rows_that_four_processes_push_and_run_at_once_each_runs_once(ledger: Ledger) -> None:
    # SQLite hands its one write lock out unfairly: with many more, somebody's own transaction would wait too long.
    count = 100 if connection.vendor == "sqlite" else 2500
    processes = [pusher(str(count)) for _ in range(4)]
    for process in processes:
        end_of(process, 140)
    assert JobExecution.objects.filter(status=Status.OK).count() == JobExecution.objects.count() == 4 * count
    runs = Counter(entry.row_id for entry in ledger.starts())
    assert (len(runs), set(runs.values())) == (4 * count, {1})
    # Each ran where it was pushed.
    assert {entry.pid for entry in ledger.starts()} == {process.pid for process in processes}
    assert Counter(Worker.objects.values_list("stop_reason", flat=True)) == {"the process ends": 4}
    assert_consistent()


@pytest.mark.slow(30)
def test_a_fork_in_the_middle_of_a_run_starts_anew_in_the_child_and_harms_no_run_of_the_parent(ledger: Ledger) -> None:
    """A child shares its parent's connections and their streams mix; source: knifecake/steady-queue#48."""
    process = pusher("fork")
    end_of(process, 60)
    assert set(JobExecution.objects.values_list("status", flat=True)) == {Status.OK}
    ends = Counter(entry.pid == process.pid for entry in ledger.ends())
    assert ends == {True: 2, False: 1}
    wait_for(lambda: not Worker.objects.filter(stopped_at=None).exists(), 20, "both said goodbye")
    assert Worker.objects.count() == 2
    assert_consistent()
