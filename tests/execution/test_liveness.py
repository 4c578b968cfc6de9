"""The Worker row of a process, and the watch over the rows it owns."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from django.db import DataError, OperationalError, connection

from django_jobs import JobContext, clock
from django_jobs.execution.endings import UNSTORABLE
from django_jobs.execution.liveness import Liveness, Watch
from django_jobs.execution.run import Run
from django_jobs.models import JobExecution, Worker
from django_jobs.querysets import ExecutionQuerySet
from django_jobs.states import Status
from tests.execution.test_finisher import ended_run
from tests.factories import JobExecutionFactory
from tests.runtime.support import held
from tests.test_contention import BUSY
from tests.threads import in_thread

pytestmark = pytest.mark.django_db(transaction=True)


class Runs:
    """What the watch sees of a pool."""

    def __init__(self, *runs: Run) -> None:
        self.by_id = {run.execution.pk: run for run in runs}
        self.cancelled: list[Run] = []
        self.dropped: list[Run] = []
        self.given_up: set[UUID] = set()

    def running(self) -> dict[UUID, Run]:
        return self.by_id

    def owned(self) -> list[UUID]:
        return list(self.by_id)

    def unstored(self) -> set[UUID]:
        return self.given_up

    def cancel(self, run: Run) -> None:
        self.cancelled.append(run)

    def lost(self, run: Run) -> None:
        self.dropped.append(run)


@pytest.fixture
def liveness() -> Liveness:
    liveness = Liveness(roles=["worker"], queues=None, names=["acc.mark"], slots=2, using="default")
    liveness.register()
    return liveness


def owned_by(liveness: Liveness) -> JobExecution:
    row: JobExecution = JobExecutionFactory(running=True, max_attempts=3)
    JobExecution.objects.filter(pk=row.pk).update(worker_id=liveness.worker_id)
    row.refresh_from_db()
    return row


def test_a_beat_keeps_the_row_fresh_and_clears_suspicion(liveness: Liveness) -> None:
    old = clock.now("default") - timedelta(hours=1)
    Worker.objects.update(heartbeat_at=old, suspected_at=old)
    liveness.tick()
    row = Worker.objects.get()
    assert row.heartbeat_at > old
    assert row.suspected_at is None
    assert row.memory and row.memory > 1_000_000


def test_a_beat_that_collides_with_another_write_is_repeated(liveness: Liveness) -> None:
    """It failed where others held the one lock of SQLite for longer than its time limit."""
    old = clock.now("default") - timedelta(hours=1)
    Worker.objects.update(heartbeat_at=old)
    collisions = [BUSY]

    def collide(execute: Any, sql: str, *rest: Any) -> Any:
        if sql.startswith("UPDATE") and collisions:
            raise collisions.pop()
        return execute(sql, *rest)

    with connection.execute_wrapper(collide):
        liveness.tick()
    assert not collisions
    assert Worker.objects.get().heartbeat_at > old


@pytest.mark.parametrize("fate", ["deleted", "stopped"])
def test_a_beat_that_updates_nothing_drops_all_ownership_and_registers_anew(fate: str, liveness: Liveness) -> None:
    dropped: list[bool] = []
    liveness.on_lost = lambda: dropped.append(True)
    first = liveness.worker_id
    if fate == "deleted":
        Worker.objects.all().delete()
    else:
        liveness.retire("declared dead")
    liveness.tick()
    assert dropped == [True]
    assert liveness.worker_id != first
    assert Worker.objects.get(stopped_at=None).pk == liveness.worker_id


def test_a_boot_always_has_a_new_id(liveness: Liveness) -> None:
    again = Liveness(roles=["worker"], queues=None, names=[], slots=1, using="default")
    again.register()
    assert Worker.objects.count() == 2


def test_the_watch_carries_a_cancel_mark_to_the_run(liveness: Liveness) -> None:
    marked, other = ended_run(row=owned_by(liveness)), ended_run(row=owned_by(liveness))
    JobExecution.objects.filter(pk=marked.execution.pk).update(cancel_requested_at=clock.now("default"))
    runs = Runs(marked, other)
    Watch(liveness, runs).tick()
    assert runs.cancelled == [marked]
    assert runs.dropped == []


@pytest.mark.parametrize("change", [{"run_no": 99}, {"status": Status.PENDING}, "deleted"])
def test_the_watch_finds_runs_whose_row_is_somebody_elses(liveness: Liveness, change: object) -> None:
    run = ended_run(row=owned_by(liveness))
    row = JobExecution.objects.filter(pk=run.execution.pk)
    if isinstance(change, dict):
        row.update(**change)
    else:
        row.delete()
    runs = Runs(run)
    Watch(liveness, runs).tick()
    assert runs.dropped == [run]


def test_a_run_that_ended_while_the_watch_looked_is_not_told_of_its_row(
    liveness: Liveness, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ended_run(row=owned_by(liveness))
    JobExecution.objects.all().delete()
    runs = Runs(run)
    answers = iter([{run.execution.pk: run}, {}])
    monkeypatch.setattr(runs, "running", lambda: next(answers))
    Watch(liveness, runs).tick()
    assert runs.dropped == []


def test_progress_of_a_row_that_is_somebody_elses_is_not_written(liveness: Liveness) -> None:
    run = reporting(ended_run(row=owned_by(liveness)), 1)
    JobExecution.objects.update(run_no=99)
    Watch(liveness, Runs(run)).tick()
    assert JobExecution.objects.get().progress is None


def test_progress_that_collides_with_another_write_is_tried_again(
    liveness: Liveness, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(liveness, Runs(reporting(ended_run(row=owned_by(liveness)), 1)))
    update, collisions = ExecutionQuerySet.update, [BUSY]

    def collide(rows: Any, **values: Any) -> int:
        if collisions:
            raise collisions.pop()
        return update(rows, **values)

    monkeypatch.setattr(ExecutionQuerySet, "update", collide)
    with pytest.raises(OperationalError):
        watch.tick()
    watch.tick()
    assert JobExecution.objects.get().progress is not None


def test_the_watch_writes_progress_once_for_each_report(liveness: Liveness) -> None:
    run = ended_run(row=owned_by(liveness))
    run.job_context = JobContext.detached("acc.mark", {})
    run.job_context.reported = {"done": 1, "total": 3, "note": "é"}
    watch = Watch(liveness, Runs(run))
    watch.tick()
    stored = JobExecution.objects.get(pk=run.execution.pk)
    assert stored.progress == {"done": 1, "total": 3, "note": "é"}
    JobExecution.objects.update(progress=None)
    watch.tick()
    assert JobExecution.objects.get(pk=run.execution.pk).progress is None


def reporting(run: Run, done: int) -> Run:
    """Have a run report how far it is."""
    run.job_context = run.job_context or JobContext.detached("acc.mark", {})
    run.job_context.reported = {"done": done, "total": 3, "note": ""}
    return run


@pytest.mark.postgres
@pytest.mark.mysql
def test_a_row_that_another_transaction_holds_keeps_no_other_from_its_progress_and_has_its_turn_later(
    liveness: Liveness,
) -> None:
    late, other = (reporting(ended_run(row=owned_by(liveness)), 1) for _ in range(2))
    watch = Watch(liveness, Runs(late, other))
    with held(late.execution):
        in_thread(watch.tick)
        assert JobExecution.objects.get(pk=other.execution.pk).progress is not None
    assert JobExecution.objects.get(pk=late.execution.pk).progress is None
    watch.tick()
    assert JobExecution.objects.get(pk=late.execution.pk).progress is not None


def test_a_progress_that_the_database_refuses_costs_the_others_nothing(
    liveness: Liveness, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [reporting(ended_run(row=owned_by(liveness)), done) for done in range(3)]
    watch, update = Watch(liveness, Runs(*runs)), ExecutionQuerySet.update

    def refusing(rows: Any, **values: Any) -> int:
        if values["progress"]["done"] == 1:
            raise DataError("poison")
        return update(rows, **values)

    monkeypatch.setattr(ExecutionQuerySet, "update", refusing)
    with pytest.raises(DataError):
        watch.tick()
    watch.tick()
    stored = dict(JobExecution.objects.values_list("pk", "progress"))
    assert [stored[run.execution.pk] is None for run in runs] == [False, True, False]


@pytest.mark.postgres
@pytest.mark.mysql
def test_a_stray_that_another_transaction_holds_has_its_turn_later(liveness: Liveness) -> None:
    (stray, *others), watch = [owned_by(liveness) for _ in range(6)], Watch(liveness, Runs())
    moments = [clock.now("default") + timedelta(seconds=11 * look) for look in range(4)]
    watch.tick(now=moments[0])
    with held(stray):
        in_thread(lambda: watch.tick(now=moments[1]))
        assert JobExecution.objects.pending().count() == len(others)
    for moment in moments[2:]:
        watch.tick(now=moment)
    stray.refresh_from_db()
    assert stray.status == Status.PENDING


def test_a_row_nobody_here_knows_is_handed_back_after_two_looks(liveness: Liveness) -> None:
    stray, known = owned_by(liveness), owned_by(liveness)
    watch = Watch(liveness, Runs(ended_run(row=known)))
    now = clock.now("default")
    watch.tick(now=now)
    stray.refresh_from_db()
    assert stray.status == Status.RUNNING
    watch.tick(now=now + timedelta(seconds=11))
    stray.refresh_from_db()
    known.refresh_from_db()
    assert (stray.status, stray.attempt) == (Status.PENDING, 0)
    assert known.status == Status.RUNNING


def test_a_row_that_was_claimed_anew_between_two_looks_was_seen_once(liveness: Liveness) -> None:
    """Its reply may be on its way."""
    stray, watch = owned_by(liveness), Watch(liveness, Runs())
    now = clock.now("default")
    for look, status in enumerate([Status.RUNNING, Status.RUNNING, Status.PENDING]):
        watch.tick(now=now + timedelta(seconds=11 * look))
        stray.refresh_from_db()
        assert stray.status == status
        if look == 0:
            JobExecution.objects.update(run_no=stray.run_no + 1)


def test_a_stray_is_handed_back_also_when_the_clock_was_set_back(liveness: Liveness) -> None:
    stray, watch = owned_by(liveness), Watch(liveness, Runs())
    now = clock.now("default")
    watch.tick(now=now)
    before = now - timedelta(hours=1)
    # The look before counts no more: nobody knows how long ago it was.
    for seconds, status in ((0, Status.RUNNING), (11, Status.RUNNING), (22, Status.PENDING)):
        watch.tick(now=before + timedelta(seconds=seconds))
        stray.refresh_from_db()
        assert stray.status == status


def test_a_row_whose_end_could_not_be_stored_ends_with_an_error_and_is_not_started_again(liveness: Liveness) -> None:
    row = owned_by(liveness)
    runs = Runs()
    runs.given_up.add(row.pk)
    watch = Watch(liveness, runs)
    now = clock.now("default")
    watch.tick(now=now)
    watch.tick(now=now + timedelta(seconds=11))
    row.refresh_from_db()
    assert (row.status, row.error) == (Status.ERROR, UNSTORABLE)


def test_a_retired_worker_is_nobodys_hope(liveness: Liveness) -> None:
    liveness.retire("shutdown")
    row = Worker.objects.get()
    assert (row.stop_reason, row.stopped_at is not None) == ("shutdown", True)
    assert not Worker.objects.fresh(clock.now("default")).exists()
