"""Cancel and retry many executions at once."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from django.db import transaction

from django_jobs import Status, job, services, signals, transitions
from django_jobs.models import JobExecution
from django_jobs.services import bulk
from tests.acc import jobs
from tests.dispatchers.recording import RecordingDispatcher
from tests.factories import JobExecutionFactory, WorkerFactory

ALL = JobExecution.objects.all


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "PAGE", 3)


@pytest.mark.django_db
@pytest.mark.usefixtures("small_pages")
def test_everything_live_is_cancelled_and_the_rest_is_told_why(recorder: RecordingDispatcher) -> None:
    worker = WorkerFactory()
    waiting = [*JobExecutionFactory.create_batch(4, pending=True), JobExecutionFactory(scheduled=True)]
    running = JobExecutionFactory.create_batch(2, running=True, worker=worker)
    finished = [JobExecutionFactory(ok=True), JobExecutionFactory(failed=True)]
    with mock.patch.object(bulk, "after_commit", lambda connection, action: action()):
        report = services.cancel_many(ALL(), by="ada")
    assert report.done == 7
    assert {(row.pk, why.partition(": ")[2]) for row, why in report.skipped} == {
        (finished[0].pk, "it is already ok."),
        (finished[1].pk, "it is already error."),
    }
    assert set(ALL().filter(status=Status.CANCELLED, cancelled_by="ada")) == set(waiting)
    assert all(row.is_cancelling for row in ALL().filter(pk__in=[row.pk for row in running]))
    assert sorted(recorder.cancels) == sorted(row.pk for row in running)


@pytest.mark.django_db
def test_a_row_that_moved_between_the_two_statements_is_cancelled_too() -> None:
    row = JobExecutionFactory(pending=True)
    real, calls = transitions.cancel, []

    def too_early(queryset: Any, **kwargs: Any) -> int:
        calls.append(kwargs)
        return 0 if len(calls) == 1 else real(queryset, **kwargs)

    with mock.patch.object(transitions, "cancel", too_early):
        report = services.cancel_many(ALL())
    assert (report.done, report.skipped) == (1, [])
    row.refresh_from_db()
    assert row.status == Status.CANCELLED


@pytest.mark.django_db(transaction=True)
def test_each_cancelled_row_is_told_to_the_receivers_after_the_commit() -> None:
    seen: list[JobExecution] = []

    def receive(execution: JobExecution, **kwargs: Any) -> None:
        seen.append(execution)

    rows = JobExecutionFactory.create_batch(3, pending=True)
    signals.job_cancelled.connect(receive)
    try:
        with transaction.atomic():
            services.cancel_many(ALL())
            assert seen == []
    finally:
        signals.job_cancelled.disconnect(receive)
    assert sorted(row.pk for row in seen) == sorted(row.pk for row in rows)
    assert {row.status for row in seen} == {Status.CANCELLED}


@pytest.mark.django_db
@pytest.mark.usefixtures("own_jobs")
def test_rows_that_their_job_does_not_keep_are_dropped() -> None:
    @job(name="own.fleeting", record="none")
    def fleeting() -> None: ...

    fleeting.push_many([{}, {}])
    assert services.cancel_many(ALL()).done == 2
    assert not ALL().exists()


@pytest.mark.django_db
@pytest.mark.usefixtures("small_pages")
def test_a_few_statements_serve_a_whole_page(django_assert_max_num_queries: Any) -> None:
    JobExecutionFactory.create_batch(3, pending=True)
    # The newest key, the page and the empty one after it, two verbs and what came of them.
    with django_assert_max_num_queries(6):
        assert services.cancel_many(ALL()).done == 3
    # Retrying: the same with one verb.
    with django_assert_max_num_queries(5):
        assert services.retry_many(ALL()).done == 3


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("small_pages")
def test_rows_are_retried_with_the_budget_of_each_job_and_hinted_together(recorder: RecordingDispatcher) -> None:
    plain = JobExecutionFactory.create_batch(2, failed=True)
    patient = JobExecutionFactory(cancelled=True, job_name="acc.mark_retry", attempt=3, max_attempts=3)
    live = JobExecutionFactory(pending=True)
    report = services.retry_many(ALL(), by="ada")
    assert report.done == 3
    assert [row for row, _why in report.skipped] == [live]
    patient.refresh_from_db()
    assert (patient.status, patient.max_attempts, patient.retried_by) == (Status.PENDING, 6, "ada")
    hinted = [pk for _queue, ids, _priority in recorder.hints for pk in ids]
    assert sorted(hinted) == sorted([plain[0].pk, plain[1].pk, patient.pk])


@pytest.mark.django_db
def test_keyed_rows_are_retried_one_by_one_and_a_conflict_stops_none_of_the_others() -> None:
    """A bulk retry with taken keys goes on with the others and says which row is in the way.

    Fault: retrying an old unique job while a newer twin was active gave a 500 (riverqueue/riverui#622).
    """
    first = JobExecutionFactory(failed=True, key="free")
    beside = JobExecutionFactory(failed=True, key="held")
    twins = JobExecutionFactory.create_batch(2, failed=True, key="twice")
    last = JobExecutionFactory(failed=True)
    holder = jobs.mark.using(key="held").push()
    report = services.retry_many(ALL().filter(status=Status.ERROR))
    assert report.done == 3
    why = {row.pk: reason for row, reason in report.skipped}
    assert set(why) == {beside.pk, twins[1].pk}
    assert str(holder.pk) in why[beside.pk]
    assert str(twins[0].pk) in why[twins[1].pk]
    pending = ALL().filter(status=Status.PENDING)
    assert set(pending) == {first, twins[0], last, holder}


@pytest.mark.django_db
def test_rows_of_unknown_jobs_are_skipped_with_the_reason() -> None:
    row = JobExecutionFactory(failed=True, job_name="gone.job")
    known = JobExecutionFactory(failed=True)
    report = services.retry_many(ALL())
    assert report.done == 1
    assert [(skipped, "no job is called 'gone.job'" in why) for skipped, why in report.skipped] == [(row, True)]
    known.refresh_from_db()
    assert known.status == Status.PENDING


@pytest.mark.django_db
def test_a_row_that_ran_to_its_end_and_was_dropped_meanwhile_counts_as_done() -> None:
    quick, refused = JobExecutionFactory(failed=True), JobExecutionFactory(pending=True)
    real = transitions.retry

    def and_run(queryset: Any, **kwargs: Any) -> int:
        moved = real(queryset, **kwargs)
        ALL().filter(pk=quick.pk).delete()
        return moved

    with mock.patch.object(transitions, "retry", and_run):
        report = services.retry_many(ALL())
    assert report.done == 1
    assert [row for row, _why in report.skipped] == [refused]


@pytest.mark.django_db
@pytest.mark.parametrize("operation", [services.cancel_many, services.retry_many])
def test_an_empty_set_is_no_work(operation: Any) -> None:
    report = operation(ALL())
    assert (report.done, report.skipped) == (0, [])
