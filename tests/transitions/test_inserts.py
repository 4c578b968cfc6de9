"""New rows, and the keys that they hold."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest
from django.db import IntegrityError, transaction

from django_jobs import transitions
from django_jobs.models import JobExecution
from django_jobs.states import Status
from tests.factories import JobExecutionFactory
from tests.verbs import VERBS, stored

pytestmark = pytest.mark.django_db


def test_a_new_row_is_pending_and_due_at_once(now: datetime) -> None:
    row = JobExecutionFactory.build(status="", scheduled_at=None)
    transitions.insert([row], now=now, using="default")
    found = stored(row)
    assert found["status"] == Status.PENDING
    assert {found[name] for name in ("scheduled_at", "created_at", "updated_at", "hinted_at")} == {now}


def test_a_new_row_whose_time_is_to_come_is_scheduled(now: datetime) -> None:
    later = now + timedelta(microseconds=1)
    rows = [JobExecutionFactory.build(scheduled_at=at) for at in (later, now, now - timedelta(days=1))]
    transitions.insert(rows, now=now, using="default")
    assert [(stored(row)["status"], stored(row)["scheduled_at"]) for row in rows] == [
        (Status.SCHEDULED, later),
        (Status.PENDING, now),
        (Status.PENDING, now),
    ]


def test_nothing_is_inserted_for_no_rows(now: datetime) -> None:
    transitions.insert([], now=now, using="default")
    assert not JobExecution.objects.exists()


@pytest.mark.parametrize("count", [1, 2])
def test_a_second_live_row_of_a_key_is_refused(count: int, now: datetime) -> None:
    JobExecutionFactory(now=now, key="K")
    rows = JobExecutionFactory.build_batch(count, key="K")
    with pytest.raises(IntegrityError), transaction.atomic():
        try:
            transitions.insert(rows, now=now, using="default")
        finally:
            # On every engine: what follows must not be committed without them.
            assert transaction.get_rollback()
    assert JobExecution.objects.count() == 1


@pytest.mark.parametrize("end", ["fail", "succeed", "abort", "cancel", "bury"])
def test_a_key_is_free_when_its_row_has_ended(end: str, now: datetime) -> None:
    """A failed or killed job keeps its key, and later pushes are silently ignored.

    Sources: veeqo/activejob-uniqueness#17, cameronmaske/celery-once#110.
    """
    row = JobExecutionFactory(now=now, key="K", status=Status.PENDING if end == "cancel" else Status.RUNNING)
    assert VERBS[end](row, now) == 1
    transitions.insert([JobExecutionFactory.build(key="K")], now=now, using="default")
    assert JobExecution.objects.with_key(None, "K").live().count() == 1


def test_keys_of_other_jobs_and_other_organizations_are_other_keys(now: datetime) -> None:
    """Keys are unique globally, so that separate apps or tenants collide. (celery/django-celery-beat#423)"""
    for organization, name in ((None, "acc.mark"), ("A", "acc.mark"), ("B", "acc.mark"), ("A", "acc.slow")):
        transitions.insert(
            [JobExecutionFactory.build(key="K", organization_id=organization, job_name=name)], now=now, using="default"
        )
    assert JobExecution.objects.count() == 4
