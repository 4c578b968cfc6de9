"""Many rows for a few processes: each is run once, in every mode in which processes claim."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from django_jobs.models import JobExecution
from django_jobs.services import push_many
from django_jobs.states import Status
from tests.acc import jobs
from tests.redis_servers import RedisServer
from tests.support import Ledger, Runjobs, assert_consistent, wait_for

if TYPE_CHECKING:
    from pytest_django import Settings

pytestmark = [pytest.mark.subprocess, pytest.mark.slow(40), pytest.mark.postgres, pytest.mark.mysql]

ROWS = 10_000
PORTION = 500
PROCESSES = 4
PRIORITIES = (-100, "low", "normal", 7, "high", "critical")
REDIS = {"DISPATCHER": {"BACKEND": "redis", "OPTIONS": {"CACHE": "redis"}}}
FORGETFUL = "redis that loses all keys ten times"


def ok() -> int:
    return JobExecution.objects.filter(status=Status.OK).count()


def forget(server: RedisServer) -> None:
    with server.client() as client:
        client.flushall()


@pytest.mark.parametrize("mode", ["database", "redis", FORGETFUL])
def test_four_processes_run_each_of_ten_thousand_rows_once(
    mode: str, request: pytest.FixtureRequest, settings: Settings, runjobs: Callable[..., Runjobs], ledger: Ledger
) -> None:
    """Two workers take the same row; a hint that is read and lost leaves one behind, and so does a lost key."""
    named: dict[str, Any] = {}
    extra: dict[str, str] = {}
    if mode != "database":
        server: RedisServer = request.getfixturevalue("valkey")
        named, extra = REDIS, {"REDIS_URL": server.url}
        settings.DJANGO_JOBS = {**settings.DJANGO_JOBS, **REDIS}
    process = runjobs("--worker", "--processes", str(PROCESSES), "-v", "0", jobs=named, **extra)
    process.wait_ready(40, workers=PROCESSES)
    # While they work, not before.
    for first in range(0, ROWS, PORTION):
        push_many(
            [
                jobs.mark.using(priority=PRIORITIES[number % len(PRIORITIES)]).item(tag=str(number))
                for number in range(first, first + PORTION)
            ]
        )
        if mode == FORGETFUL and first % (4 * PORTION) == 0:
            forget(server)
    if mode == FORGETFUL:
        # Five times while rows came, as often while the rest is worked off.
        for part in range(1, 6):
            wait_for(lambda part=part: ok() >= ROWS * part // 6, 240, f"{part} of 6 parts are ok")
            forget(server)
    wait_for(lambda: ok() == ROWS, 240, "all are ok")
    starts = ledger.starts()
    assert Counter(Counter(entry.tag for entry in starts).values()) == {1: ROWS}
    assert len({entry.row_id for entry in starts}) == ROWS
    assert len({entry.pid for entry in starts}) == PROCESSES
    assert JobExecution.objects.exclude(attempt=1, run_no=1).count() == 0
    assert process.stop() == 0, process.output
    assert_consistent()
