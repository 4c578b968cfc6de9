"""`concurrency=` over several processes, one of which dies: judged by a ledger outside of the database."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from django_jobs.models import JobExecution
from tests.acc import jobs
from tests.support import Ledger, Runjobs, assert_consistent, wait_for

pytestmark = [pytest.mark.subprocess, pytest.mark.slow]

Start = Callable[..., Runjobs]


TAG = "limited"


def most_at_once(ledger: Ledger, killed: dict[int, float]) -> int:
    """Return how many runs there were at one moment; those of a killed process ended when it did."""
    ends = {(entry.row_id, entry.attempt): entry.time for entry in ledger.ends(tag=TAG)}
    moments = []
    for entry in ledger.starts(tag=TAG):
        end = ends.get((entry.row_id, entry.attempt)) or killed[entry.pid]
        moments += [(entry.time, 1), (end, -1)]
    runs = most = 0
    # What ends at the moment at which another begins makes room for it.
    for _time, change in sorted(moments):
        runs += change
        most = max(most, runs)
    return most


def test_never_more_run_at_once_than_may_also_when_a_process_is_killed(runjobs: Start, ledger: Ledger) -> None:
    rows = jobs.pair.push_many([{"s": 0.05, "tag": TAG}] * 150)
    processes = [runjobs("--concurrency", "4") for _ in range(3)]
    others = jobs.mark.push_many([{}] * 50)
    wait_for(lambda: len(ledger.ends(tag=TAG)) > 60, 30, "runs were started by some of them")
    busy = ledger.starts(tag=TAG)[-1].pid
    (victim,) = [process for process in processes if process.pid == busy]
    victim.kill()
    victim.wait()
    killed = {victim.pid: time.time()}
    wait_for(lambda: not JobExecution.objects.live().exists(), 60, "all ended")
    assert most_at_once(ledger, killed) == 2
    assert JobExecution.objects.filter(status="ok").count() == len(rows) + len(others)
    assert_consistent()


def test_short_runs_come_one_upon_the_other_though_most_of_them_are_parked(runjobs: Start, ledger: Ledger) -> None:
    """What a limit holds back must not wait for a look once a second."""
    jobs.pair.push_many([{"tag": TAG}] * 200)
    runjobs().wait_ready()
    begun = time.time()
    wait_for(lambda: JobExecution.objects.filter(parked_reason="concurrency").exists(), 20, "most were parked")
    wait_for(lambda: not JobExecution.objects.live().exists(), 60, "all ended")
    assert time.time() - begun < 60
    assert most_at_once(ledger, {}) == 2
