"""Rescue: whose rows are taken, when, and what becomes of them."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import DatabaseError, OperationalError

from django_jobs import transitions
from django_jobs.models import JobExecution, Worker
from django_jobs.runtime import rescue as module
from django_jobs.runtime.rescue import Rescue
from django_jobs.signals import job_cancelled, job_failed, job_finished
from django_jobs.states import Status
from tests.factories import JobExecutionFactory, WorkerFactory
from tests.runtime.support import heard, held, hinted, statuses
from tests.support import assert_consistent
from tests.threads import in_thread, race

pytestmark = pytest.mark.django_db
INTERVAL = 10.0


class Looks:
    """A rescuing process whose two clocks the test moves."""

    def __init__(self, now: datetime, **options: Any) -> None:
        self.now, self.monotonic = now, 1000.0
        self.rescue = Rescue(using="default", monotonic=lambda: self.monotonic, **options)

    def look(self, after: float = INTERVAL) -> float:
        self.now += timedelta(seconds=after)
        self.monotonic += after
        return self.rescue.tick(self.now)

    def looks(self, count: int) -> None:
        for _ in range(count):
            self.look()


def lost(now: datetime, **fields: Any) -> JobExecution:
    """Make a running row, with attempts left, of a worker that fell silent an hour ago."""
    fields = {"job_name": "acc.mark_retry", "max_attempts": 3, "worker": WorkerFactory(now=now, dead=True), **fields}
    return JobExecutionFactory(running=True, now=now, **fields)


def test_a_row_of_a_dead_worker_runs_again_after_three_looks(now: datetime, monkeypatch: Any) -> None:
    """A worker is killed hard and its row stays in progress for ever.

    Sources: RealOrangeOne/django-tasks#46, ricwo/pq#23.
    """
    row = lost(now, queue="mail", priority=9)
    process = Looks(now)
    process.looks(2)
    assert statuses() == {row.pk: Status.RUNNING}
    with hinted(monkeypatch) as hints:
        process.look()
    row.refresh_from_db()
    assert (row.status, row.attempt, row.rescues, row.completed_at) == (Status.PENDING, 1, 1, None)
    assert hints == [("mail", [row.pk], 9)]
    assert_consistent()


def test_who_died_before_the_clock_was_set_back_is_dead(now: datetime) -> None:
    """After a failover to a host whose clock is behind, nobody is to wait until it has caught up."""
    ahead = WorkerFactory(now=now, heartbeat_at=now + timedelta(hours=1))
    row, other = lost(now, worker=ahead), lost(now, worker=ahead)
    Looks(now).looks(3)
    assert statuses()[row.pk] == statuses()[other.pk] == Status.PENDING


def test_a_worker_that_goes_on_beating_outlives_a_clock_that_was_set_back(now: datetime) -> None:
    alive = WorkerFactory(now=now, heartbeat_at=now + timedelta(hours=1))
    row = lost(now, worker=alive)
    process = Looks(now)
    process.looks(2)
    alive.heartbeat_at = process.now
    alive.save()
    process.look()
    assert statuses() == {row.pk: Status.RUNNING}


def test_a_process_that_ends_soon_finds_who_died_before_the_clock_was_set_back(now: datetime) -> None:
    ahead = {"heartbeat_at": now + timedelta(hours=1), "suspected_at": now + timedelta(minutes=59)}
    row = lost(now, worker=WorkerFactory(now=now, **ahead))
    assert Rescue(using="default").suspect(now) == 0
    assert Rescue(using="default").suspect(now + timedelta(seconds=21)) == 1
    assert statuses() == {row.pk: Status.PENDING}


def test_a_row_that_runs_again_is_told_as_a_failed_attempt(now: datetime) -> None:
    """Who counts failures, or pages somebody, hears of every attempt but those that took their process with them."""
    row = lost(now)
    with heard(job_failed) as failed, heard(job_finished) as finished:
        Looks(now).looks(3)
    (call,) = failed
    assert (call["execution"].pk, call["execution"].status, call["will_retry"]) == (row.pk, Status.PENDING, True)
    assert type(call["exception"]).__name__ == "WorkerLost"
    assert f"pid {Worker.objects.get(pk=row.worker_id).pid}" in str(call["exception"])
    assert [call["execution"].pk for call in finished] == [row.pk]


def test_what_is_told_of_a_lost_attempt_is_not_what_somebody_made_of_the_row_since(
    now: datetime, monkeypatch: Any
) -> None:
    row = lost(now)
    rescue = transitions.rescue

    def and_claim(rows: Any, **options: Any) -> Any:
        moved = rescue(rows, **options)
        JobExecution.objects.filter(pk=row.pk).update(status=Status.RUNNING, attempt=2)
        return moved

    monkeypatch.setattr(transitions, "rescue", and_claim)
    with heard(job_failed) as failed, hinted(monkeypatch) as hints:
        Looks(now).looks(3)
    told = [(call["execution"].attempt, call["execution"].status, call["will_retry"]) for call in failed]
    assert told == [(1, Status.PENDING, True)]
    assert hints == []


def test_the_error_names_host_pid_and_version(now: datetime) -> None:
    worker = WorkerFactory(now=now, dead=True, host="app-7.example", pid=4711, version="1.2.3")
    row = lost(now, worker=worker)
    Looks(now).looks(3)
    row.refresh_from_db()
    for part in ("WorkerLost", "app-7.example", "4711", "1.2.3"):
        assert part in row.error
    (entry,) = row.errors
    assert entry["exception"] == "django_jobs.exceptions.WorkerLost"
    assert entry["worker"] == "app-7.example pid 4711"
    assert entry["attempt"] == 1
    assert entry["started_at"] == row.started_at.isoformat()


def test_a_row_without_attempts_left_ends_with_an_error(now: datetime) -> None:
    """The worker is lost during the last permitted attempt: nothing moves the row on.

    Source: karakeep-app/liteque#4.
    """
    row = lost(now, max_attempts=1, key="K")
    with heard(job_failed) as failed, heard(job_finished) as finished:
        Looks(now).looks(3)
    row.refresh_from_db()
    assert row.status == Status.ERROR
    assert row.completed_at is not None
    assert row.active_key is None
    assert "WorkerLost" in row.error
    (call,) = failed
    assert (call["execution"].pk, call["will_retry"]) == (row.pk, False)
    assert type(call["exception"]).__name__ == "WorkerLost"
    assert [call["execution"].pk for call in finished] == [row.pk]
    assert_consistent()


def test_a_job_without_retry_is_never_started_again_whatever_its_row_says(now: datetime) -> None:
    row = lost(now, job_name="acc.mark", max_attempts=5)
    Looks(now).looks(3)
    assert statuses() == {row.pk: Status.ERROR}


def test_a_row_of_a_job_that_is_not_registered_goes_by_its_own_attempts(now: datetime) -> None:
    again, over = lost(now, job_name="gone.job"), lost(now, job_name="gone.job", max_attempts=1)
    Looks(now).looks(3)
    assert statuses() == {again.pk: Status.PENDING, over.pk: Status.ERROR}


def test_a_row_that_was_lost_three_times_kills_its_worker(now: datetime) -> None:
    row = lost(now, max_attempts=10, rescues=2)
    Looks(now).looks(3)
    row.refresh_from_db()
    assert (row.status, row.rescues) == (Status.ERROR, 3)
    assert "kills its worker" in row.error


@pytest.mark.django_db(transaction=True)
def test_a_row_marked_for_cancel_ends_cancelled(now: datetime) -> None:
    row = lost(now, cancel_requested_at=now)
    with heard(job_cancelled) as cancelled, heard(job_failed) as failed:
        Looks(now).looks(3)
    assert statuses() == {row.pk: Status.CANCELLED}
    assert [call["execution"].pk for call in cancelled] == [row.pk]
    assert failed == []


def test_an_ended_row_goes_at_once_if_its_job_keeps_no_errors(now: datetime, settings: Any) -> None:
    settings.DJANGO_JOBS = {"KEEP": {"error": 0}}
    lost(now, max_attempts=1)
    with heard(job_failed) as failed:
        Looks(now).looks(3)
    assert statuses() == {}
    assert len(failed) == 1


def test_a_fresh_worker_keeps_its_rows(now: datetime) -> None:
    row = lost(now, worker=(worker := WorkerFactory(now=now)))
    process = Looks(now)
    for _ in range(8):
        Worker.objects.filter(pk=worker.pk).update(heartbeat_at=process.now + timedelta(seconds=INTERVAL))
        process.look()
    assert statuses() == {row.pk: Status.RUNNING}


def test_a_crash_is_found_within_sixty_seconds_of_the_last_beat(now: datetime) -> None:
    row = lost(now, worker=WorkerFactory(now=now))
    process = Looks(now)
    while statuses()[row.pk] == Status.RUNNING:
        process.look()
        assert process.now - now <= timedelta(seconds=60)
    assert process.now - now > timedelta(seconds=45)


def test_a_beat_between_the_looks_begins_the_count_anew(now: datetime) -> None:
    row = lost(now, worker=(worker := WorkerFactory(now=now, dead=True)))
    process = Looks(now)
    process.looks(2)
    # Still stale by the database's clock, yet it lives: its clock or its line is slow.
    Worker.objects.filter(pk=worker.pk).update(heartbeat_at=now - timedelta(minutes=30))
    process.looks(2)
    assert statuses() == {row.pk: Status.RUNNING}
    process.look()
    assert statuses() == {row.pk: Status.PENDING}


def test_a_late_look_begins_the_count_anew(now: datetime) -> None:
    """The host was frozen between the looks: the others were perhaps frozen with it, and beat again in a moment."""
    row = lost(now)
    process = Looks(now)
    process.looks(2)
    process.look(after=INTERVAL * 1.6)
    process.look()
    assert statuses() == {row.pk: Status.RUNNING}
    process.look()
    assert statuses() == {row.pk: Status.PENDING}


def test_a_failed_look_begins_the_count_anew(now: datetime) -> None:
    """An outage of the database must not end healthy runs: nobody could beat meanwhile."""
    row = lost(now)
    outage = False

    def beat() -> None:
        if outage:
            raise OperationalError("the database is away")

    process = Looks(now, beat=beat)
    process.looks(2)
    outage = True
    with pytest.raises(OperationalError):
        process.look()
    outage = False
    # It is tried again soon.
    process.look(after=0.3)
    process.look()
    assert statuses() == {row.pk: Status.RUNNING}
    process.look()
    assert statuses() == {row.pk: Status.PENDING}


def test_a_row_that_was_held_for_a_moment_is_not_ended_instead(now: datetime, monkeypatch: Any) -> None:
    row = lost(now)
    # As if its holder had let go of it between the two statements.
    monkeypatch.setattr(transitions, "rescue", lambda *args, **options: [])
    Looks(now).looks(3)
    assert statuses() == {row.pk: Status.RUNNING}


def test_looks_that_come_too_soon_do_not_count(now: datetime) -> None:
    row = lost(now)
    process = Looks(now)
    process.look()
    for _ in range(8):
        assert process.look(after=1.0) == pytest.approx(process.rescue._looked_at + INTERVAL - process.monotonic)
    assert statuses() == {row.pk: Status.RUNNING}


def test_the_process_beats_before_it_looks(now: datetime) -> None:
    worker = WorkerFactory(now=now, dead=True)
    row = lost(now, worker=worker)
    process = Looks(now)

    def beat() -> None:
        Worker.objects.filter(pk=worker.pk).update(heartbeat_at=process.now)

    process.rescue = Rescue(using="default", beat=beat, monotonic=lambda: process.monotonic)
    process.looks(4)
    assert statuses() == {row.pk: Status.RUNNING}


def test_a_worker_that_said_it_stopped_is_dead_at_once(now: datetime) -> None:
    row = lost(now, worker=WorkerFactory(now=now, stopped=True))
    Looks(now).look()
    row.refresh_from_db()
    assert row.status == Status.PENDING
    assert "stopped" in row.error


def test_rows_of_no_worker_and_of_an_unknown_one_are_found(now: datetime) -> None:
    unknown, nobody = (lost(now) for _ in range(2))
    Worker.objects.filter(pk=unknown.worker_id).delete()
    JobExecution.objects.filter(pk=nobody.pk).update(worker_id=None)
    process = Looks(now)
    process.looks(2)
    assert set(statuses().values()) == {Status.RUNNING}
    process.look()
    assert set(statuses().values()) == {Status.PENDING}


def test_a_worker_that_beats_just_before_the_update_keeps_its_row(now: datetime, monkeypatch: Any) -> None:
    row = lost(now)
    process = Looks(now)
    process.looks(2)
    rescue = transitions.rescue

    def beat_first(rows: Any, **options: Any) -> Any:
        Worker.objects.filter(pk=row.worker_id).update(heartbeat_at=process.now)
        return rescue(rows, **options)

    monkeypatch.setattr(transitions, "rescue", beat_first)
    process.look()
    assert statuses() == {row.pk: Status.RUNNING}


@pytest.mark.django_db(transaction=True)
def test_a_row_that_the_database_refuses_stops_no_other(now: datetime, monkeypatch: Any) -> None:
    """One bad row stops nothing."""
    worker = WorkerFactory(now=now, dead=True)
    bad, *good = (lost(now, worker=worker) for _ in range(4))
    rescue = transitions.rescue

    def refusing(rows: Any, **options: Any) -> Any:
        if rows.filter(pk=bad.pk).exists():
            raise DatabaseError("poison")
        return rescue(rows, **options)

    monkeypatch.setattr(transitions, "rescue", refusing)
    Looks(now).looks(3)
    assert statuses() == {bad.pk: Status.RUNNING} | dict.fromkeys((row.pk for row in good), Status.PENDING)


def test_a_connection_lost_while_rows_are_rescued_ends_the_look(now: datetime, monkeypatch: Any) -> None:
    """Each row that is left would be told of as one that cannot be rescued."""
    row = lost(now)

    def lose(rows: Any, **options: Any) -> None:
        raise OperationalError("server closed the connection unexpectedly")

    monkeypatch.setattr(transitions, "rescue", lose)
    monkeypatch.setattr(module, "is_connection_loss", lambda error, using: True)
    with pytest.raises(OperationalError):
        Looks(now).looks(3)
    assert statuses() == {row.pk: Status.RUNNING}


@pytest.mark.medium
@pytest.mark.django_db(transaction=True)
def test_two_processes_rescue_each_row_once(now: datetime) -> None:
    """Safe in parallel."""
    worker = WorkerFactory(now=now, dead=True)
    for _ in range(10):
        lost(now, worker=worker)
    one, other = Looks(now), Looks(now)
    one.looks(2)
    other.looks(2)
    race(one.look, other.look)
    assert set(JobExecution.objects.values_list("status", "rescues", "attempt")) == {(Status.PENDING, 1, 1)}


def test_without_a_memory_a_second_call_rescues(now: datetime) -> None:
    row = lost(now, worker=(worker := WorkerFactory(now=now, dead=True)))
    assert Rescue(using="default").suspect(now) == 0
    worker.refresh_from_db()
    assert worker.suspected_at == now
    assert Rescue(using="default").suspect(now + timedelta(seconds=2 * INTERVAL)) == 0
    assert Rescue(using="default").suspect(now + timedelta(seconds=2 * INTERVAL + 1)) == 1
    assert statuses() == {row.pk: Status.PENDING}


def test_a_beat_clears_the_suspicion(now: datetime) -> None:
    row = lost(now, worker=(worker := WorkerFactory(now=now, dead=True)))
    Rescue(using="default").suspect(now)
    Worker.objects.filter(pk=worker.pk).update(heartbeat_at=now, suspected_at=None)
    later = now + timedelta(minutes=10)
    assert Rescue(using="default").suspect(later) == 0
    assert Rescue(using="default").suspect(later + timedelta(seconds=1)) == 0
    assert statuses() == {row.pk: Status.RUNNING}


def test_without_a_memory_stopped_and_unknown_workers_are_dead_at_once(now: datetime) -> None:
    stopped, unknown, fresh = lost(now, worker=WorkerFactory(now=now, stopped=True)), lost(now), lost(now)
    Worker.objects.filter(pk=unknown.worker_id).delete()
    Worker.objects.filter(pk=fresh.worker_id).update(heartbeat_at=now)
    assert Rescue(using="default").suspect(now) == 2
    assert statuses() == {stopped.pk: Status.PENDING, unknown.pk: Status.PENDING, fresh.pk: Status.RUNNING}


@pytest.mark.postgres
@pytest.mark.mysql
@pytest.mark.django_db(transaction=True)
def test_a_row_that_another_transaction_holds_keeps_no_other_from_being_rescued(now: datetime) -> None:
    """A worker that froze right before its commit holds its row for as long as it is frozen."""
    worker = WorkerFactory(now=now, dead=True)
    kept, again, over = lost(now, worker=worker), lost(now, worker=worker), lost(now, worker=worker, max_attempts=1)
    process = Looks(now)
    with held(kept):
        in_thread(lambda: process.looks(3))
        assert statuses() == {kept.pk: Status.RUNNING, again.pk: Status.PENDING, over.pk: Status.ERROR}
    process.look()
    assert statuses() == {kept.pk: Status.PENDING, again.pk: Status.PENDING, over.pk: Status.ERROR}
