"""Cancel, retry, run a copy, start now and trigger: one execution at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import User
from django.db import transaction

from django_jobs import (
    AlreadyRunning,
    DefinitionError,
    InvalidPayload,
    Keep,
    KeyTaken,
    Retry,
    UnknownJob,
    WrongStatus,
    clock,
    job,
    registry,
    services,
    signals,
    transitions,
)
from django_jobs.fields import uuid7
from django_jobs.models import JobExecution
from django_jobs.services import keys, operations
from django_jobs.states import Status
from tests.acc import jobs
from tests.acc.models import Thing
from tests.dispatchers.recording import RecordingDispatcher
from tests.factories import JobExecutionFactory, WorkerFactory
from tests.threads import race


@pytest.fixture
def told() -> Iterator[list[tuple[str, JobExecution]]]:
    """The end signals that were sent, by name."""
    seen: list[tuple[str, JobExecution]] = []

    def on_cancelled(execution: JobExecution, **kwargs: Any) -> None:
        seen.append(("cancelled", execution))

    def on_finished(execution: JobExecution, **kwargs: Any) -> None:
        seen.append(("finished", execution))

    signals.job_cancelled.connect(on_cancelled)
    signals.job_finished.connect(on_finished)
    yield seen
    signals.job_cancelled.disconnect(on_cancelled)
    signals.job_finished.disconnect(on_finished)


@pytest.fixture
def purge(own_jobs: None) -> Any:
    """A cron job that may run once at a time."""

    @job(name="own.purge", cron="0 3 * * *")
    def purge() -> None: ...

    return purge


class TestCancel:
    @pytest.mark.django_db(transaction=True)
    @pytest.mark.parametrize("state", ["pending", "scheduled", "parked"])
    def test_a_waiting_row_ends_at_once_and_says_who_did_it(self, state: str, told: list[Any]) -> None:
        user = User.objects.create(username="ada")
        row = JobExecutionFactory(**{state: True}, key="k")
        assert row.cancel(by=user) is row
        assert (row.status, row.active_key, row.cancelled_by, row.cancelled_by_name) == (
            Status.CANCELLED,
            None,
            str(user.pk),
            "ada",
        )
        assert row.completed_at is not None
        assert told == [("cancelled", row), ("finished", row)]
        # Its key is free.
        assert jobs.mark.using(key="k").push().created is True

    @pytest.mark.django_db(transaction=True)
    def test_a_cancelled_row_is_never_claimed(self) -> None:
        """What was cancelled before its start does not start, and its neighbours do.

        Fault: cancelling a job that a worker had reserved was ignored (celery/celery#1007).
        """
        worker = WorkerFactory()
        first, second, third = jobs.mark.push_many([{"tag": "1"}, {"tag": "2"}, {"tag": "3"}])
        second.cancel()
        claimed = transitions.claim(
            queue="default",
            names=["acc.mark"],
            worker_id=worker.pk,
            limit=10,
            now=clock.now("default"),
            using="default",
        )
        assert claimed == [first, third]

    @pytest.mark.django_db(transaction=True)
    def test_a_running_row_is_marked_and_its_worker_told(self, told: list[Any], recorder: RecordingDispatcher) -> None:
        row = JobExecutionFactory(running=True)
        row.cancel(by="ada")
        assert (row.status, row.is_cancelling, row.cancelled_by) == (Status.RUNNING, True, "ada")
        assert recorder.cancels == [row.pk]
        # Its end is its worker's to tell.
        assert told == []

    @pytest.mark.django_db(transaction=True)
    def test_to_cancel_again_changes_nothing(self, recorder: RecordingDispatcher) -> None:
        row = JobExecutionFactory(running=True)
        marked_at = row.cancel(by="ada").cancel_requested_at
        again = services.cancel(row.pk, by="eve")
        assert (again.cancel_requested_at, again.cancelled_by) == (marked_at, "ada")
        assert recorder.cancels == [row.pk]

    @pytest.mark.django_db
    @pytest.mark.parametrize("state", ["ok", "failed", "cancelled"])
    def test_a_finished_row_is_refused_by_its_status(self, state: str) -> None:
        row = JobExecutionFactory(**{state: True})
        with pytest.raises(
            WrongStatus, match=f"acc.mark {row.pk} cannot be cancelled: it is already {row.status}"
        ) as no:
            row.cancel()
        assert no.value.execution is row

    @pytest.mark.django_db
    def test_a_row_that_is_gone_is_refused(self) -> None:
        row = JobExecutionFactory(ok=True)
        JobExecution.objects.all().delete()
        with pytest.raises(WrongStatus, match="does not exist any more"):
            services.cancel(JobExecution(id=row.pk, job_name="acc.mark"))
        with pytest.raises(WrongStatus, match=f"no execution {row.pk}"):
            services.cancel(row.pk)

    @pytest.mark.django_db(transaction=True)
    def test_a_row_that_starts_between_the_two_verbs_is_marked(self) -> None:
        row = JobExecutionFactory(pending=True)
        cancel = transitions.cancel

        def overtaken(queryset: Any, **kwargs: Any) -> int:
            with mock.patch.object(transitions, "cancel", cancel):
                JobExecution.objects.filter(pk=row.pk).delete()
                JobExecutionFactory(id=row.pk, running=True)
            return cancel(queryset, **kwargs)

        with mock.patch.object(transitions, "cancel", overtaken):
            row.cancel()
        assert row.is_cancelling

    @pytest.mark.django_db(transaction=True)
    def test_a_row_that_is_handed_back_between_the_two_verbs_ends_in_the_next_round(self) -> None:
        row = JobExecutionFactory(pending=True)
        real, calls = transitions.cancel, []

        def first_too_early(queryset: Any, **kwargs: Any) -> int:
            calls.append(kwargs)
            return 0 if len(calls) == 1 else real(queryset, **kwargs)

        with mock.patch.object(transitions, "cancel", first_too_early):
            row.cancel()
        assert row.status == Status.CANCELLED
        with mock.patch.object(transitions, "cancel", return_value=0), pytest.raises(WrongStatus, match="Cancel again"):
            JobExecutionFactory(pending=True).cancel()

    @pytest.mark.django_db(transaction=True)
    def test_nothing_is_told_before_the_commit_or_after_a_rollback(
        self, told: list[Any], recorder: RecordingDispatcher
    ) -> None:
        waiting, running = JobExecutionFactory(pending=True), JobExecutionFactory(running=True)
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            waiting.cancel()
            running.cancel()
            raise ZeroDivisionError
        assert (told, recorder.cancels) == ([], [])
        with transaction.atomic():
            waiting.cancel()
            running.cancel()
            assert (told, recorder.cancels) == ([], [])
        assert told == [("cancelled", waiting), ("finished", waiting)]
        assert recorder.cancels == [running.pk]

    @pytest.mark.django_db(transaction=True)
    @pytest.mark.usefixtures("own_jobs")
    @pytest.mark.parametrize("options", [{"record": "none"}, {"keep": Keep(cancelled=0)}], ids=["record", "keep"])
    def test_a_job_that_keeps_no_cancelled_rows_keeps_none_here_either(
        self, options: dict[str, Any], told: list[Any]
    ) -> None:
        @job(name="own.fleeting", **options)
        def fleeting() -> None: ...

        row = fleeting.push()
        row.cancel(by="ada")
        assert not JobExecution.objects.exists()
        # The receivers still see what became of it.
        assert [(name, seen.status, seen.cancelled_by) for name, seen in told] == [
            ("cancelled", Status.CANCELLED, "ada"),
            ("finished", Status.CANCELLED, "ada"),
        ]

    @pytest.mark.django_db
    def test_a_row_of_a_job_that_nobody_knows_can_be_cancelled(self) -> None:
        row = JobExecutionFactory(pending=True, job_name="gone.job")
        assert row.cancel().status == Status.CANCELLED


class TestRetry:
    @pytest.mark.django_db(transaction=True)
    @pytest.mark.parametrize("state", ["failed", "cancelled"])
    def test_it_is_the_same_row_with_its_history_and_a_new_budget(
        self, state: str, recorder: RecordingDispatcher
    ) -> None:
        row = JobExecutionFactory(
            **{state: True},
            job_name="acc.mark_retry",
            attempt=3,
            max_attempts=3,
            payload={"tag": "x"},
            queue="mail",
            priority=9,
        )
        errors = row.errors
        assert row.retry(by="ada") is row
        assert (row.status, row.attempt, row.max_attempts) == (Status.PENDING, 3, 3 + 1 + 2)
        assert (row.payload, row.errors, row.retried_by) == ({"tag": "x"}, errors, "ada")
        assert row.retried_at == row.scheduled_at
        assert (row.completed_at, row.cancel_requested_at) == (None, None)
        assert recorder.hints == [("mail", [row.pk], 9)]

    @pytest.mark.django_db
    @pytest.mark.usefixtures("own_jobs")
    def test_the_budget_is_that_of_the_job_as_it_is_now(self) -> None:
        @job(name="own.patient", retry=Retry(7))
        def patient() -> None: ...

        row = JobExecutionFactory(failed=True, job_name="own.patient", attempt=2, max_attempts=2)
        assert row.retry().max_attempts == 2 + 1 + 7

    @pytest.mark.django_db
    @pytest.mark.parametrize("state", ["pending", "scheduled", "running", "ok"])
    def test_other_statuses_are_refused(self, state: str) -> None:
        row = JobExecutionFactory(**{state: True})
        with pytest.raises(WrongStatus, match=f"it is {row.status}; expected error or cancelled"):
            row.retry()

    @pytest.mark.django_db(transaction=True)
    def test_two_retries_at_once_are_one(self, recorder: RecordingDispatcher) -> None:
        """A double click or a reload queues the row once, and the second one is told.

        Fault: retry made two copies (RealOrangeOne/django-tasks#92, rq/django-rq#794).
        """
        pk = JobExecutionFactory(failed=True, key="k").pk

        def click() -> str:
            try:
                return services.retry(pk).status
            except WrongStatus as refusal:
                return type(refusal).__name__

        assert sorted(race(click, click)) == ["WrongStatus", "pending"]
        assert click() == "WrongStatus"
        assert len(recorder.hints) == 1
        assert JobExecution.objects.get().max_attempts == 2

    @pytest.mark.django_db
    def test_the_key_is_taken_again(self) -> None:
        row = JobExecutionFactory(failed=True, key="k")
        row.retry()
        assert jobs.mark.using(key="k").push() == row

    @pytest.mark.django_db(transaction=True)
    @pytest.mark.parametrize("in_block", [False, True], ids=["autocommit", "atomic block"])
    def test_a_key_that_another_row_holds_is_a_conflict_that_names_it(
        self, in_block: bool, recorder: RecordingDispatcher
    ) -> None:
        """A retry beside a live twin is refused with words and changes nothing.

        Fault: retrying an old unique job while a newer twin was active gave a 500 (riverqueue/riverui#622).
        """
        row = JobExecutionFactory(failed=True, key="k")
        holder = JobExecutionFactory(pending=True, key="k")
        if in_block:
            with transaction.atomic():
                with pytest.raises(KeyTaken, match=f"'k' is held by {holder.pk}, which is pending") as taken:
                    row.retry()
                Thing.objects.create(name="the block is usable")
        else:
            with pytest.raises(KeyTaken, match=f"'k' is held by {holder.pk}, which is pending") as taken:
                row.retry()
        assert taken.value.execution == holder
        row.refresh_from_db()
        assert (row.status, row.retried_at) == (Status.ERROR, None)
        assert recorder.hints == []

    @pytest.mark.django_db
    def test_a_row_of_a_job_that_nobody_knows_is_refused(self) -> None:
        row = JobExecutionFactory(failed=True, job_name="gone.job")
        with pytest.raises(UnknownJob, match=r"gone\.job.*aliases"):
            row.retry()

    @pytest.mark.django_db
    def test_a_row_that_is_gone_is_refused(self) -> None:
        row = JobExecutionFactory(failed=True)
        JobExecution.objects.all().delete()
        with pytest.raises(WrongStatus):
            services.retry(row.pk)

    @pytest.mark.django_db
    def test_a_ticks_row_is_refused_while_another_one_lives(self, purge: Any) -> None:
        row = JobExecutionFactory(failed=True, job_name="own.purge")
        live = purge.trigger()
        with pytest.raises(AlreadyRunning, match=f"{live.pk} is pending") as running:
            row.retry()
        assert running.value.execution == live
        live.cancel()
        row.retry()
        with pytest.raises(AlreadyRunning):
            purge.trigger()


class TestCopy:
    @pytest.mark.django_db(transaction=True)
    @pytest.mark.parametrize("state", ["ok", "failed", "cancelled"])
    def test_a_finished_row_runs_again_as_a_new_one(self, state: str, recorder: RecordingDispatcher) -> None:
        source = JobExecutionFactory(
            **{state: True},
            job_name="acc.mark_retry",
            payload={"tag": "x"},
            priority=9,
            queue="mail",
            organization_id="o",
        )
        row = services.copy(source, by="ada")
        row.refresh_from_db()
        assert row != source
        assert (row.status, row.attempt, row.max_attempts, row.copied_from) == (Status.PENDING, 0, 3, source.pk)
        assert (row.payload, row.priority, row.queue, row.organization_id) == ({"tag": "x"}, 9, "mail", "o")
        assert (row.triggered_by, row.errors, row.error) == ("ada", [], "")
        assert recorder.hints == [("mail", [row.pk], 9)]
        source.refresh_from_db()
        assert source.is_final

    @pytest.mark.django_db
    def test_it_takes_the_key_if_that_is_free(self) -> None:
        source = JobExecutionFactory(ok=True, key="k", organization_id="o")
        row = services.copy(source.pk)
        assert (row.key, row.created) == ("k", True)
        with pytest.raises(KeyTaken, match=f"'k' is held by {row.pk}") as taken:
            services.copy(source)
        assert taken.value.execution == row
        assert JobExecution.objects.count() == 2

    @pytest.mark.django_db
    def test_a_live_row_is_refused_even_when_the_callers_object_is_older(self) -> None:
        row = JobExecutionFactory(failed=True)
        services.retry(row.pk)
        assert row.status == Status.ERROR
        with pytest.raises(WrongStatus, match="expected a finished execution"):
            services.copy(row)

    @pytest.mark.django_db
    def test_a_payload_that_the_job_no_longer_accepts_is_refused(self) -> None:
        source = JobExecutionFactory(ok=True, job_name="acc.slow", payload={"seconds": 3})
        with pytest.raises(InvalidPayload):
            services.copy(source)
        assert JobExecution.objects.count() == 1

    @pytest.mark.django_db
    def test_an_unknown_job_is_refused(self) -> None:
        with pytest.raises(UnknownJob):
            services.copy(JobExecutionFactory(ok=True, job_name="gone.job"))

    @pytest.mark.django_db
    def test_a_cron_jobs_copy_counts_as_its_one_execution(self, purge: Any) -> None:
        source = JobExecutionFactory(ok=True, job_name="own.purge")
        row = services.copy(source)
        with pytest.raises(AlreadyRunning) as running:
            services.copy(source)
        assert running.value.execution == row


class TestStartNow:
    @pytest.mark.django_db(transaction=True)
    @pytest.mark.parametrize("state", ["scheduled", "parked"])
    def test_a_row_that_waits_becomes_pending(
        self, state: str, recorder: RecordingDispatcher, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Who did it is in the log: the row has no column for it."""
        caplog.set_level("INFO", logger="django_jobs")
        row = JobExecutionFactory(**{state: True})
        assert services.start_now(row, by="ada") is row
        assert (row.status, row.parked_reason) == (Status.PENDING, "")
        assert recorder.hints == [("default", [row.pk], 0)]
        assert caplog.messages == [f"{row} was started before its time by ada"]

    @pytest.mark.django_db
    @pytest.mark.parametrize("state", ["pending", "running", "ok", "failed", "cancelled"])
    def test_others_are_refused(self, state: str) -> None:
        row = JobExecutionFactory(**{state: True})
        with pytest.raises(WrongStatus, match=f"it is {row.status}; expected scheduled"):
            services.start_now(row)

    @pytest.mark.django_db
    def test_a_row_that_is_gone_is_refused(self) -> None:
        with pytest.raises(WrongStatus, match="no execution"):
            services.start_now(uuid7())


@pytest.mark.django_db(transaction=True)
def test_copy_and_start_now_have_twins_for_async_code() -> None:
    done, waiting = JobExecutionFactory(ok=True, payload={"tag": "x"}), JobExecutionFactory(scheduled=True)

    async def story() -> tuple[JobExecution, JobExecution]:
        return await services.acopy(done, by="ada"), await services.astart_now(waiting.pk)

    # In a test the thread-sensitive calls belong to the test's own thread and connection.
    copied, started = async_to_sync(story)()
    assert (copied.copied_from, copied.payload, copied.triggered_by) == (done.pk, {"tag": "x"}, "ada")
    assert (started.pk, started.status) == (waiting.pk, Status.PENDING)


class TestTrigger:
    @pytest.mark.django_db(transaction=True)
    def test_a_cron_job_runs_now_and_says_who_asked(self, purge: Any, recorder: RecordingDispatcher) -> None:
        row = purge.trigger(by="ada")
        row.refresh_from_db()
        assert (row.job_name, row.status, row.payload, row.tick_at) == ("own.purge", Status.PENDING, {}, None)
        assert (row.triggered_by, row.key, row.active_key) == ("ada", "", keys.overlap_key(purge))
        assert recorder.hints == [("default", [row.pk], 0)]

    @pytest.mark.django_db(transaction=True)
    def test_triggers_that_race_make_one_row(self, purge: Any) -> None:
        def click() -> Any:
            try:
                return purge.trigger().pk
            except AlreadyRunning as refusal:
                return refusal.execution and refusal.execution.pk

        assert len(set(race(click, click, click))) == 1
        assert JobExecution.objects.count() == 1

    @pytest.mark.django_db
    def test_the_refusal_names_the_live_row(self, purge: Any) -> None:
        row = purge.trigger()
        with pytest.raises(AlreadyRunning, match=f'{row.pk} is pending and overlap="skip"') as running:
            purge.trigger()
        assert running.value.execution == row

    @pytest.mark.django_db
    @pytest.mark.usefixtures("own_jobs")
    def test_with_overlap_allowed_there_may_be_many(self) -> None:
        @job(name="own.eager", cron="0 3 * * *", overlap="allow")
        def eager() -> None: ...

        assert keys.overlap_key(eager) is None
        assert eager.trigger() != eager.trigger()

    @pytest.mark.django_db
    def test_no_key_of_a_user_is_the_overlap_key(self, purge: Any) -> None:
        from django_jobs.querysets import key_digest

        reserved = keys.overlap_key(purge)
        assert reserved is not None
        assert len(reserved) != len(key_digest(None, reserved))

    def test_a_pushed_job_is_refused_with_the_mend(self) -> None:
        with pytest.raises(DefinitionError, match="push"):
            services.trigger(jobs.mark)


def test_the_mode_is_cron_or_the_kind_of_the_dispatcher(purge: Any, recorder: RecordingDispatcher) -> None:
    assert services.mode(purge) == purge.mode == "cron"
    assert services.mode(jobs.mark) == jobs.mark.mode == "recording"


def test_known_job_follows_aliases(own_jobs: None) -> None:
    @job(name="own.new", aliases=["own.old"])
    def renamed() -> None: ...

    assert operations.known_job(JobExecution(job_name="own.old")) == registry.get("own.new")
