"""Processes that write to the same tables at once lose nothing, and nobody hears of their collisions."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from django.db import connection

from django_jobs.models import JobExecution, Worker
from django_jobs.runtime.portions import PAGE
from django_jobs.states import FINAL, Status
from tests.acc import jobs
from tests.cases.test_stopping import Start, canary
from tests.support import ROOT, Ledger, Runjobs, assert_consistent, child_environment, sized, wait_for

pytestmark = [pytest.mark.subprocess, pytest.mark.slow(25), pytest.mark.scale]

SECONDS = sized(10, 60)
# In what a process says: errors of the database, and what comes of those that are not dealt with.
FAULTS = ("OperationalError", "IntegrityError", "stopped working", "not stored", "was lost", "could not be")


class Writer:
    """A process of tests.cases.writers."""

    def __init__(self, what: str, seconds: float, **extra: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.cases.writers", what, str(seconds)],
            cwd=ROOT,
            env=child_environment(**extra),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def result(self) -> int:
        """Wait for its end; what it says it did."""
        out, err = self._process.communicate(timeout=SECONDS * 4 + 60)
        assert self._process.returncode == 0, err
        return int(out)


def end(processes: list[Runjobs]) -> None:
    """Stop them, and check that nothing went wrong in any."""
    for process in processes:
        assert process.stop() == 0, process.output
    for process in processes:
        told = [line for line in process.output.splitlines() if any(fault in line for fault in FAULTS)]
        assert told == []


def assert_each_ran_once(ledger: Ledger) -> None:
    """Check it by the ledger: an attempt that ran twice is there twice."""
    runs = [(entry.row_id, entry.attempt) for entry in ledger.starts()]
    assert len(runs) == len(set(runs))


@pytest.mark.mysql
@pytest.mark.postgres
def test_deadlocks_between_all_who_write_lose_no_job_and_reach_no_caller(runjobs: Start, ledger: Ledger) -> None:
    """InnoDB deadlocks between enqueue, claim, promotion and bulk deletion make statements fail, and jobs are lost.

    Sources: rails/solid_queue#531, #609, PR#240, the changelog of oban.
    """
    # Each few seconds as many are due at once as one promotion takes.
    batch = [jobs.mark.using(delay=2 + n // PAGE * 3).item(tag="batch") for n in range(PAGE * sized(3, 19))]
    jobs.mark.push_many(batch)
    processes = [runjobs(jobs={"CONCURRENCY": 4}) for _ in range(6)]
    producers = [Writer("push", SECONDS) for _ in range(4)]
    # What is trimmed is not counted among the rows: jobs keep all here, but for what this process deletes.
    few = json.dumps({"KEEP": {"ok": 20, "error": 20, "cancelled": 20}})
    trimmer = Writer("trim", SECONDS + 5, DJANGO_JOBS_OVERRIDES=few)
    made = len(batch) + sum(producer.result() for producer in producers)
    live = JobExecution.objects.exclude(status__in=FINAL)
    wait_for(lambda: not live.exists(), sized(180, 300), "every row is final")
    gone = trimmer.result()
    print(f"{made} rows, of which {gone} were trimmed")
    assert gone + JobExecution.objects.count() == made
    assert len({entry.row_id for entry in ledger.starts()}) == made
    assert_each_ran_once(ledger)
    end(processes[1:])
    canary(ledger, processes[0])
    end(processes[:1])
    assert_consistent()


@pytest.mark.sqlite
@pytest.mark.parametrize("settings", ["tests.cases.plain_sqlite_settings", "tests.settings"])
def test_a_locked_database_fails_no_job_and_ends_no_thread(
    settings: str, runjobs: Start, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several processes on SQLite "database is locked" fails what reads before it writes, and threads die of it.

    Sources: Koed00/django-q#617, agronholm/apscheduler#843, coleifer/huey#445.
    """
    extra: dict[str, Any] = {"DJANGO_SETTINGS_MODULE": settings}
    if settings != "tests.settings":
        with connection.cursor() as cursor:
            cursor.execute("PRAGMA journal_mode = DELETE")
            assert cursor.fetchone() == ("delete",)
        # The next connection of this process would turn it back.
        monkeypatch.setitem(connection.settings_dict["OPTIONS"], "init_command", "PRAGMA synchronous=NORMAL")
    processes = [runjobs(jobs={"CONCURRENCY": 2}, **extra) for _ in range(4)]
    wait_for(lambda: Worker.objects.count() == 4, 60, "all have registered")
    # A second of every 1.2 seconds belongs to somebody else.
    requests, trimmer = Writer("things", SECONDS, **extra), Writer("trim", SECONDS, **extra)
    rows = []
    while requests.runs:
        rows += jobs.mark.push_many([{"tag": "x"}] * 10)
        wait_for(lambda newest=rows[-1]: ledger.ends(newest.pk), 60, "the newest row ran")
    done = JobExecution.objects.filter(status=Status.OK)
    wait_for(lambda: done.count() == len(rows), 60, "all are ok")
    print(f"{len(rows)} rows")
    # How many get through is asked for only where nothing else runs.
    assert len(rows) >= sized(1, 200)
    assert requests.result() > sized(0, SECONDS / 3)
    # It has looked, and nothing was to go.
    assert trimmer.result() == 0
    assert not JobExecution.objects.exclude(attempt=1).exists()
    assert_each_ran_once(ledger)
    assert len(ledger.starts()) == len(rows)
    for process in processes:
        assert process.process.poll() is None
    canary_rows = jobs.mark.push_many([{"tag": "canary"}] * 8)
    wait_for(lambda: done.count() == len(rows) + len(canary_rows), 60, "they still work")
    end(processes)
    assert_consistent()
