"""Rows of dead workers."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest

from django_jobs import transitions
from django_jobs.models import JobExecution, Worker
from django_jobs.states import Status
from tests.factories import JobExecutionFactory, WorkerFactory
from tests.verbs import claim, describe, finish, only, running, stored

pytestmark = pytest.mark.django_db


def test_a_rescued_row_is_pending_with_its_attempt_counted(now: datetime) -> None:
    row = running(now, key="K")
    at = now + timedelta(seconds=60)
    assert transitions.rescue(only(row), now=at, describe=describe) == [row.pk]
    found = stored(row)
    message, entry = describe(row.worker_id)
    expected = {"status": "pending", "attempt": 1, "run_no": 1, "rescues": 1, "completed_at": None, "hinted_at": at}
    expected |= {"active_key": row.active_key, "error": message, "errors": [{**entry, "attempt": 1}]}
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("fields", [{"max_attempts": 1}, {"rescues": 2}], ids=["no attempts left", "kills its worker"])
def test_a_row_that_must_not_run_again_is_buried_and_not_rescued(fields: dict[str, int], now: datetime) -> None:
    row = running(now, key="K", **fields)
    assert transitions.rescue(only(row), now=now, describe=describe) == []
    assert stored(row)["status"] == "running"
    assert transitions.bury(only(row), now=now, describe=describe) == [row.pk]
    found = stored(row)
    message, entry = describe(row.worker_id)
    expected = {"status": "error", "completed_at": now, "active_key": None, "error": message}
    expected |= {"errors": [{**entry, "attempt": 1}], "attempt": 1}
    assert {name: found[name] for name in expected} == expected


def test_a_rescued_worker_cannot_finish(now: datetime, worker: Worker) -> None:
    JobExecutionFactory(now=now, max_attempts=2)
    (old,) = claim(worker, now)
    transitions.rescue(only(old), now=now, describe=describe)
    assert finish(transitions.succeed(old), now=now) == {}
    (new,) = claim(WorkerFactory(now=now), now)
    assert finish(transitions.fail(old, error="thawed"), now=now) == {}
    assert finish(transitions.succeed(new), now=now) == {old.pk: Status.OK}


@pytest.mark.parametrize("verb", [transitions.rescue, transitions.bury])
def test_whether_a_worker_is_lost_is_asked_again_inside_the_update(verb: Any, now: datetime) -> None:
    worker = WorkerFactory(now=now, dead=True)
    back, lost = (running(now, worker=worker, run_no=n) for n in (1, 2))

    def beat_meanwhile(worker_id: Any) -> tuple[str, dict[str, Any]]:
        # Between the read and the write of the first row, that row is claimed by another worker.
        only(back).update(worker_id=uuid4())
        return describe(worker_id)

    rows = JobExecution.objects.filter(worker_id=worker.pk).order_by("run_no")
    assert verb(rows, now=now, describe=beat_meanwhile) == [lost.pk]
    assert stored(back)["status"] == "running"


def test_a_row_claimed_anew_by_the_same_worker_is_not_taken_for_the_lost_run(now: datetime) -> None:
    row = running(now)

    def claimed_anew(worker_id: Any) -> tuple[str, dict[str, Any]]:
        only(row).update(run_no=2)
        return describe(worker_id)

    assert transitions.rescue(only(row), now=now, describe=claimed_anew) == []
    assert stored(row)["status"] == "running"
