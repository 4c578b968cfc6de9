"""Trim: by each job's own rules, in portions, at its time."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import DatabaseError, InterfaceError

from django_jobs import Keep, clock, job, registry, retention
from django_jobs.models import JobExecution
from django_jobs.runtime import trim
from django_jobs.runtime.trim import PAUSE, Trim
from tests.factories import JobExecutionFactory, WorkerFactory

pytestmark = pytest.mark.django_db


@pytest.fixture
def now() -> datetime:
    return clock.now("default").replace(minute=59, second=50, microsecond=0)


def ended(now: datetime, count: int, **fields: Any) -> None:
    worker = WorkerFactory(now=now)
    for age in range(count):
        JobExecutionFactory(now=now - timedelta(minutes=age), worker=worker, **fields)


def left() -> Counter[tuple[str, str]]:
    return Counter(JobExecution.objects.values_list("job_name", "status"))


def trim_all(now: datetime) -> int:
    return sum(Trim(using="default").portions(now))


def test_the_newest_of_a_renamed_job_stay_whatever_name_they_have(now: datetime) -> None:
    """Trim keeps the newest n per job: not n under each of its names."""
    with registry.isolated():

        @job(name="acc.renamed", aliases=["acc.before"], keep=Keep(ok=3))
        def renamed() -> None: ...

        ended(now - timedelta(minutes=2), 4, ok=True, job_name="acc.before")
        ended(now, 2, ok=True, job_name="acc.renamed")
        assert trim_all(now) == 3
        assert left() == {("acc.renamed", "ok"): 2, ("acc.before", "ok"): 1}
        assert trim_all(now) == 0
        ended(now + timedelta(minutes=5), 3, ok=True, job_name="acc.renamed")
        assert trim_all(now) == 3
        assert left() == {("acc.renamed", "ok"): 3}


def test_each_job_and_status_is_trimmed_by_its_own_rule(now: datetime) -> None:
    """Trim keeps the newest n per job and status; cancelled rows too."""
    with registry.isolated():

        @job(name="acc.few", keep=Keep(ok=2, error=1, cancelled=3))
        def few() -> None: ...

        @job(name="acc.all")
        def everything() -> None: ...

        for name in ("acc.few", "acc.all"):
            for status in ("ok", "error", "cancelled"):
                ended(now, 5, job_name=name, status=status)
        ended(now, 3, job_name="acc.few", status="pending")
        assert trim_all(now) == 9
    assert left() == {
        ("acc.few", "ok"): 2,
        ("acc.few", "error"): 1,
        ("acc.few", "cancelled"): 3,
        ("acc.few", "pending"): 3,
        ("acc.all", "ok"): 5,
        ("acc.all", "error"): 5,
        ("acc.all", "cancelled"): 5,
    }


def test_the_greatest_age_of_a_job_is_kept(now: datetime) -> None:
    with registry.isolated():

        @job(name="acc.young", keep=Keep(max_age=timedelta(minutes=3)))
        def young() -> None: ...

        ended(now, 6, job_name="acc.young", status="ok")
        trim_all(now + timedelta(seconds=30))
    assert left() == {("acc.young", "ok"): 3}


def test_rows_of_jobs_that_are_gone_are_trimmed_as_the_settings_say(now: datetime, settings: Any) -> None:
    settings.DJANGO_JOBS = {"KEEP": {"ok": 1, "error": None, "cancelled": 0}}
    for status in ("ok", "error", "cancelled"):
        ended(now, 4, job_name="gone.job", status=status)
    trim_all(now)
    assert left() == {("gone.job", "ok"): 1, ("gone.job", "error"): 4}


@pytest.mark.parametrize("record", ["error", "none"])
def test_rows_of_jobs_that_are_gone_are_kept_whatever_is_recorded_of_others(
    record: str, now: datetime, settings: Any
) -> None:
    """Another process may know the job, and what it says; rows that nobody knows are not purged by themselves."""
    settings.DJANGO_JOBS = {"RECORD": record, "KEEP": {"ok": 2}}
    ended(now, 4, job_name="gone.job", status="ok")
    trim_all(now)
    assert left() == {("gone.job", "ok"): 2}


def test_it_trims_by_its_cron_a_portion_a_tick(now: datetime, settings: Any, monkeypatch: Any) -> None:
    """Trim on its own cron."""
    settings.DJANGO_JOBS = {"KEEP": {"ok": 1}}
    monkeypatch.setattr(retention, "BATCH", 2)
    ended(now, 6, status="ok")
    tick = Trim(using="default", monotonic=lambda: 0.0)
    assert tick.tick(now) == 10.0
    assert left() == {("acc.mark", "ok"): 6}
    due = now + timedelta(seconds=10)
    assert tick.tick(due) == PAUSE
    assert left() == {("acc.mark", "ok"): 4}
    assert tick.tick(due) == PAUSE
    assert tick.tick(due) == PAUSE
    assert left() == {("acc.mark", "ok"): 1}
    # An hour, and a look at the clock each minute.
    assert tick.tick(due) == 60.0
    ended(now, 3, status="ok")
    assert tick.tick(due + timedelta(minutes=59)) == 60.0
    assert tick.tick(due + timedelta(minutes=60)) == PAUSE


def test_a_portion_that_takes_long_is_followed_by_as_long_a_pause_and_by_a_smaller_one(
    now: datetime, settings: Any, monkeypatch: Any
) -> None:
    """Rows with long logs keep the disk busy, which all others write to as well."""
    settings.DJANGO_JOBS = {"KEEP": {"ok": 0}}
    ended(now, 10, status="ok")
    monkeypatch.setattr(retention, "BATCH", 4)
    monkeypatch.setattr(trim, "SMALLEST", 1)
    moment, takes, portion = 0.0, iter([0.6, 0.6, 0.6, 0.3, 0.01, 0.01, 0.01]), retention.trim

    def slow(*args: Any, **options: Any) -> int:
        nonlocal moment
        deleted = portion(*args, **options)
        moment += next(takes) if deleted else 0.0
        return deleted

    monkeypatch.setattr(retention, "trim", slow)
    tick = Trim(using="default", monotonic=lambda: moment)
    tick.tick(now)
    due, seen = now + timedelta(seconds=10), []
    while (rows := sum(left().values())) and len(seen) < 10:
        pause = tick.tick(due)
        seen.append((rows - sum(left().values()), round(pause, 2)))
    assert seen == [(4, 0.6), (2, 0.6), (1, 0.6), (1, 0.3), (1, PAUSE), (1, PAUSE)]


def test_one_failing_job_does_not_stop_the_others(now: datetime, settings: Any, monkeypatch: Any) -> None:
    """One bad row stops nothing."""
    settings.DJANGO_JOBS = {"KEEP": {"ok": 1}}
    ended(now, 3, job_name="acc.boom", status="ok")
    ended(now, 3, job_name="acc.mark", status="ok")
    portion = retention.trim

    def refusing(job_name: str, *args: Any, **options: Any) -> int:
        if job_name == "acc.boom":
            raise DatabaseError("poison")
        return portion(job_name, *args, **options)

    monkeypatch.setattr(retention, "trim", refusing)
    trim_all(now)
    assert left() == {("acc.boom", "ok"): 3, ("acc.mark", "ok"): 1}


def test_a_lost_connection_costs_a_pause_and_not_the_hours_until_the_next_tick(
    now: datetime, settings: Any, monkeypatch: Any
) -> None:
    settings.DJANGO_JOBS = {"KEEP": {"ok": 1}}
    ended(now, 3, status="ok")
    tick, portion, calls = Trim(using="default"), retention.trim, []

    def lost_once(*args: Any, **options: Any) -> int:
        calls.append(args)
        if len(calls) == 2:
            raise InterfaceError("connection already closed")
        return portion(*args, **options)

    monkeypatch.setattr(retention, "trim", lost_once)
    tick.tick(now)
    due = now + timedelta(seconds=10)
    with pytest.raises(InterfaceError):
        tick.tick(due)
    # The loop calls again after its pause.
    tick.tick(due + timedelta(seconds=1))
    assert left() == {("acc.mark", "ok"): 1}
