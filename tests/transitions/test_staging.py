"""Rows that wait: what makes them claimable, and what sets them aside."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from django_jobs import transitions
from django_jobs.models import JobExecution
from tests.factories import JobExecutionFactory
from tests.verbs import only, stored

pytestmark = pytest.mark.django_db


def test_only_due_rows_that_are_not_parked_are_promoted(now: datetime) -> None:
    due = JobExecutionFactory(now=now, scheduled=True, scheduled_at=now)
    later = JobExecutionFactory(now=now, scheduled=True, scheduled_at=now + timedelta(microseconds=1))
    parked = JobExecutionFactory(now=now, parked=True)
    at = now + timedelta(microseconds=0)
    assert transitions.promote(JobExecution.objects.all(), now=at) == 1
    found = stored(due)
    assert (found["status"], found["scheduled_at"], found["hinted_at"]) == ("pending", now, at)
    assert stored(later)["status"] == stored(parked)["status"] == "scheduled"


def test_a_row_started_now_is_due_now_and_parked_no_more(now: datetime) -> None:
    row = JobExecutionFactory(now=now, parked=True, scheduled_at=now + timedelta(days=1))
    assert transitions.start_now(only(row), now=now) == 1
    found = stored(row)
    assert (found["status"], found["scheduled_at"], found["parked_reason"]) == ("pending", now, "")


def test_a_parked_row_keeps_its_due_time_and_its_key_and_comes_back(now: datetime) -> None:
    due = now - timedelta(hours=1)
    row = JobExecutionFactory(now=now, key="K", scheduled_at=due)
    assert transitions.park(only(row), "paused", now=now) == 1
    found = stored(row)
    assert (found["status"], found["parked_reason"], found["active_key"]) == ("scheduled", "paused", row.active_key)
    assert transitions.promote(only(row), now=now) == 0
    assert transitions.unpark(only(row), now=now) == 1
    found = stored(row)
    assert (found["status"], found["parked_reason"], found["scheduled_at"]) == ("pending", "", due)


def test_a_row_that_waits_for_its_time_is_not_unparked(now: datetime) -> None:
    row = JobExecutionFactory(now=now, scheduled=True)
    assert transitions.unpark(only(row), now=now) == 0
    assert stored(row)["status"] == "scheduled"
