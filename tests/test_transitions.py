"""The verbs: what each moves, what it writes, and what it leaves alone."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from django.db import IntegrityError, OperationalError, connection, connections, transaction
from django.test.utils import CaptureQueriesContext

from django_jobs import clock, contention, transitions
from django_jobs.fields import uuid7
from django_jobs.models import JobExecution, Worker
from django_jobs.querysets import key_digest
from django_jobs.states import FINAL, TRANSITIONS, Status
from tests.factories import JobExecutionFactory, WorkerFactory, ready_for
from tests.runtime.support import at_once, in_thread
from tests.support import assert_consistent, wait_for
from tests.verbs import ENDINGS, ENTRY, VERBS, claim, describe, finish, only, stored

pytestmark = pytest.mark.django_db

committed = pytest.mark.django_db(transaction=True)


@pytest.fixture
def now() -> datetime:
    return clock.now("default")


@pytest.fixture
def worker(now: datetime) -> Worker:
    return WorkerFactory(now=now)


def running(now: datetime, **fields: Any) -> JobExecution:
    return JobExecutionFactory(**{"running": True, "now": now, "max_attempts": 3, **fields})


def test_every_transition_but_the_first_has_a_verb_here() -> None:
    assert set(VERBS) == set(TRANSITIONS) - {"push"}


@pytest.mark.parametrize("status", list(Status))
@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_moves_rows_of_its_sources_and_no_others(verb: str, status: Status, now: datetime) -> None:
    move = TRANSITIONS[verb]
    row = JobExecutionFactory(
        now=now,
        status=status,
        max_attempts=3,
        key="K",
        scheduled_at=now - timedelta(seconds=1),
        parked_reason="paused" if verb == "unpark" else "",
    )
    before = stored(row)
    count = VERBS[verb](row, now)
    after = stored(row)
    if status in move.sources:
        assert (count, after["status"] in move.targets) == (1, True)
    else:
        assert (count, after) == (0, before)
    assert_consistent()


# Insert


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
        transitions.insert(rows, now=now, using="default")
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


# Claim


def test_a_claim_writes_the_run(now: datetime, worker: Worker) -> None:
    row = JobExecutionFactory(now=now, attempt=1, run_no=4, max_attempts=3, key="K", payload={"tag": "é💥", "n": [1]})
    at = now + timedelta(seconds=1)
    (claimed,) = claim(worker, at)
    found = stored(row)
    expected = {"status": "running", "run_no": 5, "attempt": 2, "worker_id": worker.pk}
    expected |= {"started_at": at, "updated_at": at, "scheduled_at": now, "active_key": key_digest(None, "K")}
    assert {name: found[name] for name in expected} == expected
    assert {name: getattr(claimed, name) for name in expected} == expected
    assert claimed.payload == {"tag": "é💥", "n": [1]}


def test_a_claimed_row_is_what_the_table_holds(now: datetime, worker: Worker) -> None:
    JobExecutionFactory(now=now, key="K", organization_id="A", errors=[ENTRY], triggered_by="7", tick_at=now)
    (claimed,) = claim(worker, now)
    found = JobExecution.objects.get()
    # The large columns of earlier attempts, and what no run reads, come when somebody asks.
    assert {"logs", "result", "progress", "context", "hinted_at"} <= claimed.get_deferred_fields()
    with CaptureQueriesContext(connection) as queries:
        assert (claimed.payload, claimed.errors, claimed.payload) == (found.payload, [ENTRY], found.payload)
        assert (claimed.key, claimed.organization_id, claimed.triggered_by) == ("K", "A", "7")
        assert (claimed.worker_id, claimed.cancel_requested_at, claimed.parked_reason) == (worker.pk, None, "")
    assert len(queries) == 0
    for field in JobExecution._meta.concrete_fields:
        assert getattr(claimed, field.attname) == getattr(found, field.attname), field.attname
    assert claimed._state.db == "default" and not claimed._state.adding


def test_rows_are_claimed_by_priority_then_due_time_then_age(now: datetime, worker: Worker) -> None:
    def row(priority: int, seconds: int) -> JobExecution:
        return JobExecutionFactory(now=now, priority=priority, scheduled_at=now - timedelta(seconds=seconds))

    # Each is made before one that goes first, so that no rule alone gives this order.
    low, first, second, old, high = row(-50, 9), row(0, 1), row(0, 1), row(0, 5), row(50, 0)
    assert first.pk < second.pk
    best = [high.pk, old.pk, first.pk, second.pk, low.pk]
    assert [row.pk for row in claim(worker, now, limit=2)] == best[:2]
    assert [row.pk for row in claim(worker, now)] == best[2:]


def test_a_claim_takes_no_more_than_its_limit(now: datetime, worker: Worker) -> None:
    JobExecutionFactory.create_batch(5, now=now)
    assert len(claim(worker, now, limit=3)) == 3
    assert len(claim(worker, now, limit=0)) == 0
    assert JobExecution.objects.pending().count() == 2


def test_of_rows_that_were_told_only_the_pending_ones_are_claimed_and_no_other(now: datetime, worker: Worker) -> None:
    low, high = JobExecutionFactory(now=now, priority=-50), JobExecutionFactory(now=now)
    JobExecutionFactory(now=now, priority=100)
    gone = [JobExecutionFactory(now=now, status=status).pk for status in ("scheduled", "running", "ok", "cancelled")]
    elsewhere = [JobExecutionFactory(now=now, queue="mail").pk, JobExecutionFactory(now=now, job_name="acc.slow").pk]
    claimed = claim(worker, now, ids=[low.pk, *gone, *elsewhere, uuid7(), high.pk])
    assert [row.pk for row in claimed] == [high.pk, low.pk]
    assert claim(worker, now, ids=[]) == []


def test_only_the_names_and_the_queue_asked_for_are_claimed(now: datetime, worker: Worker) -> None:
    mine = JobExecutionFactory(now=now)
    JobExecutionFactory(now=now, queue="mail")
    slow = JobExecutionFactory(now=now, job_name="acc.slow")
    JobExecutionFactory(now=now, job_name="ACC.MARK")
    assert [row.pk for row in claim(worker, now)] == [mine.pk]
    assert claim(worker, now, names=[]) == []
    assert [row.pk for row in claim(worker, now, names=["acc.mark", "acc.slow"])] == [slow.pk]


def test_a_bound_on_the_rank_leaves_less_urgent_rows(now: datetime, worker: Worker) -> None:
    high, normal = (JobExecutionFactory(now=now, priority=priority) for priority in (50, 0))
    assert [row.pk for row in claim(worker, now, max_rank=-50)] == [high.pk]
    assert claim(worker, now, max_rank=-1) == []
    assert [row.pk for row in claim(worker, now, max_rank=0)] == [normal.pk]


@pytest.mark.parametrize(
    "state",
    [
        pytest.param({"heartbeat_at": -45}, id="silent"),
        pytest.param({"stopped_at": 0}, id="stopped"),
        pytest.param(None, id="unknown"),
    ],
)
def test_a_worker_that_others_may_have_given_up_claims_nothing(state: dict[str, int] | None, now: datetime) -> None:
    JobExecutionFactory(now=now)
    worker = WorkerFactory(now=now)
    if state is None:
        worker.delete()
    else:
        times = {name: now + timedelta(seconds=seconds) for name, seconds in state.items()}
        Worker.objects.filter(pk=worker.pk).update(**times)
    assert claim(worker.pk or uuid4(), now) == []
    assert JobExecution.objects.pending().count() == 1


def test_a_worker_that_beat_a_moment_before_the_limit_claims(now: datetime) -> None:
    JobExecutionFactory(now=now)
    worker = WorkerFactory(now=now, heartbeat_at=now - timedelta(seconds=44.999))
    assert len(claim(worker, now)) == 1


@pytest.mark.medium
@committed
def test_workers_that_claim_at_once_never_share_a_row(now: datetime) -> None:
    """A claim that selects and then updates lets two consumers take the same row.

    Sources: coleifer/huey#253, Koed00/django-q#426.
    """
    rows = JobExecutionFactory.build_batch(120, now=now)
    transitions.insert(rows, now=now, using="default")
    workers = WorkerFactory.create_batch(4, now=now)

    def take_all(worker: Worker) -> list[Any]:
        taken: list[Any] = []
        while found := claim(worker, now, limit=7):
            assert {row.worker_id for row in found} == {worker.pk}
            taken += [row.pk for row in found]
        return taken

    shares = at_once(*(lambda worker=worker: take_all(worker) for worker in workers))  # type: ignore[misc]
    taken = [pk for share in shares for pk in share]
    assert len(taken) == len(set(taken))
    # A worker that finds the best rows locked by others passes them over, and may leave before they are committed.
    left = take_all(workers[0])
    assert {*taken, *left} == {row.pk for row in rows}
    assert set(JobExecution.objects.values_list("run_no", "attempt")) == {(1, 1)}
    assert_consistent()


@committed
@pytest.mark.postgres
@pytest.mark.mysql
def test_a_claim_passes_over_rows_that_another_transaction_holds(now: datetime, worker: Worker) -> None:
    held, free = JobExecutionFactory.create_batch(2, now=now)
    with transaction.atomic():
        list(only(held).select_for_update())
        assert [row.pk for row in in_thread(lambda: claim(worker, now))] == [free.pk]


# Endings


def test_success_ends_the_row_and_frees_its_key(now: datetime) -> None:
    row = running(now, key="K", error="an earlier fault")
    at = now + timedelta(seconds=2)
    ending = transitions.succeed(row, result={"n": 1}, logs=[["a line"]], progress={"done": 1})
    assert finish(ending, now=at) == {row.pk: Status.OK}
    found = stored(row)
    expected = {"status": "ok", "completed_at": at, "updated_at": at, "active_key": None, "error": "", "attempt": 1}
    expected |= {"result": {"n": 1}, "logs": [["a line"]], "progress": {"done": 1}, "run_no": 1}
    expected |= {"worker_id": row.worker_id, "started_at": row.started_at}
    assert {name: found[name] for name in expected} == expected


def test_a_failure_ends_the_row_and_adds_to_its_history(now: datetime) -> None:
    row = running(now, key="K", errors=[{"message": "the first"}])
    at = now + timedelta(seconds=2)
    ending = transitions.fail(row, error="boom", entry=ENTRY, fingerprint="f" * 32, logs=[["a line"]])
    assert finish(ending, now=at) == {row.pk: Status.ERROR}
    found = stored(row)
    expected = {"status": "error", "completed_at": at, "active_key": None, "error": "boom", "attempt": 1}
    expected |= {"errors": [{"message": "the first"}, ENTRY], "fingerprint": "f" * 32, "logs": [["a line"]]}
    assert {name: found[name] for name in expected} == expected


def test_the_history_keeps_the_newest_twenty_errors(now: datetime) -> None:
    row = running(now, errors=[{"n": n} for n in range(25)])
    finish(transitions.fail(row, error="boom", entry={"n": 25}), now=now)
    assert [entry["n"] for entry in stored(row)["errors"]] == list(range(6, 26))


def test_a_retry_with_backoff_is_scheduled_and_its_attempt_counts(now: datetime) -> None:
    row = running(now, key="K")
    at, due = now + timedelta(seconds=2), now + timedelta(seconds=60)
    assert finish(transitions.reschedule(row, at=due, error="boom", entry=ENTRY), now=at) == {row.pk: Status.SCHEDULED}
    found = stored(row)
    expected = {"status": "scheduled", "scheduled_at": due, "attempt": 1, "run_no": 1, "completed_at": None}
    expected |= {"active_key": row.active_key, "error": "boom", "errors": [ENTRY], "updated_at": at, "hinted_at": at}
    assert {name: found[name] for name in expected} == expected


def test_a_handler_that_reschedules_itself_gets_its_attempt_back(now: datetime) -> None:
    row = running(now, error="an earlier fault", errors=[ENTRY])
    finish(transitions.reschedule(row, at=now + timedelta(seconds=60), refund=True), now=now)
    found = stored(row)
    assert (found["status"], found["attempt"], found["run_no"]) == ("scheduled", 0, 1)
    assert (found["error"], found["errors"]) == ("an earlier fault", [ENTRY])


def test_a_released_row_is_pending_with_its_attempt_given_back(now: datetime) -> None:
    row = running(now, key="K", attempt=2)
    at = now + timedelta(seconds=2)
    assert finish(transitions.release(row), now=at) == {row.pk: Status.PENDING}
    found = stored(row)
    expected = {"status": "pending", "attempt": 1, "run_no": 2, "completed_at": None, "hinted_at": at}
    expected |= {"active_key": row.active_key, "scheduled_at": row.scheduled_at}
    assert {name: found[name] for name in expected} == expected


def test_what_a_run_does_not_say_stays_as_it_was(now: datetime) -> None:
    row = running(now, logs=[["before"]], progress={"done": 3}, fingerprint="f" * 32, result={"old": 1})
    finish(transitions.release(row), now=now)
    found = stored(row)
    assert (found["logs"], found["progress"], found["fingerprint"]) == ([["before"]], {"done": 3}, "f" * 32)
    assert found["result"] is None


@pytest.mark.parametrize("verb", ["fail", "reschedule", "release", "abort", "rescue", "bury"])
def test_a_cancel_mark_decides_where_a_row_goes(verb: str, now: datetime) -> None:
    row = running(now, key="K")
    assert transitions.mark_cancel(only(row), now=now, by="7", by_name="Ada") == 1
    at = now + timedelta(seconds=2)
    # The run knows nothing of the mark: `row` was read before it was made.
    assert VERBS[verb](row, at) == 1
    found = stored(row)
    expected = {"status": "cancelled", "completed_at": at, "active_key": None, "cancelled_by_name": "Ada"}
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("verb", ["fail", "reschedule", "release"])
def test_finish_says_that_a_mark_turned_the_ending(verb: str, now: datetime) -> None:
    marked, other = running(now), running(now)
    transitions.mark_cancel(only(marked), now=now, by="", by_name="")
    plain = ENDINGS[verb](other, now).status
    answer = finish(ENDINGS[verb](marked, now), ENDINGS[verb](other, now), now=now)
    assert answer == {marked.pk: Status.CANCELLED, other.pk: plain}


def test_a_mark_that_comes_too_late_does_not_undo_a_success(now: datetime) -> None:
    row = running(now)
    transitions.mark_cancel(only(row), now=now, by="7", by_name="Ada")
    assert finish(transitions.succeed(row), now=now) == {row.pk: Status.OK}
    assert stored(row)["status"] == "ok"


@pytest.mark.parametrize("verb", ENDINGS)
def test_an_older_run_changes_nothing(verb: str, now: datetime) -> None:
    """A worker that froze, was rescued and thaws holds a run_no that is no longer the row's."""
    row = running(now, run_no=1)
    JobExecution.objects.filter(pk=row.pk).update(run_no=2, attempt=2)
    before = stored(row)
    assert finish(ENDINGS[verb](row, now), now=now + timedelta(seconds=1)) == {}
    assert stored(row) == before


def test_a_batch_writes_exactly_the_rows_that_are_still_its_own(now: datetime) -> None:
    rows = {verb: running(now, key=verb) for verb in ENDINGS}
    lost = {verb: running(now) for verb in ENDINGS}
    ended, gone = running(now), running(now)
    finish(transitions.succeed(ended), now=now)
    only(gone).delete()
    only(*lost.values()).update(run_no=7)
    before = {verb: stored(row) for verb, row in lost.items()}
    at = now + timedelta(seconds=1)
    batch = [ENDINGS[verb](row, at) for verb, row in [*lost.items(), *rows.items()]]
    batch += [transitions.fail(ended, error="boom"), transitions.succeed(gone)]
    answer = finish(*batch, now=at)
    assert answer == {row.pk: ENDINGS[verb](row, at).status for verb, row in rows.items()}
    assert {verb: stored(row)["status"] for verb, row in rows.items()} == {
        verb: ENDINGS[verb](row, at).status for verb, row in rows.items()
    }
    assert {verb: stored(row) for verb, row in lost.items()} == before
    assert stored(ended)["status"] == "ok"
    assert_consistent()


@committed
def test_a_batch_with_lost_rows_is_written_outside_a_transaction_too(now: datetime) -> None:
    kept, lost = running(now), running(now)
    only(lost).update(run_no=7)
    assert finish(transitions.succeed(lost), transitions.succeed(kept), now=now) == {kept.pk: Status.OK}
    assert {stored(kept)["status"], stored(lost)["status"]} == {"ok", "running"}


def test_an_empty_batch_writes_nothing(now: datetime) -> None:
    assert finish(now=now) == {}


def test_dropped_rows_are_deleted(now: datetime) -> None:
    rows = [running(now), running(now, run_no=5)]
    stays = running(now)
    batch = [transitions.succeed(row, drop=True) for row in rows]
    assert finish(*batch, transitions.succeed(stays), now=now) == dict.fromkeys(
        [row.pk for row in [*rows, stays]], Status.OK
    )
    assert list(JobExecution.objects.values_list("pk", flat=True)) == [stays.pk]


def test_a_failure_that_would_be_dropped_ends_cancelled_when_it_is_marked(now: datetime) -> None:
    plain, marked, lost = (running(now) for _ in range(3))
    JobExecution.objects.filter(pk=marked.pk).update(cancel_requested_at=now)
    JobExecution.objects.filter(pk=lost.pk).update(run_no=lost.run_no + 1)
    batch = [transitions.fail(row, error="E: x", drop=True) for row in (plain, marked, lost)]
    assert finish(*batch, now=now) == {plain.pk: Status.ERROR, marked.pk: Status.CANCELLED}
    assert set(JobExecution.objects.values_list("pk", "status")) == {
        (marked.pk, Status.CANCELLED),
        (lost.pk, Status.RUNNING),
    }


def test_a_dropped_row_is_deleted_only_by_its_own_run(now: datetime) -> None:
    mine, newer, ended = running(now), running(now), running(now)
    batch = [transitions.succeed(row, drop=True) for row in (mine, newer, ended)]
    only(newer).update(run_no=2)
    finish(transitions.fail(ended, error="boom"), now=now)
    assert finish(*batch, now=now) == {mine.pk: Status.OK}
    assert set(JobExecution.objects.values_list("pk", flat=True)) == {newer.pk, ended.pk}


# Waiting rows


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


# Cancel and retry


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
        moved = transitions.rescue(only(row), now=now, describe=describe)
        assert moved == ([row.pk] if runs < attempts else [])
    assert runs == attempts
    assert transitions.bury(only(row), now=now, describe=describe) == [row.pk]
    assert stored(row)["status"] == "error"


# Rescue


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


# Contention


def collision() -> OperationalError:
    """Return the error with which this engine gives up on a statement because of another one."""
    if connection.vendor == "sqlite":
        cause: Exception = sqlite3.OperationalError("database is locked")
        cause.sqlite_errorcode = sqlite3.SQLITE_BUSY  # type: ignore[attr-defined]
    elif connection.vendor == "postgresql":
        from psycopg import errors

        cause = errors.DeadlockDetected("deadlock detected")
    else:
        import pymysql

        cause = pymysql.err.OperationalError(1213, "Deadlock found when trying to get lock")
    error = OperationalError(*cause.args)
    error.__cause__ = cause
    return error


@contextmanager
def colliding(times: int, when: str) -> Iterator[list[str]]:
    """Let the first statements that begin with `when` collide with others; collect those statements."""
    seen: list[str] = []

    def wrapper(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if sql.lstrip().startswith(when):
            seen.append(sql)
            if len(seen) <= times:
                raise collision()
        return execute(sql, params, many, context)

    with connection.execute_wrapper(wrapper):
        yield seen


@committed
def test_a_claim_that_collides_is_repeated(now: datetime, worker: Worker) -> None:
    row = JobExecutionFactory(now=now)
    with colliding(2, "UPDATE") as seen:
        (claimed,) = claim(worker, now)
    assert (claimed.pk, claimed.run_no, len(seen)) == (row.pk, 1, 3)
    assert (stored(row)["run_no"], stored(row)["attempt"]) == (1, 1)


@committed
@pytest.mark.medium
def test_every_other_verb_that_collides_is_repeated_too(now: datetime) -> None:
    for verb in sorted(set(VERBS) - {"claim"}):
        row = ready_for(verb, now)
        with colliding(2, "UPDATE") as seen:
            assert VERBS[verb](row, now) == 1, verb
        assert len(seen) == 3, verb


@committed
def test_a_rescue_that_collides_still_names_the_rows_it_moved_before(now: datetime) -> None:
    rows = [running(now), running(now), running(now)]
    seen = []

    def wrapper(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if sql.startswith("UPDATE"):
            seen.append(sql)
            if len(seen) == 3:
                raise collision()
        return execute(sql, params, many, context)

    with connection.execute_wrapper(wrapper):
        moved = transitions.rescue(only(*rows), now=now, describe=describe)
    assert sorted(moved) == sorted(row.pk for row in rows)
    assert {row["rescues"] for row in JobExecution.objects.values("rescues")} == {1}


@committed
def test_a_verb_that_always_collides_gives_up_in_the_end(now: datetime, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(contention, "time", SimpleNamespace(sleep=pauses.append))
    row = JobExecutionFactory(now=now)
    with colliding(99, "UPDATE") as seen, pytest.raises(OperationalError):
        transitions.park(only(row), "paused", now=now)
    assert (len(seen), len(pauses)) == (contention.TRIES, contention.TRIES - 1)


@committed
def test_nothing_is_repeated_inside_a_callers_transaction(now: datetime) -> None:
    for verb in ("cancel", "release", "rescue"):
        row = JobExecutionFactory(now=now, status=min(TRANSITIONS[verb].sources), max_attempts=3)
        with colliding(99, "UPDATE") as seen, pytest.raises(OperationalError), transaction.atomic():
            VERBS[verb](row, now)
        assert len(seen) == 1, verb


@committed
@pytest.mark.postgres
@pytest.mark.mysql
def test_a_batch_survives_a_real_deadlock(now: datetime) -> None:
    first, second = running(now), running(now)
    holding, may_go_on = threading.Event(), threading.Event()

    def other() -> str:
        try:
            with transaction.atomic():
                only(second).update(hinted_at=now)
                holding.set()
                assert may_go_on.wait(20)
                only(first).update(hinted_at=now)
        except OperationalError as error:
            return "victim" if contention.is_contention(error) else repr(error)
        return "survivor"

    def batch() -> Any:
        assert holding.wait(20)
        return finish(transitions.succeed(first), transitions.succeed(second), now=now)

    def watch() -> None:
        assert holding.wait(20)
        # The batch has written the first row and waits for the second.
        wait_for(lambda: not _lockable(first), 20, "the batch holds the first row")
        may_go_on.set()

    fate, answer, _ = at_once(other, batch, watch)
    assert fate in {"victim", "survivor"}
    assert answer == {first.pk: Status.OK, second.pk: Status.OK}
    assert set(JobExecution.objects.values_list("status", flat=True)) == {"ok"}


def _lockable(row: JobExecution) -> bool:
    with transaction.atomic():
        return only(row).select_for_update(skip_locked=True).exists()


def test_final_rows_are_never_claimed_whatever_the_clock_says(now: datetime, worker: Worker) -> None:
    for status in FINAL:
        JobExecutionFactory(now=now, status=status)
    assert claim(worker, now + timedelta(seconds=40)) == []
    assert claim(worker, now - timedelta(days=1)) == []


@committed
def test_verbs_leave_no_transaction_open(now: datetime, worker: Worker) -> None:
    JobExecutionFactory(now=now)
    (row,) = claim(worker, now)
    finish(transitions.succeed(row), now=now)
    assert connections["default"].get_autocommit() and not connections["default"].in_atomic_block
