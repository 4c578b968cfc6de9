"""Many pushes in one call: all or none, in order, with options of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest import mock

import pytest
from django.db import transaction

from django_jobs import InvalidPayload, clock, signals
from django_jobs.models import JobExecution
from django_jobs.services import keys
from django_jobs.states import Status
from tests.acc import jobs
from tests.dispatchers.recording import RecordingDispatcher

if TYPE_CHECKING:
    from pytest_django import DjangoAssertNumQueries


@pytest.mark.django_db
def test_nothing_pushed_is_nothing_written(django_assert_num_queries: DjangoAssertNumQueries) -> None:
    with django_assert_num_queries(0):
        assert jobs.mark.push_many([]) == []


@pytest.mark.django_db(transaction=True)
def test_many_unkeyed_rows_are_one_insert_and_one_hint_in_order(
    recorder: RecordingDispatcher, django_assert_max_num_queries: DjangoAssertNumQueries
) -> None:
    clock.now("default")
    # BEGIN and COMMIT count as queries on some engines.
    with django_assert_max_num_queries(3):
        rows = jobs.mark.push_many([{"tag": str(n)} for n in range(20)])
    assert [row.payload["tag"] for row in rows] == [str(n) for n in range(20)]
    assert all(row.created is True for row in rows)
    assert recorder.hints == [("default", [row.pk for row in rows], 0)]
    stored = JobExecution.objects.order_by("pk")
    assert [row.payload["tag"] for row in stored] == [str(n) for n in range(20)]


@pytest.mark.django_db(transaction=True)
def test_one_bad_item_among_many_writes_nothing(recorder: RecordingDispatcher) -> None:
    with pytest.raises(InvalidPayload):
        jobs.slow.push_many([{"s": 1}, {"s": "long"}, {"s": 2}])
    assert not JobExecution.objects.exists()
    assert recorder.hints == []


@pytest.mark.django_db(transaction=True)
def test_a_failed_insert_takes_all_of_them_back(recorder: RecordingDispatcher) -> None:
    fails = mock.patch.object(keys, "insert_or_find", side_effect=ZeroDivisionError)
    with fails, pytest.raises(ZeroDivisionError):
        jobs.mark.push_many([{"tag": "a"}, jobs.mark.item(tag="b", key="k"), {"tag": "c"}])
    assert not JobExecution.objects.exists()
    assert recorder.hints == []


@pytest.mark.django_db(transaction=True)
def test_keyed_and_unkeyed_items_keep_their_order_and_find_live_ones(recorder: RecordingDispatcher) -> None:
    live = jobs.mark.using(key="live").push()
    recorder.hints.clear()
    rows = jobs.mark.push_many(
        [
            {"tag": "0"},
            jobs.mark.item(tag="1", key="live"),
            jobs.mark.item(tag="2", key="new"),
            {"tag": "3"},
            jobs.mark.item(tag="4", key="new"),
        ]
    )
    assert [row.created for row in rows] == [True, False, True, True, False]
    assert rows[1] == live
    assert rows[2] == rows[4]
    assert [row.payload["tag"] for row in rows] == ["0", live.payload["tag"], "2", "3", "2"]
    assert JobExecution.objects.count() == 4
    assert recorder.hints == [("default", [rows[0].pk, rows[2].pk, rows[3].pk], 0)]


@pytest.mark.django_db
def test_every_option_can_be_given_per_item(recorder: RecordingDispatcher) -> None:
    bound = jobs.mark.using(by="import", organization_id="o1")
    plain, own = bound.push_many(
        [
            {"tag": "a"},
            bound.item(tag="b", priority="low", queue="bulk", delay=60, organization_id="o2", by="ada", key="k"),
        ]
    )
    assert (plain.triggered_by, plain.organization_id, plain.status) == ("import", "o1", Status.PENDING)
    assert (own.triggered_by, own.organization_id, own.status) == ("ada", "o2", Status.SCHEDULED)
    assert (own.priority, own.queue, own.key) == (-50, "bulk", "k")


@pytest.mark.django_db(transaction=True)
def test_a_taken_key_leaves_the_callers_block_usable() -> None:
    jobs.mark.using(key="k").push()
    with transaction.atomic():
        rows = jobs.mark.push_many([jobs.mark.item(tag="a", key="k"), {"tag": "b"}])
        assert JobExecution.objects.filter(pk__in=[row.pk for row in rows]).count() == 2


@pytest.mark.django_db
def test_each_new_row_is_told_to_the_receivers_once() -> None:
    told: list[JobExecution] = []

    def receive(execution: JobExecution, **kwargs: object) -> None:
        told.append(execution)

    signals.job_pushed.connect(receive)
    try:
        rows = jobs.mark.push_many([{"tag": "a"}, jobs.mark.item(key="k"), jobs.mark.item(key="k")])
    finally:
        signals.job_pushed.disconnect(receive)
    assert told == rows[:2]
