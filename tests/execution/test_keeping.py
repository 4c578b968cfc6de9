"""What of the ended runs is deleted right after their ends were written."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import OperationalError

from django_jobs import Keep, retention
from django_jobs.execution import keeping as module
from django_jobs.execution.keeping import Keeping
from django_jobs.execution.run import Run
from django_jobs.models import JobExecution
from django_jobs.states import Status
from tests.execution.runs import run_of
from tests.factories import JobExecutionFactory

pytestmark = pytest.mark.django_db


@pytest.fixture
def at_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TRIM_EVERY", 0.0)


def ended(now: datetime, *seconds: float) -> list[JobExecution]:
    return [
        JobExecutionFactory(job_name="tests.sample", status=Status.OK, completed_at=now - timedelta(seconds=ago))
        for ago in seconds
    ]


def a_run(**options: Any) -> Run:
    return run_of(lambda: None, **options)


def left() -> set[Any]:
    return set(JobExecution.objects.values_list("pk", flat=True))


@pytest.mark.usefixtures("at_any_time")
def test_a_trim_begins_a_little_before_where_the_last_one_ended(now: datetime) -> None:
    """Beside an old transaction each trim read again all that went before: 3,600 of them in an hour."""
    keeping, run = Keeping(using="default"), a_run(keep=Keep(ok=2))
    *_, first, second = ended(now, 120, 110, 100, 90)
    keeping.trim([(run, Status.OK)])
    assert left() == {first.pk, second.pk}
    long_ago, late = ended(now, 130, 102)
    keeping.trim([(run, Status.OK)])
    assert left() == {long_ago.pk, first.pk, second.pk}
    # The hourly trim, which begins anew.
    assert retention.trim("tests.sample", Status.OK, 2, None, now=now, using="default") == 1
    assert left() == {first.pk, second.pk}
    assert late.pk not in left()


@pytest.mark.usefixtures("at_any_time")
def test_what_is_kept_at_first_goes_when_newer_runs_have_ended(now: datetime) -> None:
    keeping, run = Keeping(using="default"), a_run(keep=Keep(ok=2))
    ended(now, 7200, 3600, 1800)
    for ago in (900, 600, 300):
        keeping.trim([(run, Status.OK)])
        ended(now, ago)
    keeping.trim([(run, Status.OK)])
    assert sorted(JobExecution.objects.values_list("completed_at", flat=True)) == [
        now - timedelta(seconds=600),
        now - timedelta(seconds=300),
    ]


def test_a_job_is_trimmed_once_a_second_at_most(now: datetime) -> None:
    keeping, run = Keeping(using="default"), a_run(keep=Keep(ok=1))
    ended(now, 9, 8)
    keeping.trim([(run, Status.OK)])
    assert JobExecution.objects.count() == 1
    ended(now, 1)
    keeping.trim([(run, Status.OK)])
    assert JobExecution.objects.count() == 2
    failed = a_run(keep=Keep(error=1))
    JobExecutionFactory.create_batch(2, job_name="tests.sample", status=Status.ERROR, completed_at=now)
    keeping.trim([(failed, Status.ERROR)])
    assert JobExecution.objects.filter(status=Status.ERROR).count() == 1


@pytest.mark.parametrize("lost", [True, False])
def test_a_row_that_cannot_be_deleted_now_is_left_to_the_hourly_trim(
    lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OperationalError("no")

    monkeypatch.setattr(module.retention, "discard", refuse)
    monkeypatch.setattr(module.retention, "trim", refuse)
    monkeypatch.setattr(module, "is_connection_loss", lambda error, using: lost)
    keeping, run = Keeping(using="default"), a_run(keep=Keep(ok=0))
    if lost:
        with pytest.raises(OperationalError):
            keeping.discard([(run, Status.OK)])
    else:
        keeping.discard([(run, Status.OK)])
    keeping.trim([(a_run(keep=Keep(ok=1)), Status.OK)])
