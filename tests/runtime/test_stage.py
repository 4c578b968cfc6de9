"""Stage: what becomes claimable, what is set aside, what comes back."""

from __future__ import annotations

import time
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import DatabaseError

from django_jobs import pauses, registry, transitions
from django_jobs.models import JobExecution, JobState, Worker
from django_jobs.pauses import Paused
from django_jobs.querysets import key_digest
from django_jobs.runtime import portions, stage
from django_jobs.runtime.moves import Moves
from django_jobs.runtime.stage import Stage
from django_jobs.states import Parked, Status
from tests.cases.copies import analyze
from tests.factories import JobExecutionFactory, JobStateFactory, QueueStateFactory, WorkerFactory
from tests.runtime.support import held, hinted, rests, statuses
from tests.threads import in_thread, race

pytestmark = pytest.mark.django_db


def make_due(now: datetime, count: int = 1, **fields: Any) -> list[JobExecution]:
    return [
        JobExecutionFactory(scheduled=True, now=now, scheduled_at=now - timedelta(seconds=1), **fields)
        for _ in range(count)
    ]


def test_due_rows_become_pending_and_are_hinted(now: datetime, monkeypatch: Any) -> None:
    """Due scheduled -> pending + hint."""
    (row,) = make_due(now, queue="mail", priority=50)
    with hinted(monkeypatch) as hints:
        Stage(using="default").tick(now)
    assert statuses() == {row.pk: Status.PENDING}
    assert hints == [("mail", [row.pk], 50)]


def test_rows_are_promoted_by_priority(now: datetime, monkeypatch: Any) -> None:
    """By priority."""
    low, high, normal = (make_due(now, priority=priority)[0] for priority in (-50, 50, 0))
    with hinted(monkeypatch) as hints:
        Stage(using="default").tick(now)
    assert [ids for _, ids, _ in hints] == [[high.pk], [normal.pk], [low.pk]]


def test_rows_of_the_future_and_final_rows_stay(now: datetime) -> None:
    future = JobExecutionFactory(scheduled=True, now=now)
    cancelled = JobExecutionFactory(cancelled=True, now=now, scheduled_at=now - timedelta(seconds=9))
    Stage(using="default").tick(now)
    assert statuses() == {future.pk: Status.SCHEDULED, cancelled.pk: Status.CANCELLED}


def test_a_row_cancelled_between_the_read_and_the_write_stays_cancelled(now: datetime, monkeypatch: Any) -> None:
    """Guarded (a cancelled one stays cancelled)."""
    (row,) = make_due(now)
    promote = transitions.promote

    def cancel_first(rows: Any, *, now: datetime) -> int:
        transitions.cancel(JobExecution.objects.filter(pk=row.pk), now=now, by="", by_name="")
        return promote(rows, now=now)

    monkeypatch.setattr(transitions, "promote", cancel_first)
    Stage(using="default").tick(now)
    assert statuses() == {row.pk: Status.CANCELLED}


def test_the_tick_returns_the_time_to_the_next_due_row(now: datetime) -> None:
    assert rests(Stage(using="default").tick(now))
    JobExecutionFactory(scheduled=True, now=now, scheduled_at=now + timedelta(seconds=0.25))
    assert Stage(using="default").tick(now) == pytest.approx(0.25)


def test_the_time_between_two_ticks_includes_that_of_the_first(now: datetime, monkeypatch: Any) -> None:
    """A pause is noticed within a second, however much there was to do before."""
    read = pauses.paused

    def slowly(using: str) -> Any:
        time.sleep(0.3)
        return read(using)

    monkeypatch.setattr(pauses, "paused", slowly)
    assert 0 < Stage(using="default").tick(now) <= stage.INTERVAL - 0.3


def test_a_tick_that_took_longer_than_the_interval_does_not_say_that_there_is_more(
    now: datetime, monkeypatch: Any
) -> None:
    monkeypatch.setattr(stage, "INTERVAL", 0.0)
    assert 0 < Stage(using="default").tick(now) < 0.1


def test_many_due_rows_are_promoted_batch_after_batch(now: datetime, monkeypatch: Any) -> None:
    monkeypatch.setattr(stage, "WINDOW", 7)
    monkeypatch.setattr(stage, "portions", lambda rows: portions.portions(rows, 3))
    # The window ends a tick here, and never the time.
    monkeypatch.setattr(stage, "SHARE", 60)
    make_due(now, 20)
    tick = Stage(using="default")
    assert tick.tick(now) == 0.0
    assert sorted(statuses().values()).count(Status.PENDING) == 7
    assert tick.tick(now) == 0.0
    assert rests(tick.tick(now))
    assert set(statuses().values()) == {Status.PENDING}


def test_due_rows_are_promoted_however_long_it_takes_to_find_them(now: datetime, monkeypatch: Any) -> None:
    monkeypatch.setattr(stage, "SHARE", 0)
    (row,) = make_due(now)
    Stage(using="default").tick(now)
    assert statuses() == {row.pk: Status.PENDING}


def test_rows_of_a_resumed_job_come_back_however_long_a_look_at_the_workers_takes(
    now: datetime, monkeypatch: Any
) -> None:
    monkeypatch.setattr(stage, "SHARE", 0)
    JobStateFactory(paused=True)
    row = JobExecutionFactory(parked=True, now=now)
    process = Stage(using="default")
    process.tick(now)
    JobState.objects.update(paused_at=None)
    process.tick(now + timedelta(seconds=1))
    assert statuses() == {row.pk: Status.PENDING}


def test_the_number_of_queries_does_not_depend_on_the_rows(now: datetime, django_assert_max_num_queries: Any) -> None:
    make_due(now, 50)
    for _ in range(10):
        JobExecutionFactory(now=now)
    with django_assert_max_num_queries(20):
        Stage(using="default", watch_queues=True).tick(now)


def test_keyed_rows_due_together_with_others_are_promoted(now: datetime) -> None:
    """A row with a key conflicts with itself, or fails the whole batch, when it is promoted.

    Source: riverqueue/river PR#619.
    """
    (keyed,) = make_due(now, key="K")
    others = make_due(now, 50)
    assert keyed.active_key == key_digest(None, "K")
    Stage(using="default").tick(now)
    assert set(statuses().values()) == {Status.PENDING}
    assert len(others) + 1 == JobExecution.objects.pending().count()


@pytest.mark.django_db(transaction=True)
def test_a_row_that_the_database_refuses_stops_no_other(now: datetime, monkeypatch: Any) -> None:
    """One bad row stops nothing."""
    bad, *good = make_due(now, 5)
    promote = transitions.promote

    def refusing(rows: Any, *, now: datetime) -> int:
        if rows.filter(pk=bad.pk).exists():
            raise DatabaseError("poison")
        return promote(rows, now=now)

    monkeypatch.setattr(transitions, "promote", refusing)
    tick = Stage(using="default")
    # It is left alone for a minute: not in the way, and no busy loop.
    assert rests(tick.tick(now))
    assert rests(tick.tick(now))
    assert {pk for pk, status in statuses().items() if status == Status.PENDING} == {row.pk for row in good}
    monkeypatch.setattr(transitions, "promote", promote)
    tick.tick(now + timedelta(seconds=61))
    assert statuses()[bad.pk] == Status.PENDING


@pytest.mark.django_db(transaction=True)
def test_several_processes_may_stage_at_once(now: datetime) -> None:
    """Safe in parallel."""
    make_due(now, 40)
    race(*(lambda: Stage(using="default").tick(now) for _ in range(3)))
    assert set(statuses().values()) == {Status.PENDING}


def test_pauses_are_read_for_the_worker(now: datetime) -> None:
    JobStateFactory(paused=True)
    JobStateFactory(job_name="acc.slow")
    QueueStateFactory(paused=True, queue="mail")
    QueueStateFactory(queue="other")
    tick = Stage(using="default")
    tick.tick(now)
    assert tick.paused_jobs == {"acc.mark"}
    assert tick.paused_queues == {"mail"}


def test_what_a_claim_reads_of_pauses_is_news_for_the_next_tick(now: datetime, monkeypatch: Any) -> None:
    row = JobExecutionFactory(now=now)
    state = JobStateFactory(paused=True)
    tick = Stage(using="default")
    tick.tick(now)
    JobState.objects.filter(pk=state.pk).update(paused_at=None)
    monkeypatch.setattr(stage, "PAUSES_FOR", 0.0)
    assert tick.recent_pauses() == (frozenset(), frozenset())
    tick.tick(now)
    assert statuses() == {row.pk: Status.PENDING}


class Questions:
    """A database that takes `seconds` to tell what is paused, by a clock that nothing else moves."""

    def __init__(self, monkeypatch: Any, seconds: float) -> None:
        self.time, self.seconds, self.count = 0.0, seconds, 0
        monkeypatch.setattr(stage, "time", SimpleNamespace(monotonic=lambda: self.time))
        monkeypatch.setattr(pauses, "paused", self.answer)

    def answer(self, using: str) -> Paused:
        self.count += 1
        self.time += self.seconds
        return Paused(frozenset({f"answer.{self.count}"}), frozenset())


def test_claims_ask_for_pauses_once_a_second(monkeypatch: Any) -> None:
    asked, seen = Questions(monkeypatch, 0.0), Stage(using="default")
    assert [seen.recent_pauses() for _ in range(3)] == [Paused(frozenset({"answer.1"}), frozenset())] * 3
    asked.time += stage.PAUSES_FOR
    assert seen.recent_pauses().jobs == {"answer.1"}
    asked.time += 0.001
    assert seen.recent_pauses().jobs == {"answer.2"}


def test_the_pauses_that_a_claim_goes_by_are_as_old_as_their_question(monkeypatch: Any) -> None:
    asked, seen = Questions(monkeypatch, stage.PAUSES_FOR + 0.001), Stage(using="default")
    assert seen.recent_pauses().jobs == {"answer.1"}
    assert seen.recent_pauses().jobs == {"answer.2"}
    asked.seconds = stage.PAUSES_FOR - 0.001
    assert seen.recent_pauses().jobs == seen.recent_pauses().jobs == {"answer.3"}


def test_rows_of_a_paused_job_are_parked_and_come_back_when_it_is_resumed(now: datetime, monkeypatch: Any) -> None:
    paused = JobExecutionFactory(now=now, key="K")
    other = JobExecutionFactory(now=now, job_name="acc.slow")
    state = JobStateFactory(paused=True)
    tick = Stage(using="default")
    tick.tick(now)
    paused.refresh_from_db()
    assert (paused.status, paused.parked_reason) == (Status.SCHEDULED, "paused")
    assert paused.active_key is not None
    assert statuses()[other.pk] == Status.PENDING
    tick.tick(now + timedelta(seconds=1))
    assert statuses()[paused.pk] == Status.SCHEDULED
    JobState.objects.filter(pk=state.pk).update(paused_at=None)
    with hinted(monkeypatch) as hints:
        tick.tick(now + timedelta(seconds=2))
    assert statuses()[paused.pk] == Status.PENDING
    assert hints == [("default", [paused.pk], 0)]


def test_a_due_row_of_a_paused_job_does_not_stay_pending(now: datetime) -> None:
    make_due(now)
    JobStateFactory(paused=True)
    tick = Stage(using="default")
    tick.tick(now)
    tick.tick(now + timedelta(seconds=1))
    row = JobExecution.objects.get()
    assert (row.status, row.parked_reason) == (Status.SCHEDULED, "paused")


def test_rows_pushed_under_an_old_name_are_paused_with_their_job(now: datetime) -> None:
    with registry.isolated():
        from django_jobs import job

        @job(name="acc.new_name", aliases=["acc.old_name"])
        def renamed() -> None: ...

        row = JobExecutionFactory(now=now, job_name="acc.old_name")
        JobStateFactory(job_name="acc.new_name", paused=True)
        tick = Stage(using="default")
        tick.tick(now)
    assert tick.paused_jobs == {"acc.new_name", "acc.old_name"}
    assert statuses()[row.pk] == Status.SCHEDULED


@pytest.mark.medium
def test_what_was_resumed_while_no_process_looked_comes_back_too(now: datetime, monkeypatch: Any) -> None:
    monkeypatch.setattr(stage, "PAGE", 2)
    rows = [JobExecutionFactory(now=now, parked=True) for _ in range(9)]
    JobStateFactory(job_name="acc.slow", paused=True)
    kept = [JobExecutionFactory(now=now, parked=True, job_name="acc.slow") for _ in range(9)]
    tick = Stage(using="default")
    for _ in range(20):
        if tick.tick(now) > 0:
            break
    pending = {pk for pk, status in statuses().items() if status == Status.PENDING}
    assert pending == {row.pk for row in rows}
    assert {row.pk for row in kept} == set(statuses()) - pending


def test_a_name_that_no_worker_knows_is_parked_and_the_rows_behind_it_stay(now: datetime) -> None:
    """A row whose function cannot be resolved is first in line for ever, and the queue spins on it.

    Sources: RealOrangeOne/django-tasks#190, collectiveaccess/providence#1425.
    """
    WorkerFactory(now=now)
    gone = [JobExecutionFactory(now=now, job_name="gone.job", priority=100) for _ in range(10)]
    marks = [JobExecutionFactory(now=now, priority=-100) for _ in range(10)]
    Stage(using="default").tick(now)
    assert {pk for pk, status in statuses().items() if status == Status.PENDING} == {row.pk for row in marks}
    for row in gone:
        row.refresh_from_db()
        assert (row.status, row.parked_reason) == (Status.SCHEDULED, "unknown")


def test_a_name_that_no_worker_knows_is_logged_once(now: datetime, caplog: Any) -> None:
    """A hint for an unknown job is a warning and a skip."""
    WorkerFactory(now=now)
    tick = Stage(using="default")
    for seconds in (0, 10, 20):
        JobExecutionFactory.create_batch(2, now=now, job_name="gone.job")
        later = now + timedelta(seconds=seconds)
        WorkerFactory(now=later)
        tick.tick(later)
    assert set(statuses().values()) == {Status.SCHEDULED}
    assert [(each.levelname, "gone.job" in each.getMessage()) for each in caplog.records] == [("WARNING", True)]


def test_a_parked_name_comes_back_when_a_worker_lists_it(now: datetime, monkeypatch: Any) -> None:
    """When a worker that knows the job comes, the row runs."""
    WorkerFactory(now=now)
    row = JobExecutionFactory(now=now, job_name="gone.job", priority=7)
    tick = Stage(using="default")
    tick.tick(now)
    assert statuses()[row.pk] == Status.SCHEDULED
    later = now + timedelta(seconds=10)
    WorkerFactory(now=later, names=["gone.job"])
    with hinted(monkeypatch) as hints:
        tick.tick(later)
    assert statuses()[row.pk] == Status.PENDING
    assert hints == [("default", [row.pk], 7)]


@pytest.mark.parametrize(
    "worker",
    [
        pytest.param({"queues": ["mail"]}, id="no worker serves the queue"),
        pytest.param({"queues": ["-default"]}, id="the worker leaves out the queue"),
        pytest.param({"roles": ["scheduler"]}, id="the process is no worker"),
        pytest.param({"dead": True}, id="the worker is dead"),
        pytest.param({"stopped": True}, id="the worker stopped"),
        pytest.param({"young": True}, id="the worker has just begun"),
    ],
)
def test_an_unknown_name_is_not_parked_when(now: datetime, worker: dict[str, Any]) -> None:
    if worker.pop("young", False):
        worker["started_at"] = now - timedelta(seconds=30)
    WorkerFactory(now=now, **worker)
    row = JobExecutionFactory(now=now, job_name="gone.job")
    Stage(using="default").tick(now)
    assert statuses()[row.pk] == Status.PENDING


def test_a_name_listed_within_the_last_minute_is_not_parked(now: datetime) -> None:
    """A deploy replaces the workers one after the other."""
    WorkerFactory(now=now)
    WorkerFactory(now=now, names=["gone.job"], heartbeat_at=now - timedelta(seconds=50), stopped=True)
    row = JobExecutionFactory(now=now, job_name="gone.job")
    tick = Stage(using="default")
    tick.tick(now)
    assert statuses()[row.pk] == Status.PENDING
    WorkerFactory(now=now + timedelta(seconds=11))
    tick.tick(now + timedelta(seconds=11))
    assert statuses()[row.pk] == Status.SCHEDULED


def test_rows_are_set_aside_and_come_back_also_when_the_clock_was_set_back(now: datetime) -> None:
    WorkerFactory(now=now, started_at=now - timedelta(days=1), names=["acc.mark"])
    process = Stage(using="default")
    process.tick(now)
    before = now - timedelta(hours=1)
    Worker.objects.update(heartbeat_at=before)
    unknown = JobExecutionFactory(pending=True, now=before, job_name="gone.job")
    free = JobExecutionFactory(parked=True, now=before, job_name="acc.mark", parked_reason=Parked.PAUSED)
    process.tick(before)
    assert statuses() == {unknown.pk: Status.SCHEDULED, free.pk: Status.PENDING}


@pytest.mark.postgres
@pytest.mark.mysql
@pytest.mark.django_db(transaction=True)
def test_a_row_that_was_held_when_the_clock_was_set_back_has_its_turn(now: datetime) -> None:
    (row,) = make_due(now - timedelta(hours=1))
    process = Stage(using="default")
    with held(row):
        in_thread(lambda: process.tick(now))
    assert statuses() == {row.pk: Status.SCHEDULED}
    process.tick(now - timedelta(hours=1))
    assert statuses() == {row.pk: Status.PENDING}


def test_start_now_sends_a_parked_row_to_be_looked_at_again(now: datetime) -> None:
    row = JobExecutionFactory(now=now, parked=True)
    JobStateFactory(paused=True)
    tick = Stage(using="default")
    tick.tick(now)
    transitions.start_now(JobExecution.objects.filter(pk=row.pk), now=now)
    assert statuses()[row.pk] == Status.PENDING
    tick.tick(now)
    assert statuses()[row.pk] == Status.SCHEDULED


def test_queues_with_pending_rows_are_seen_only_where_they_are_asked_for(now: datetime) -> None:
    for queue in ("b", "a", "b", "c"):
        JobExecutionFactory(now=now, queue=queue)
    JobExecutionFactory(now=now, queue="later", scheduled=True)
    asked, other = Stage(using="default", watch_queues=True), Stage(using="default")
    asked.tick(now)
    other.tick(now)
    assert asked.pending_queues == {"a", "b", "c"}
    assert other.pending_queues == set()


@pytest.mark.postgres
@pytest.mark.mysql
@pytest.mark.django_db(transaction=True)
def test_a_row_that_another_transaction_holds_keeps_no_other_waiting(now: datetime) -> None:
    """A request that cancelled one row, and then waits for somebody else, must not stop every job that is due."""
    kept, free = make_due(now, count=2)
    process = Stage(using="default")
    with held(kept):
        assert in_thread(lambda: process.tick(now)) > 0
        assert statuses() == {kept.pk: Status.SCHEDULED, free.pk: Status.PENDING}
    process.tick(now + timedelta(seconds=1))
    assert statuses() == {kept.pk: Status.PENDING, free.pk: Status.PENDING}


@pytest.mark.postgres
@pytest.mark.mysql
@pytest.mark.django_db(transaction=True)
def test_what_is_set_aside_waits_for_no_other_row_that_a_transaction_holds(now: datetime) -> None:
    """MariaDB, once it knows how small the table is, would read all pending rows to change some."""
    pending = JobExecutionFactory.build_batch(100, now=now)
    finished = JobExecutionFactory.build_batch(600, now=now, ok=True, worker=WorkerFactory())
    JobExecution.objects.bulk_create([*pending, *finished])
    analyze()
    kept, *others = pending
    with held(kept):
        in_thread(lambda: Moves(using="default").park([row.pk for row in others], "paused", now))
    assert JobExecution.objects.parked().count() == len(others)
