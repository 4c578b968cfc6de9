"""What the factories make is what the verbs would have left behind; the tests of everything else rest on it."""

from __future__ import annotations

import pytest

from django_jobs.models import JobExecution, Worker
from django_jobs.querysets import key_digest
from django_jobs.states import FINAL, Status
from tests.factories import JobExecutionFactory, JobStateFactory, QueueStateFactory, WorkerFactory
from tests.support import assert_consistent

pytestmark = pytest.mark.django_db

TRAITS = {
    "pending": Status.PENDING,
    "scheduled": Status.SCHEDULED,
    "parked": Status.SCHEDULED,
    "running": Status.RUNNING,
    "ok": Status.OK,
    "failed": Status.ERROR,
    "cancelled": Status.CANCELLED,
}


@pytest.mark.parametrize(("trait", "status"), TRAITS.items())
def test_a_trait_makes_a_consistent_row(trait: str, status: Status) -> None:
    row = JobExecutionFactory(**{trait: True}, key="k", priority=50)
    row.refresh_from_db()
    assert (row.status, row.rank) == (status, -50)
    assert row.key_digest == key_digest(None, "k")
    assert row.active_key == (None if status in FINAL else row.key_digest)
    assert_consistent()


def test_rows_without_a_key_hold_none() -> None:
    assert {row.active_key for row in JobExecutionFactory.create_batch(2)} == {None}


def test_a_running_row_has_a_live_worker_or_the_one_given() -> None:
    worker = WorkerFactory()
    assert JobExecutionFactory(running=True, worker=worker).worker_id == worker.pk
    assert JobExecutionFactory(running=True).worker_id != worker.pk
    owners = set(JobExecution.objects.running().values_list("worker_id", flat=True))
    assert owners == set(Worker.objects.values_list("pk", flat=True))


def test_only_live_workers_are_fresh() -> None:
    live, _dead, _stopped = WorkerFactory(), WorkerFactory(dead=True), WorkerFactory(stopped=True)
    assert set(Worker.objects.fresh(live.heartbeat_at)) == {live}


def test_a_pause_is_a_time() -> None:
    assert JobStateFactory(paused=True).paused_at is not None
    assert QueueStateFactory().paused_at is None
