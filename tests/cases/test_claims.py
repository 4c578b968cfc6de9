"""Rows are taken when they can start, and not before."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from django_jobs.models import JobExecution
from django_jobs.states import Status
from tests.acc import jobs
from tests.support import Ledger, Runjobs, assert_consistent, wait_for

pytestmark = pytest.mark.subprocess


def test_a_row_begins_when_it_is_claimed_and_an_idle_worker_takes_what_a_busy_one_cannot(
    runjobs: Callable[..., Runjobs], ledger: Ledger
) -> None:
    """Tasks are fetched ahead and wait in a local queue, counted as started: their clock runs out, they run twice.

    Sources: Koed00/django-q#344, #183, #307.
    """
    lone = {"CONCURRENCY": 1, "HEARTBEAT_INTERVAL": 0.5, "WORKER_LOST_AFTER": 1}
    processes = [runjobs("--worker", jobs=lone).wait_ready() for _ in range(2)]
    # In all far longer than a lost worker's rows are left alone.
    jobs.slow.push_many([{"s": 0.8}] * 5)
    wait_for(lambda: JobExecution.objects.filter(status=Status.OK).count() == 5, 20, "all are ok")
    starts = {entry.row_id: entry for entry in ledger.starts()}
    assert len(ledger.starts()) == len(starts) == 5
    assert {entry.pid for entry in starts.values()} == {process.pid for process in processes}
    for pid in {process.pid for process in processes}:
        mine = sorted((entry for entry in starts.values() if entry.pid == pid), key=lambda entry: entry.time)
        for before, after in pairwise(mine):
            row = JobExecution.objects.get(pk=after.row_id)
            assert row.attempt == 1
            # Claimed when the one before had ended; the clocks of the server and of the ledger are not quite one.
            assert row.started_at.timestamp() > ledger.ends(before.row_id)[0].time - 0.3
    assert_consistent()
