"""However far a row has come, a failure leads to a next try in time."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest

from django_jobs import Backoff, Retry, clock
from django_jobs.models import JobExecution
from django_jobs.states import Status
from tests.runtime.workers import a_worker, jobs_of
from tests.support import assert_consistent, wait_for

DAY = 86_400
ATTEMPTS = [0, 28, 30, 39, 45, 46, 61, 1022, 1023, 1998]


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("backoff", "limit"),
    [
        pytest.param(Backoff(initial=1, factor=2, max=60), 60, id="2 ** n up to a minute"),
        pytest.param(Backoff(initial=DAY, factor=10, max=30 * DAY, jitter=None), 30 * DAY, id="10 ** n days"),
        pytest.param(lambda attempt, exception: -1, 0, id="negative"),
        pytest.param(lambda attempt, exception: None, 1800, id="nothing"),
        pytest.param(lambda attempt, exception: math.nan, 1800, id="NaN"),
        pytest.param(lambda attempt, exception: timedelta.max, 10 * 366 * DAY, id="for ever"),
    ],
)
def test_a_failure_after_any_number_of_attempts_is_tried_again_within_the_limit(backoff: Any, limit: float) -> None:
    """The wait is computed before it is capped; around the 40th attempt it overflows and the job vanishes.

    Sources: procrastinate-org/procrastinate#1462, codingjoe/threadmill#47, anthropics/anthropic-sdk-python#1760.
    """

    def burst() -> None:
        raise ValueError("of the job")

    with jobs_of(burst, retry=Retry(1999, backoff=backoff)) as [bursting]:
        rows = bursting.push_many([{}] * (len(ATTEMPTS) + 1))
        for row, attempt in zip(rows, [*ATTEMPTS, 1999], strict=True):
            JobExecution.objects.filter(pk=row.pk).update(attempt=attempt)
        *again, last = rows
        with a_worker():
            tried = JobExecution.objects.filter(run_no=1).exclude(status=Status.RUNNING)
            wait_for(lambda: tried.count() == len(rows), 15, "each was tried once")
        latest = clock.now("default") + timedelta(seconds=limit)
    for row, attempt in zip(again, ATTEMPTS, strict=True):
        row.refresh_from_db()
        assert row.status in {Status.SCHEDULED, Status.PENDING}
        assert row.attempt == attempt + 1
        assert row.created_at <= row.scheduled_at <= latest
        assert row.error == "ValueError: of the job"
    last.refresh_from_db()
    assert (last.status, last.attempt, last.error) == (Status.ERROR, 2000, "ValueError: of the job")
    assert_consistent()
