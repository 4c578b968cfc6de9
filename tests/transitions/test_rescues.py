"""Rows of dead workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.db import connection

from django_jobs import transitions
from django_jobs.models import JobExecution, Worker
from django_jobs.states import Status
from tests.factories import JobExecutionFactory, WorkerFactory
from tests.verbs import LOST, claim, finish, only, running, stored

pytestmark = pytest.mark.django_db


@contextmanager
def before_the_first_write(meanwhile: Callable[[], object]) -> Iterator[None]:
    """Have something happen between the read of the lost rows and the write of the first."""
    waiting = [meanwhile]

    def wrapper(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if waiting and sql.startswith("UPDATE"):
            waiting.pop()()
        return execute(sql, params, many, context)

    with connection.execute_wrapper(wrapper):
        yield
    assert not waiting


def test_a_rescued_row_is_pending_with_its_attempt_counted(now: datetime) -> None:
    row = running(now, key="K")
    at = now + timedelta(seconds=60)
    assert transitions.rescue(only(row), now=at, **LOST) == [row.pk]
    found = stored(row)
    expected = {"status": "pending", "attempt": 1, "run_no": 1, "rescues": 1, "completed_at": None, "hinted_at": at}
    expected |= {"active_key": row.active_key, "error": LOST["error"], "errors": [{**LOST["entry"], "attempt": 1}]}
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("fields", [{"max_attempts": 1}, {"rescues": 2}], ids=["no attempts left", "kills its worker"])
def test_a_row_that_must_not_run_again_is_buried_and_not_rescued(fields: dict[str, int], now: datetime) -> None:
    row = running(now, key="K", **fields)
    assert transitions.rescue(only(row), now=now, **LOST) == []
    assert stored(row)["status"] == "running"
    assert transitions.bury(only(row), now=now, **LOST) == [row.pk]
    found = stored(row)
    expected = {"status": "error", "completed_at": now, "active_key": None, "error": LOST["error"]}
    expected |= {"errors": [{**LOST["entry"], "attempt": 1}], "attempt": 1}
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("verb", [transitions.rescue, transitions.bury])
def test_a_marked_row_leaves_its_key_and_time_behind(verb: Any, now: datetime) -> None:
    row = running(now, key="K", max_attempts=3, cancel_requested_at=now)
    at = now + timedelta(seconds=60)
    assert verb(only(row), now=at, **LOST) == [row.pk]
    found = stored(row)
    assert (found["status"], found["active_key"]) == ("cancelled", None)
    assert found["completed_at"] == found["updated_at"] == at


@pytest.mark.parametrize("verb", [transitions.rescue, transitions.bury])
def test_a_row_that_does_not_run_is_not_lost(verb: Any, now: datetime) -> None:
    row = JobExecutionFactory(now=now, max_attempts=3)
    assert verb(only(row), now=now, **LOST) == []
    assert stored(row)["status"] == "pending"


def test_a_rescued_worker_cannot_finish(now: datetime, worker: Worker) -> None:
    JobExecutionFactory(now=now, max_attempts=2)
    (old,) = claim(worker, now)
    transitions.rescue(only(old), now=now, **LOST)
    assert finish(transitions.succeed(old), now=now) == {}
    (new,) = claim(WorkerFactory(now=now), now)
    assert finish(transitions.fail(old, error="thawed"), now=now) == {}
    assert finish(transitions.succeed(new), now=now) == {old.pk: Status.OK}


@pytest.mark.parametrize("verb", [transitions.rescue, transitions.bury])
def test_whether_a_worker_is_lost_is_asked_again_inside_the_update(verb: Any, now: datetime) -> None:
    worker = WorkerFactory(now=now, dead=True)
    back, lost = (running(now, worker=worker, run_no=n) for n in (1, 2))
    rows = JobExecution.objects.filter(worker_id=worker.pk).order_by("run_no")
    with before_the_first_write(lambda: only(back).update(worker_id=uuid4())):
        assert verb(rows, now=now, **LOST) == [lost.pk]
    assert stored(back)["status"] == "running"


def test_a_row_claimed_anew_by_the_same_worker_is_not_taken_for_the_lost_run(now: datetime) -> None:
    row = running(now)
    with before_the_first_write(lambda: only(row).update(run_no=2)):
        assert transitions.rescue(only(row), now=now, **LOST) == []
    assert stored(row)["status"] == "running"
