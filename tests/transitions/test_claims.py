"""Which rows a claim takes, and what it writes."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from django_jobs import transitions
from django_jobs.fields import uuid7
from django_jobs.models import JobExecution, Worker
from django_jobs.querysets import key_digest
from tests.cases.copies import analyze
from tests.factories import JobExecutionFactory, WorkerFactory
from tests.support import assert_consistent
from tests.threads import in_thread, race
from tests.verbs import ENTRY, claim, only, stored

pytestmark = pytest.mark.django_db

committed = pytest.mark.django_db(transaction=True)


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
        pytest.param({"heartbeat_at": 45}, id="not heard since the clock was set back"),
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

    shares = race(*(lambda worker=worker: take_all(worker) for worker in workers))  # type: ignore[misc]
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


@committed
@pytest.mark.postgres
@pytest.mark.mysql
def test_a_claim_holds_no_rows_beyond_its_limit(now: datetime, worker: Worker) -> None:
    # So few that MySQL, once it knows, would sort them, and lock what it sorts.
    rows = JobExecutionFactory.build_batch(30, now=now)
    transitions.insert(rows, now=now, using="default")
    analyze()
    with transaction.atomic():
        own = claim(worker, now, limit=5)
        others = in_thread(lambda: claim(worker, now, limit=25))
    assert len(own) == 5
    assert {row.pk for row in [*own, *others]} == {row.pk for row in rows}
