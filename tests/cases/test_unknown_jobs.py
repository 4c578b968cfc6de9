"""Rows that no process can run are set aside, and stand in nobody's way."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from django_jobs.models import JobExecution
from django_jobs.states import Status
from tests.acc import jobs
from tests.cases.test_stopping import Start, became, canary, pending
from tests.factories import WorkerFactory
from tests.support import Ledger, assert_consistent


def processor_seconds(pid: int) -> float:
    """Return the processor time the process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.subprocess
@pytest.mark.slow
def test_rows_that_nobody_knows_are_set_aside_and_run_once_a_worker_knows_them(runjobs: Start, ledger: Ledger) -> None:
    """A row without a handler is failed or put back unchanged, is first in line again, and the queue stands or spins.

    Sources: RealOrangeOne/django-tasks#190, PR#231, collectiveaccess/providence#1425.
    """
    gone = [pending("gone.job", priority=100) for _ in range(10)]
    # A job that only processes with ACC_CRON know.
    later = pending("acc.tick", priority=100)
    marks = [jobs.mark.using(priority=-100).push(tag="low") for _ in range(10)]
    # The one below beats once.
    process = runjobs("--worker", jobs={"WORKER_LOST_AFTER": 600}).wait_ready()
    for row in marks:
        became(row, Status.OK, 10)
    # Nobody is sure that no other worker knows the name before one has been there for a minute.
    WorkerFactory(names=["acc.mark"])
    for row in (*gone, later):
        became(row, Status.SCHEDULED, 15)
        assert row.parked_reason == "unknown"
    before, started = processor_seconds(process.pid), time.monotonic()
    time.sleep(4)
    assert (processor_seconds(process.pid) - before) / (time.monotonic() - started) < 0.25
    for row in (*gone, later):
        row.refresh_from_db()
        assert (row.status, row.attempt, row.started_at) == (Status.SCHEDULED, 0, None)
    canary(ledger, process)

    knowing = runjobs("--worker", ACC_CRON="0 0 1 1 *").wait_ready()
    became(later, Status.OK, 15)
    assert [entry.pid for entry in ledger.ends(later.pk)] == [knowing.pid]
    assert set(JobExecution.objects.filter(status=Status.SCHEDULED)) == set(gone)
    assert process.process.poll() is None
    assert_consistent()
