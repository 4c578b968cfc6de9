"""Sweep: hints that are sent again, workers that are forgotten."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest

from django_jobs import clock
from django_jobs.models import JobExecution, Worker
from django_jobs.runtime import sweep
from django_jobs.runtime.sweep import Sweep
from tests.factories import JobExecutionFactory, WorkerFactory
from tests.runtime.support import held, hinted
from tests.threads import in_thread

pytestmark = pytest.mark.django_db


@pytest.fixture
def now() -> datetime:
    return clock.now("default").replace(second=30, microsecond=0)


def waiting(now: datetime, *, since: float, hinted: float | None = None, **fields: Any) -> JobExecution:
    """Make a row that has been pending for so many seconds and was hinted so many seconds ago."""
    at = now - timedelta(seconds=since)
    hinted_at = at if hinted is None else now - timedelta(seconds=hinted)
    return JobExecutionFactory(now=now, scheduled_at=at, created_at=at, hinted_at=hinted_at, **fields)


def test_stale_pending_rows_are_hinted_again(now: datetime, monkeypatch: Any) -> None:
    """Stale pending -> hint again."""
    stale = waiting(now, since=301, queue="mail", priority=5)
    waiting(now, since=299)
    with hinted(monkeypatch) as hints:
        Sweep(using="default").tick(now)
    assert hints == [("mail", [stale.pk], 5)]
    stale.refresh_from_db()
    assert stale.hinted_at == now


def test_the_time_of_the_last_hint_counts_not_that_of_creation(now: datetime, monkeypatch: Any) -> None:
    """By the time of the last hint, not of creation."""
    waiting(now, since=100_000, hinted=200)
    with hinted(monkeypatch) as hints:
        Sweep(using="default").tick(now)
    assert hints == []


@pytest.mark.medium
def test_the_hints_of_one_row_come_ever_more_rarely(now: datetime, monkeypatch: Any) -> None:
    """With back-off."""
    row = waiting(now, since=0)
    tick = Sweep(using="default")
    at = []
    with hinted(monkeypatch) as hints:
        # Before and at each minute that may be one of them.
        for minute in (number for number in range(6 * 60) if number % 5 in {0, 4}):
            before = len(hints)
            tick.tick(now + timedelta(minutes=minute))
            if len(hints) > before:
                at.append(minute)
    assert at == [5, 10, 20, 40, 80, 140, 200, 260, 320]
    assert {ids[0] for _, ids, _ in hints} == {row.pk}


def test_a_long_backlog_is_looked_at_in_bounded_parts(now: datetime, monkeypatch: Any) -> None:
    """All reads bounded."""
    monkeypatch.setattr(sweep, "PAGE", 2)
    monkeypatch.setattr(sweep, "PAGES", 2)
    rows = [waiting(now, since=400) for _ in range(10)]
    tick = Sweep(using="default")
    counts = [tick.rehint(now) for _ in range(3)]
    assert counts == [4, 4, 2]
    assert not JobExecution.objects.filter(pk__in=[row.pk for row in rows], hinted_at__lt=now).exists()


def test_rows_of_workers_dead_for_a_week_are_removed(now: datetime) -> None:
    week = timedelta(days=7)
    old = WorkerFactory(now=now, heartbeat_at=now - week - timedelta(seconds=1))
    stopped = WorkerFactory(now=now, heartbeat_at=now - week - timedelta(hours=1), stopped_at=now - week)
    young = WorkerFactory(now=now, heartbeat_at=now - week + timedelta(seconds=1))
    owner = WorkerFactory(now=now, heartbeat_at=now - 2 * week)
    JobExecutionFactory(running=True, now=now, worker=owner)
    Sweep(using="default").tick(now)
    assert set(Worker.objects.values_list("pk", flat=True)) == {young.pk, owner.pk}
    assert old.pk != stopped.pk


def test_it_sweeps_at_start_and_by_its_cron(now: datetime, settings: Any, monkeypatch: Any) -> None:
    """Sweep on its own cron and at start."""
    settings.DJANGO_JOBS = {"SWEEP_CRON": "*/2 * * * *"}
    now = now.replace(minute=1)
    swept: list[datetime] = []
    monkeypatch.setattr(Sweep, "rehint", lambda self, moment: swept.append(moment))
    tick = Sweep(using="default")
    assert tick.tick(now) == 30.0
    assert tick.tick(now + timedelta(seconds=29)) == 1.0
    assert tick.tick(now + timedelta(seconds=30)) == 60.0
    assert swept == [now, now + timedelta(seconds=30)]


def test_one_failing_phase_does_not_stop_the_other(now: datetime, monkeypatch: Any) -> None:
    """One bad row stops nothing."""
    WorkerFactory(now=now, heartbeat_at=now - timedelta(days=8))

    def fail(self: Sweep, now: datetime) -> int:
        raise ValueError("boom")

    monkeypatch.setattr(Sweep, "rehint", fail)
    Sweep(using="default").tick(now)
    assert not Worker.objects.exists()


@pytest.mark.postgres
@pytest.mark.mysql
@pytest.mark.django_db(transaction=True)
def test_a_row_that_another_transaction_holds_keeps_no_other_from_its_hint(now: datetime, monkeypatch: Any) -> None:
    """A statement that waits for it would keep the other rows of its page from being claimed."""
    kept, other = waiting(now, since=400), waiting(now, since=400)
    tick = Sweep(using="default")
    with hinted(monkeypatch) as hints:
        with held(kept):
            in_thread(lambda: tick.rehint(now))
        assert [ids for _, ids, _ in hints] == [[other.pk]]
        tick.rehint(now)
    assert [ids for _, ids, _ in hints[1:]] == [[kept.pk]]
