"""What people ask for: cancel and retry."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest
from django.db import IntegrityError, transaction

from django_jobs import transitions
from django_jobs.models import Worker
from django_jobs.querysets import key_digest
from django_jobs.states import Status
from tests.factories import JobExecutionFactory
from tests.verbs import ENTRY, LOST, claim, only, running, stored

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize("trait", ["pending", "scheduled", "parked"])
def test_a_waiting_row_is_cancelled_at_once(trait: str, now: datetime) -> None:
    row = JobExecutionFactory(now=now, key="K", **{trait: True})
    at = now + timedelta(seconds=1)
    assert transitions.cancel(only(row), now=at, by="7", by_name="Ada") == 1
    found = stored(row)
    expected = {"status": "cancelled", "completed_at": at, "active_key": None, "parked_reason": "", "attempt": 0}
    expected |= {"cancelled_by": "7", "cancelled_by_name": "Ada", "key": "K", "key_digest": key_digest(None, "K")}
    assert {name: found[name] for name in expected} == expected


def test_a_row_that_is_cancelled_while_it_waits_for_its_next_attempt_has_no_duration(now: datetime) -> None:
    """Fault: it showed the time from the start of its last attempt to the cancel, minutes in which nothing ran."""
    row = JobExecutionFactory(now=now, failed=True)
    assert row.started_at is not None
    later = now + timedelta(minutes=13)
    assert transitions.retry(only(row), now=later, retries=0, by="", by_name="") == 1
    assert transitions.cancel(only(row), now=later, by="", by_name="") == 1
    row.refresh_from_db()
    assert (row.status, row.attempt, row.duration) == (Status.CANCELLED, 1, None)


def test_a_running_row_is_marked_once(now: datetime) -> None:
    row = running(now, key="K")
    assert transitions.mark_cancel(only(row), now=now, by="7", by_name="Ada") == 1
    later = now + timedelta(seconds=1)
    assert transitions.mark_cancel(only(row), now=later, by="8", by_name="Bob") == 0
    found = stored(row)
    expected = {"status": "running", "cancel_requested_at": now, "cancelled_by_name": "Ada", "run_no": 1}
    expected |= {"active_key": row.active_key, "completed_at": None}
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("status", sorted(set(Status) - {Status.RUNNING}))
def test_only_running_rows_are_marked(status: Status, now: datetime) -> None:
    row = JobExecutionFactory(now=now, status=status)
    before = stored(row)
    assert transitions.mark_cancel(only(row), now=now, by="", by_name="") == 0
    assert stored(row) == before


@pytest.mark.parametrize("status", [Status.ERROR, Status.CANCELLED])
def test_a_retried_row_has_a_fresh_budget_and_its_history(status: Status, now: datetime) -> None:
    fields = {"attempt": 3, "run_no": 5, "max_attempts": 7, "rescues": 2, "errors": [ENTRY], "error": "boom"}
    row = JobExecutionFactory(now=now, status=status, key="K", cancel_requested_at=now, **fields)
    at, digest = now + timedelta(hours=1), key_digest(None, "K")
    done = transitions.retry(only(row), now=at, retries=2, by="7", by_name="Ada", active_key=digest)
    assert done == 1
    found = stored(row)
    expected = {"status": "pending", "attempt": 3, "max_attempts": 6, "rescues": 0, "run_no": 5, "errors": [ENTRY]}
    expected |= {"cancel_requested_at": None, "completed_at": None, "scheduled_at": at, "hinted_at": at}
    expected |= {"active_key": digest, "retried_at": at, "retried_by": "7", "retried_by_name": "Ada"}
    assert {name: found[name] for name in expected} == expected


def test_a_retry_is_refused_while_another_row_holds_the_key(now: datetime) -> None:
    failed = JobExecutionFactory(now=now, failed=True, key="K")
    JobExecutionFactory(now=now, key="K")
    before = stored(failed)
    with pytest.raises(IntegrityError), transaction.atomic():
        transitions.retry(only(failed), now=now, retries=0, by="", by_name="", active_key=key_digest(None, "K"))
    assert stored(failed) == before


@pytest.mark.parametrize("attempts", [1, 2])
def test_a_row_runs_as_often_as_it_may(attempts: int, now: datetime, worker: Worker) -> None:
    """Edge values of the attempt limit give one run too many, or strand the row. (OCA/queue#814)"""
    row = JobExecutionFactory(now=now, max_attempts=attempts)
    runs = 0
    while claim(worker, now):
        runs += 1
        moved = transitions.rescue(only(row), now=now, **LOST)
        assert moved == ([row.pk] if runs < attempts else [])
    assert runs == attempts
    assert transitions.bury(only(row), now=now, **LOST) == [row.pk]
    assert stored(row)["status"] == "error"
