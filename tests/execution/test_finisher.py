"""How ended runs are written: batches, fences, faults of the database."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import pytest
from django.db import DataError, InternalError, OperationalError, connection, transaction
from django.db.backends.signals import connection_created

from django_jobs import JobContext, Keep, clock, registry, transitions
from django_jobs.definition import job
from django_jobs.execution import finisher as finisher_module
from django_jobs.execution import writer as writer_module
from django_jobs.execution.atomic import write_inside
from django_jobs.execution.endings import UNSTORABLE
from django_jobs.execution.finisher import Finisher
from django_jobs.execution.held import PAUSE, Held
from django_jobs.execution.outcomes import Failed, Ok, Outcome, Rescheduled
from django_jobs.execution.run import Run
from django_jobs.models import JobExecution
from django_jobs.states import Status
from tests.factories import JobExecutionFactory
from tests.runtime.support import held
from tests.support import assert_consistent, wait_for
from tests.threads import in_thread

pytestmark = pytest.mark.django_db(transaction=True)


def ended_run(outcome: Outcome | None = None, row: JobExecution | None = None, **options: Any) -> Run:
    """A run of a running row that has just ended."""
    row = row or JobExecutionFactory(running=True, max_attempts=3)
    with registry.isolated():
        defined = job(name="tests.ended", **options)(lambda: None)
    run = Run(row, defined, worker="host.test pid 7")
    run.outcome = outcome or Ok()
    return run


def failure(delay: float | None = None, message: str = "ValueError: boom") -> Failed:
    return Failed(
        exception=ValueError("boom"),
        error={"exception": "ValueError", "message": "boom", "traceback": "…"},
        message=message,
        fingerprint="f" * 16,
        delay=delay,
    )


@contextmanager
def a_finisher(quiet: Callable[[], bool] = lambda: True) -> Iterator[tuple[Finisher, list[Any]]]:
    told: list[Any] = []
    finisher = Finisher(using="default", tell=told.extend, is_quiet=quiet)
    finisher.start()
    try:
        yield finisher, told
    finally:
        finisher.stop(10)


def write(*runs: Run) -> list[tuple[Run, str]]:
    """Have the runs written as one batch and return what was told of them."""
    with a_finisher(quiet=lambda: False) as (finisher, told):
        for run in runs:
            finisher.put(run)
        assert finisher.stop(10)
    return [(run, status) for run, status, _ in told]


def test_each_outcome_becomes_its_status() -> None:
    ok, failed, retried, parked = (
        ended_run(Ok(result=[1])),
        ended_run(failure()),
        ended_run(failure(delay=60)),
        ended_run(Rescheduled(delay=60)),
    )
    told = write(ok, failed, retried, parked)
    assert [status for _, status in told] == [Status.OK, Status.ERROR, Status.SCHEDULED, Status.SCHEDULED]
    for run, status in told:
        stored = JobExecution.objects.get(pk=run.execution.pk)
        assert stored.status == status
    assert JobExecution.objects.get(pk=retried.execution.pk).attempt == 1
    assert JobExecution.objects.get(pk=parked.execution.pk).attempt == 0
    assert_consistent()


def test_a_full_batch_is_one_transaction(django_assert_num_queries: Any) -> None:
    commits: list[str] = []
    runs = [ended_run(keep=Keep(ok=0)) for _ in range(20)]

    def watch(execute: Any, statement: str, *rest: Any) -> Any:
        commits.append(statement.split(maxsplit=1)[0])
        return execute(statement, *rest)

    original = transitions.finish

    def watched(*args: Any, **kwargs: Any) -> Any:
        with connection.execute_wrapper(watch):
            return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transitions, "finish", watched)
        write(*runs)
    assert [word for word in commits if word in {"DELETE", "UPDATE"}] == ["DELETE"]
    assert not JobExecution.objects.exists()


def test_a_run_that_lost_its_row_changes_nothing_and_is_not_told() -> None:
    mine, lost = ended_run(), ended_run()
    JobExecution.objects.filter(pk=lost.execution.pk).update(run_no=lost.execution.run_no + 1)
    assert [run for run, _ in write(mine, lost)] == [mine]
    assert JobExecution.objects.get(pk=lost.execution.pk).status == Status.RUNNING


def test_a_row_the_database_refuses_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [ended_run() for _ in range(8)]
    poison = runs[5]
    original = transitions.finish

    def refusing(endings: Any, **kwargs: Any) -> Any:
        if any(ending.execution_id == poison.execution.pk and ending.logs is not None for ending in endings):
            raise DataError("value too long")
        return original(endings, **kwargs)

    monkeypatch.setattr(transitions, "finish", refusing)
    told = write(*runs)
    assert {run.execution.pk for run, _ in told} == {run.execution.pk for run in runs}
    assert set(JobExecution.objects.values_list("status", flat=True)) == {Status.OK}


def test_a_lone_row_that_cannot_be_stored_at_all_ends_with_a_fixed_text(monkeypatch: pytest.MonkeyPatch) -> None:
    run = ended_run(failure())
    original = transitions.finish

    def refusing(endings: Any, **kwargs: Any) -> Any:
        if any(ending.errors is not None for ending in endings):
            raise DataError("no such character")
        return original(endings, **kwargs)

    monkeypatch.setattr(transitions, "finish", refusing)
    write(run)
    stored = JobExecution.objects.get()
    assert (stored.status, stored.error) == (Status.ERROR, UNSTORABLE)


def test_an_outcome_that_no_form_of_can_be_stored_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch ends its row: handed back, it would run a second time."""
    run = ended_run()
    monkeypatch.setattr(writer_module.Writer, "_takes_the_plainest", lambda writer, run: True)
    monkeypatch.setattr(transitions, "finish", Mock(side_effect=DataError("no such character")))
    with a_finisher() as (finisher, told):
        finisher.put(run)
        wait_for(lambda: finisher.unstored == {run.execution.pk}, 20, "it is given up")
    assert told == []


@pytest.mark.postgres
def test_a_lone_row_that_was_refused_once_loses_nothing_of_its_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    """A statement that ran into the server's time limit, behind a table that was locked for a moment, is repeated."""
    run, calls = ended_run(), []
    run.capture.add(logging.makeLogRecord({"msg": "a line", "name": "shop", "levelname": "INFO"}))
    original = transitions.finish

    def too_slow(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            with transaction.atomic(), connection.cursor() as cursor:
                cursor.execute("SET LOCAL statement_timeout = 1")
                cursor.execute("SELECT pg_sleep(9)")
        return original(*args, **kwargs)

    monkeypatch.setattr(transitions, "finish", too_slow)
    assert [status for _, status in write(run)] == [Status.OK]
    assert [line["message"] for line in JobExecution.objects.get().logs] == ["a line"]


@pytest.mark.medium
def test_an_outage_delays_the_write_and_repeats_no_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    run, calls = ended_run(), []
    original = transitions.finish

    def away(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) < 3:
            connection.close()
            raise OperationalError("server closed the connection unexpectedly")
        return original(*args, **kwargs)

    monkeypatch.setattr(transitions, "finish", away)
    monkeypatch.setattr(writer_module, "is_connection_loss", lambda error, using: True)
    assert [status for _, status in write(run)] == [Status.OK]
    assert len(calls) == 3


@pytest.mark.medium
@pytest.mark.parametrize("text", ["cannot execute UPDATE in a read-only transaction", "a fault that nobody knows"])
def test_outcomes_wait_while_the_database_takes_no_writes_at_all(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """A server that is read-only after a failover refuses every row; none of them is the reason."""
    runs, calls = [ended_run(failure()), ended_run()], []
    original = transitions.finish

    def read_only(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) < 5:
            raise InternalError(text)
        return original(*args, **kwargs)

    monkeypatch.setattr(transitions, "finish", read_only)
    assert [status for _, status in write(*runs)] == [Status.ERROR, Status.OK]
    assert JobExecution.objects.get(status=Status.ERROR).error == "ValueError: boom"


@pytest.mark.sqlite
@pytest.mark.medium
def test_an_outcome_waits_as_it_is_while_the_database_has_no_space_left() -> None:
    """Fault: runs that had ended well got a fixed error, since a write that was rolled back went through."""
    run = ended_run()
    for _ in range(50):
        run.capture.add(logging.makeLogRecord({"msg": "x" * 2000, "name": "shop", "levelname": "INFO"}))
    with connection.cursor() as cursor:
        # No page is free.
        cursor.execute("VACUUM")
    is_full, opened = threading.Event(), []
    is_full.set()

    def bound(connection: Any, **kwargs: Any) -> None:
        opened.append(1)
        if is_full.is_set():
            with connection.cursor() as cursor:
                pages = cursor.execute("PRAGMA page_count").fetchone()[0]
                cursor.execute(f"PRAGMA max_page_count = {pages}")

    connection_created.connect(bound)
    try:
        with a_finisher() as (finisher, told):
            finisher.put(run)
            wait_for(lambda: len(opened) >= 4, 10, "it tried again and again")
            is_full.clear()
            wait_for(lambda: told, 10, "it was written")
    finally:
        connection_created.disconnect(bound)
    stored = JobExecution.objects.get()
    assert (stored.status, len(stored.logs)) == (Status.OK, 50)


def test_an_outcome_that_cannot_be_prepared_is_stored_without_its_detail() -> None:
    """A row left RUNNING would be handed back, and run a second time."""
    run = ended_run()
    run.job_context = JobContext.detached(run.job.name, {})
    run.progress = {"done": object()}
    assert [status for _, status in write(run)] == [Status.OK]
    assert JobExecution.objects.get().progress is None


def test_a_commit_whose_reply_was_lost_is_settled_by_reading_again(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, dropped, failed = ended_run(), ended_run(keep=Keep(ok=0)), ended_run(failure())
    original, calls = transitions.finish, []

    def committed_then_lost(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        moved = original(*args, **kwargs)
        if len(calls) == 1:
            raise OperationalError("server closed the connection unexpectedly")
        return moved

    monkeypatch.setattr(transitions, "finish", committed_then_lost)
    monkeypatch.setattr(writer_module, "is_connection_loss", lambda error, using: True)
    told = dict(write(kept, dropped, failed))
    assert told == {kept: Status.OK, dropped: Status.OK, failed: Status.ERROR}
    assert len(calls) == 2


def test_a_row_that_was_rescued_or_deleted_during_an_outage_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    rescued, deleted = ended_run(), ended_run()
    original, calls = transitions.finish, []

    def lost(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            JobExecution.objects.filter(pk=rescued.execution.pk).update(status=Status.PENDING)
            JobExecution.objects.filter(pk=deleted.execution.pk).delete()
            raise OperationalError("server closed the connection unexpectedly")
        return original(*args, **kwargs)

    monkeypatch.setattr(transitions, "finish", lost)
    monkeypatch.setattr(writer_module, "is_connection_loss", lambda error, using: True)
    assert write(rescued, deleted) == []
    assert len(calls) == 2


@pytest.mark.medium
def test_a_batch_goes_out_when_it_is_full_although_more_is_expected() -> None:
    with a_finisher(quiet=lambda: False) as (_finisher, told):
        for run in [ended_run() for _ in range(100)]:
            _finisher.put(run)
        wait_for(lambda: len(told) == 100, 10, "a full batch is written")


def atomic_run(**options: Any) -> Any:
    run = ended_run(**options)
    write_inside(run, "default")
    return run


def test_an_atomic_runs_end_is_in_its_own_transaction_and_can_be_found_again() -> None:
    run = atomic_run()
    assert run.finish_inside(Ok())
    assert run.settle()
    later = atomic_run()
    JobExecution.objects.filter(pk=later.execution.pk).update(run_no=later.execution.run_no + 1)
    assert not later.finish_inside(Ok())
    assert not later.settle()


def test_an_atomic_run_of_a_job_that_keeps_nothing_leaves_no_row() -> None:
    run = atomic_run(record="none")
    assert run.finish_inside(Ok())
    run.recorded = True
    assert [status for _, status in write(run)] == [Status.OK]
    assert not JobExecution.objects.exists()


def test_a_job_that_keeps_nothing_leaves_no_row_either_when_a_mark_turns_its_end_into_a_cancel() -> None:
    runs = [ended_run(outcome, record="none") for outcome in (failure(), failure(delay=60), Rescheduled(delay=60))]
    JobExecution.objects.update(cancel_requested_at=clock.now("default"))
    assert [status for _, status in write(*runs)] == [Status.CANCELLED] * 3
    assert not JobExecution.objects.exists()


def test_a_worker_claims_nothing_more_while_too_much_is_unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    original = transitions.finish

    def slow(*args: Any, **kwargs: Any) -> Any:
        release.wait(20)
        return original(*args, **kwargs)

    monkeypatch.setattr(finisher_module, "BACKLOG_MAX", 3)
    monkeypatch.setattr(transitions, "finish", slow)
    with a_finisher() as (finisher, told):
        for run in [ended_run() for _ in range(5)]:
            finisher.put(run)
        wait_for(lambda: finisher.is_congested, 20, "it is congested")
        release.set()
        wait_for(lambda: len(told) == 5, 10, "all are written")
        assert not finisher.is_congested


@pytest.mark.postgres
@pytest.mark.mysql
def test_a_row_that_another_transaction_holds_makes_no_other_outcome_wait() -> None:
    """An admin page that marks a run for cancel holds its row for as long as the request takes."""
    kept, dropped, failed, late = (
        ended_run(),
        ended_run(record="none"),
        ended_run(failure()),
        ended_run(failure(delay=60)),
    )
    with a_finisher() as (finisher, told):
        with held(late.execution):
            for run in (kept, dropped, late, failed):
                finisher.put(run)
            wait_for(lambda: len(told) == 3, 20, "the others are written")
            assert {run for run, _, _ in told} == {kept, dropped, failed}
            assert finisher.unwritten() == [late.execution.pk]
            assert not finisher.is_idle
        wait_for(lambda: finisher.is_idle, 20, "the held one is written as well")
    assert [(run, status) for run, status, _ in told[3:]] == [(late, Status.SCHEDULED)]
    assert_consistent()


@pytest.mark.postgres
@pytest.mark.mysql
@pytest.mark.parametrize("options", [{}, {"record": "none"}])
def test_a_row_that_is_marked_while_it_is_held_ends_as_the_mark_says(options: dict[str, Any]) -> None:
    run = ended_run(failure(), **options)
    with a_finisher() as (finisher, told):
        with held(run.execution, cancel_requested_at=clock.now("default")):
            finisher.put(run)
            wait_for(lambda: finisher._held.runs, 20, "it was passed over")
        wait_for(lambda: told, 20, "it is written")
    assert [status for _, status, _ in told] == [Status.CANCELLED]


@pytest.mark.postgres
@pytest.mark.mysql
def test_a_row_that_is_held_when_it_is_written_alone_waits_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    run, original = ended_run(), transitions.finish
    refusals = [DataError("value too long")]

    def refusing(*args: Any, **kwargs: Any) -> Any:
        if refusals:
            raise refusals.pop()
        return original(*args, **kwargs)

    monkeypatch.setattr(transitions, "finish", refusing)
    with a_finisher() as (finisher, told):
        with held(run.execution):
            finisher.put(run)
            wait_for(lambda: finisher._held.runs, 20, "it was passed over")
        wait_for(lambda: told, 20, "it is written")


def test_runs_whose_rows_stay_held_wait_ever_longer_and_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    waiting, run, pauses = Held(), ended_run(), []
    for _ in range(3):
        waiting.put([run])
        pauses.append(waiting.seconds_left() or 0.0)
        waiting.clear()
    assert pauses[0] <= PAUSE < pauses[1] <= 2 * PAUSE < pauses[2]
    assert len(caplog.messages) == 1


@pytest.mark.postgres
@pytest.mark.mysql
def test_a_row_that_is_taken_away_while_it_is_held_is_not_told() -> None:
    run = ended_run()
    with a_finisher() as (finisher, told):
        with held(run.execution, run_no=run.execution.run_no + 1):
            finisher.put(run)
            wait_for(lambda: finisher._held.runs, 20, "it was passed over")
        wait_for(lambda: finisher.is_idle, 20, "it is given up")
    assert told == []


@pytest.mark.postgres
@pytest.mark.mysql
def test_a_row_that_stays_held_makes_no_end_of_the_process_wait_longer_than_it_may() -> None:
    run, later = ended_run(), ended_run()
    with a_finisher() as (finisher, told), held(run.execution):
        finisher.put(run)
        wait_for(lambda: finisher._held.runs, 20, "it was passed over")
        finisher.put(later)
        started = time.monotonic()
        assert not finisher.stop(0.5)
        assert time.monotonic() - started < 10
        assert [run for run, _, _ in told] == [later]
        assert finisher.unwritten() == [run.execution.pk]


@pytest.mark.postgres
@pytest.mark.mysql
def test_an_atomic_runs_end_waits_for_who_holds_its_row() -> None:
    """Passed over, it would be taken for lost, and what the handler did rolled back."""
    run = atomic_run()
    with ThreadPoolExecutor(1) as pool, held(run.execution):
        recorded = pool.submit(in_thread, lambda: run.finish_inside(Ok()))
        with pytest.raises(TimeoutError):
            recorded.result(0.2)
    assert recorded.result()
