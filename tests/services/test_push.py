"""One push: what is written, when, and what comes back."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING
from unittest import mock

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import User
from django.core.exceptions import SynchronousOnlyOperation
from django.db import OperationalError, transaction

from django_jobs import InvalidPayload, Retry, clock, job, signals, transitions
from django_jobs.models import JobExecution
from django_jobs.states import Status
from tests.acc import jobs
from tests.acc.models import Thing
from tests.dispatchers.recording import FAILING, RecordingDispatcher

if TYPE_CHECKING:
    from pytest_django import DjangoAssertNumQueries, Settings


@pytest.mark.django_db
def test_a_push_is_one_insert(django_assert_num_queries: DjangoAssertNumQueries) -> None:
    clock.now("default")
    with django_assert_num_queries(1):
        row = jobs.mark.push(tag="a")
    assert row.created is True
    stored = JobExecution.objects.get()
    assert stored == row
    assert (stored.job_name, stored.status, stored.queue, stored.rank) == ("acc.mark", Status.PENDING, "default", 0)
    assert (stored.payload, stored.key, stored.active_key, stored.organization_id) == ({"tag": "a"}, "", None, None)
    assert (stored.attempt, stored.max_attempts, stored.run_no) == (0, 1, 0)
    assert stored.hinted_at == stored.created_at == stored.scheduled_at


@pytest.mark.django_db
def test_a_payload_without_arguments_is_stored_as_an_empty_object() -> None:
    jobs.mark.push()
    assert JobExecution.objects.get().payload in ({}, {"tag": ""})


@pytest.mark.django_db
def test_a_bad_payload_writes_nothing_and_leaves_the_transaction_usable() -> None:
    with transaction.atomic():
        with pytest.raises(InvalidPayload):
            jobs.slow.push(s="a while")
        Thing.objects.create(name="after")
    assert not JobExecution.objects.exists()
    assert Thing.objects.exists()


@pytest.mark.django_db
def test_the_validated_value_is_what_is_stored_and_what_the_returned_row_carries() -> None:
    row = jobs.slow.push(s="1.5")
    assert row.payload["s"] == JobExecution.objects.get().payload["s"] == 1.5


@pytest.mark.django_db
@pytest.mark.usefixtures("own_jobs")
def test_the_attempts_allowed_are_frozen_at_the_push(settings: Settings) -> None:
    @job(name="own.inherits")
    def inherits() -> None: ...

    settings.DJANGO_JOBS = {"DEFAULT_RETRY": Retry(4)}
    row = inherits.push()
    settings.DJANGO_JOBS = {}
    row.refresh_from_db()
    assert row.max_attempts == 5
    assert inherits.push().max_attempts == 1


@pytest.mark.django_db
@pytest.mark.parametrize(
    "delay", [5, 1.5, timedelta(seconds=5), timedelta(days=3600)], ids=["int", "float", "timedelta", "ten years"]
)
def test_a_delay_makes_a_scheduled_row(delay: timedelta | float, recorder: RecordingDispatcher) -> None:
    """The run-later option must not meet the payload's JSON, nor overflow on any database.

    Fault: run_after was encoded as an argument, TypeError for datetime (RealOrangeOne/django-tasks#118).
    """
    row = jobs.mark.using(delay=delay).push()
    row.refresh_from_db()
    seconds = delay.total_seconds() if isinstance(delay, timedelta) else delay
    assert row.status == Status.SCHEDULED
    assert row.scheduled_at - row.created_at == timedelta(seconds=seconds)
    assert recorder.hints == []


@pytest.mark.django_db
@pytest.mark.parametrize("delay", [0, 0.0, -1, timedelta(0), timedelta(seconds=-5)])
def test_a_delay_of_nothing_or_less_is_pending_at_once(delay: timedelta | float) -> None:
    row = jobs.mark.using(delay=delay).push()
    row.refresh_from_db()
    assert row.status == Status.PENDING
    assert row.scheduled_at == row.created_at


@pytest.mark.django_db
def test_scheduled_at_wins_over_delay() -> None:
    at = clock.now("default") + timedelta(hours=1)
    assert jobs.mark.using(delay=5, scheduled_at=at).push().scheduled_at == at
    # A past instant wins, too: at once, not in five seconds.
    assert jobs.mark.using(delay=5, scheduled_at=at - timedelta(days=1)).push().status == Status.PENDING


@pytest.mark.django_db
def test_the_far_ends_of_the_calendar_fit_every_database() -> None:
    far = jobs.mark.using(scheduled_at=datetime(9998, 12, 31, tzinfo=UTC)).push()
    far.refresh_from_db()
    assert (far.status, far.scheduled_at.year) == (Status.SCHEDULED, 9998)
    assert jobs.mark.using(scheduled_at=datetime(1, 1, 1, tzinfo=UTC)).push().status == Status.PENDING


@pytest.mark.django_db
def test_a_naive_scheduled_at_is_read_in_the_current_time_zone(settings: Settings) -> None:
    settings.TIME_ZONE = "Asia/Tokyo"
    row = jobs.mark.using(scheduled_at=datetime(2100, 1, 1, 9)).push()  # noqa: DTZ001 - what is tested
    row.refresh_from_db()
    assert row.scheduled_at == datetime(2100, 1, 1, 0, tzinfo=UTC)


@pytest.mark.django_db
def test_priority_queue_tenant_and_who_are_stored() -> None:
    user = User.objects.create(username="ada")
    bound = jobs.mark.using(priority="high", queue="mail", organization_id=7, by=user)
    row = bound.push()
    row.refresh_from_db()
    assert (row.rank, row.priority, row.queue, row.organization_id) == (-50, 50, "mail", "7")
    assert (row.triggered_by, row.triggered_by_name) == (str(user.pk), "ada")
    named = jobs.mark.using(by="nightly import").push()
    assert (named.triggered_by, named.triggered_by_name) == ("nightly import", "nightly import")


@pytest.mark.django_db
@pytest.mark.usefixtures("own_jobs")
def test_a_priority_of_zero_overrides_that_of_the_job() -> None:
    @job(name="own.urgent", priority="high", queue="fast")
    def urgent() -> None: ...

    row = urgent.push()
    assert (row.priority, row.queue) == (50, "fast")
    assert urgent.using(priority=0).push().priority == 0


@pytest.mark.django_db(transaction=True)
def test_the_id_is_usable_in_the_block_and_gone_after_its_rollback(recorder: RecordingDispatcher) -> None:
    """A push in an atomic block hands out its row at once.

    Fault: a commit-safe enqueue returned None, since the task was made later (celery/celery#8976).
    """
    with transaction.atomic():
        row = jobs.mark.push()
        Thing.objects.create(name=str(row.pk))
        assert recorder.hints == []
    row.refresh_from_db()
    assert recorder.hints == [("default", [row.pk], 0)]
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        lost = jobs.mark.push()
        raise ZeroDivisionError
    with pytest.raises(JobExecution.DoesNotExist):
        lost.refresh_from_db()
    assert len(recorder.hints) == 1


@pytest.mark.django_db(transaction=True)
def test_a_failing_dispatcher_fails_no_push(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    settings.DJANGO_JOBS = {"DISPATCHER": FAILING}
    with mock.patch("django_jobs.dispatchers._logged_at", float("-inf")), caplog.at_level(logging.ERROR, "django_jobs"):
        row = jobs.mark.push()
        with transaction.atomic():
            other = jobs.mark.push()
    assert JobExecution.objects.filter(pk__in=[row.pk, other.pk]).count() == 2
    assert "the dispatcher failed" in caplog.text


@pytest.mark.django_db
def test_a_push_enters_the_shield_of_the_run_that_makes_it() -> None:
    entered = mock.MagicMock()
    with mock.patch("django_jobs.services._entry.shielded", return_value=entered):
        jobs.mark.push()
    entered.__enter__.assert_called_once_with()
    assert entered.__exit__.call_count == 1


@pytest.mark.django_db
def test_a_push_tells_the_receivers_after_its_insert() -> None:
    seen: list[tuple[object, bool]] = []

    def receive(sender: object, execution: JobExecution, **kwargs: object) -> None:
        seen.append((sender, JobExecution.objects.filter(pk=execution.pk).exists()))

    signals.job_pushed.connect(receive, sender=jobs.mark)
    try:
        # Receivers connect to the job; a copy made by using() reaches them all the same.
        jobs.mark.using(priority=1).push()
        jobs.slow.push()
    finally:
        signals.job_pushed.disconnect(receive, sender=jobs.mark)
    assert seen == [(jobs.mark, True)]


@pytest.mark.django_db(transaction=True)
def test_push_in_an_event_loop_names_its_async_twin() -> None:
    """push() from async code gives a clear error of Django's own type, and the twin works.

    Fault: code met a running event loop and Django refused (celery/django-celery-results#495).
    """

    async def wrong() -> None:
        jobs.mark.push()

    with pytest.raises(SynchronousOnlyOperation, match=r"push\(\) .*await apush\(\) instead"):
        asyncio.run(wrong())
    assert not JobExecution.objects.exists()


@pytest.mark.medium
@pytest.mark.django_db(transaction=True)
def test_apush_and_its_kin_do_what_the_plain_calls_do() -> None:
    async def story() -> tuple[JobExecution, list[JobExecution]]:
        row = await jobs.mark.using(key="once").apush(tag="a")
        again = await jobs.mark.using(key="once").apush(tag="b")
        assert (again.pk, again.created) == (row.pk, False)
        many = await jobs.mark.apush_many([{"tag": "c"}, {"tag": "d"}])
        await row.acancel(by="ada")
        return await row.aretry(by="eve"), many

    # In a test the thread-sensitive calls belong to the test's own thread and connection.
    row, many = async_to_sync(story)()
    assert [each.payload["tag"] for each in many] == ["c", "d"]
    row = JobExecution.objects.get(pk=row.pk)
    assert (row.status, row.cancelled_by, row.retried_by) == (Status.PENDING, "ada", "eve")


@pytest.mark.django_db
def test_the_returned_row_equals_the_stored_one_in_every_column() -> None:
    row = jobs.mark_retry.using(key="k", delay=60, priority=3, queue="q", organization_id="o", by="x").push(tag="é")
    stored = JobExecution.objects.get()
    for column in JobExecution._meta.concrete_fields:
        assert getattr(row, column.attname) == getattr(stored, column.attname), column.attname
    assert row._state.db == "default"


class Collision(Exception):
    sqlstate = "40P01"


@pytest.mark.django_db(transaction=True)
def test_a_push_retries_when_its_own_statement_lost_against_another() -> None:
    insert, calls = transitions.insert, []

    def collide(*args: object, **kwargs: object) -> None:
        calls.append(args)
        if len(calls) == 1:
            raise OperationalError("deadlock detected") from Collision()
        insert(*args, **kwargs)

    with mock.patch.object(transitions, "insert", collide):
        row = jobs.mark.push()
    assert len(calls) == 2
    assert JobExecution.objects.get() == row


@pytest.mark.django_db(transaction=True)
def test_a_push_inside_a_callers_transaction_is_never_repeated() -> None:
    def collide(*args: object, **kwargs: object) -> None:
        raise OperationalError("deadlock detected") from Collision()

    with mock.patch.object(transitions, "insert", side_effect=collide) as insert:
        with pytest.raises(OperationalError), transaction.atomic():
            jobs.mark.push()
        assert insert.call_count == 1
