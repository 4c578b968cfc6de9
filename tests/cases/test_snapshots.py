"""Nothing of ours depends on what a transaction of the project can see."""

from __future__ import annotations

import time

import pytest

from django_jobs.models import JobExecution
from django_jobs.states import Status
from tests.acc import jobs
from tests.cases.test_stopping import Start, became, began, canary, pending
from tests.support import Ledger, assert_consistent, wait_for

pytestmark = [pytest.mark.subprocess, pytest.mark.postgres, pytest.mark.mysql]

SNAPSHOTS = {"DJANGO_SETTINGS_MODULE": "tests.cases.snapshot_settings"}


def test_a_handler_in_a_transaction_that_sees_nothing_new_sees_that_it_was_cancelled(
    runjobs: Start, ledger: Ledger
) -> None:
    """Under REPEATABLE READ whoever stays in one transaction never sees a cancel, nor a new job.

    Sources: openedx/enterprise-catalog PR#245, mozilla/treeherder PR#2173.
    """
    process = runjobs("--worker", **SNAPSHOTS).wait_ready()
    row = pending("stubborn.in_a_snapshot", payload={"s": 30})
    began(ledger, row)
    cancelled_at = time.time()
    row.cancel(by="a person")
    became(row, Status.CANCELLED, 5)
    (seen,) = ledger.entries("SEEN", row.pk)
    assert seen.time - cancelled_at < 2
    canary(ledger, process)
    assert_consistent()


@pytest.mark.slow
def test_workers_that_meet_under_repeatable_read_run_everything_once(runjobs: Start, ledger: Ledger) -> None:
    """See above; and rows that another worker changed since the snapshot are errors there."""
    processes = [runjobs(**SNAPSHOTS).wait_ready() for _ in range(3)]
    rows = [row for n in range(30) for row in jobs.mark.push_many([jobs.mark.item(tag=str(n)), *[{"tag": str(n)}] * 9])]
    wait_for(lambda: JobExecution.objects.filter(status=Status.OK).count() == len(rows), 30, "all are ok")
    assert len(ledger.starts()) == len({entry.row_id for entry in ledger.starts()}) == len(rows)
    assert not JobExecution.objects.exclude(attempt=1).exists()
    for process in processes[1:]:
        assert process.stop() == 0, process.output
    for process in processes:
        assert "Traceback" not in process.output
        assert "failed and will try again" not in process.output
    canary(ledger, processes[0])
    assert_consistent()
