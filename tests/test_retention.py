"""Trim: which finished rows stay, which go, and in what portions."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction

from django_jobs import retention
from django_jobs.models import JobExecution
from django_jobs.states import Status
from tests.cases.copies import analyze
from tests.factories import JobExecutionFactory, WorkerFactory
from tests.runtime.support import held
from tests.threads import in_thread

pytestmark = pytest.mark.django_db


def ended(now: Any, *ages: float, **fields: Any) -> list[JobExecution]:
    """Make a finished row for each age in seconds."""
    worker = WorkerFactory(now=now)
    fields = {"status": Status.OK, "worker": worker, **fields}
    return [JobExecutionFactory(now=now - timedelta(seconds=age), **fields) for age in ages]


def trim(now: Any, keep: int | None, max_age: float | None = None, **options: Any) -> int:
    status = options.pop("status", Status.OK)
    return retention.trim("acc.mark", status, keep, max_age, now=now, using="default", **options)


def left() -> set[Any]:
    return set(JobExecution.objects.values_list("pk", flat=True))


def test_the_newest_n_stay(now: Any) -> None:
    rows = ended(now, 50, 10, 40, 20, 30)
    assert trim(now, 2) == 3
    assert left() == {rows[1].pk, rows[3].pk}


def test_rows_that_ended_at_one_instant_stay_by_their_ids(now: Any) -> None:
    rows = ended(now, 10, 10, 10, 10)
    assert trim(now, 3) == 1
    assert left() == {row.pk for row in rows[1:]}


def test_rows_of_two_names_that_ended_at_one_instant_stay_by_their_ids(now: Any) -> None:
    old = ended(now, 10, 10, job_name="acc.before")
    new = ended(now, 10, 10)
    assert trim(now, 3, other_names=["acc.before"]) == 0
    assert trim(now, 1, other_names=["acc.before"]) == 1
    assert left() == {old[0].pk, old[1].pk, new[1].pk}


def test_nothing_goes_when_there_are_no_more_than_are_kept(now: Any) -> None:
    ended(now, 1, 2, 3)
    assert trim(now, 3) == 0
    assert trim(now, 4) == 0
    assert len(left()) == 3


def test_none_keeps_all_and_zero_keeps_none(now: Any) -> None:
    ended(now, 1, 2, 3)
    assert trim(now, None) == 0
    assert trim(now, 0) == 3


def test_rows_older_than_the_age_go_however_few_there_are(now: Any) -> None:
    rows = ended(now, 5, 50, 500)
    assert trim(now, None, 60) == 1
    assert left() == {rows[0].pk, rows[1].pk}
    assert trim(now, 10, 10) == 1
    assert left() == {rows[0].pk}


def test_count_and_age_hold_together(now: Any) -> None:
    rows = ended(now, 1, 2, 3, 4, 500)
    assert trim(now, 2, 60) == 3
    assert left() == {rows[0].pk, rows[1].pk}
    # Also where the age leaves fewer than the count.
    ended(now, 100, 200, 300)
    assert trim(now + timedelta(seconds=65), 2, 60) == 5


@pytest.mark.medium
def test_other_jobs_other_statuses_and_live_rows_are_not_touched(now: Any) -> None:
    others = [
        *ended(now, 900, job_name="acc.slow"),
        *ended(now, 900, status=Status.ERROR),
        *ended(now, 900, status=Status.CANCELLED),
        *ended(now, 900, status=Status.PENDING),
        *ended(now, 900, status=Status.SCHEDULED),
        *ended(now, 900, status=Status.RUNNING),
    ]
    ended(now, 900, 901)
    assert trim(now, 0) == 2
    assert left() == {row.pk for row in others}


def test_a_live_status_is_never_trimmed(now: Any) -> None:
    ended(now, 900, status=Status.PENDING)
    assert trim(now, 0, status=Status.PENDING) == 0
    assert len(left()) == 1


def test_the_oldest_go_first_in_portions_and_it_converges(now: Any) -> None:
    """Trim keeps the newest n per job and status and converges."""
    rows = ended(now, *range(10, 0, -1))
    assert trim(now, 3, limit=4) == 4
    assert left() == {row.pk for row in rows[4:]}
    assert trim(now, 3, limit=4) == 3
    assert trim(now, 3, limit=4) == 0
    assert left() == {row.pk for row in rows[7:]}


def test_a_portion_goes_on_where_the_one_before_it_ended(now: Any) -> None:
    """An old transaction keeps deleted rows in the index: portions that begin at its start get slower and slower."""
    rows, place = ended(now, *range(9, 3, -1)), retention.Place()
    assert trim(now, 0, limit=3, place=place) == 3
    assert place.at == rows[2].completed_at
    older, equal = ended(now, 20, 7)
    assert trim(now, 0, limit=3, place=place) == 3
    assert left() == {older.pk, rows[5].pk}
    assert trim(now, 0, limit=3, place=place) == 1
    assert trim(now, 0, limit=3, place=place) == 0
    assert trim(now, 0, limit=3) == 1
    assert not JobExecution.objects.filter(pk__in=[older.pk, equal.pk]).exists()


def test_what_follows_the_last_portion_begins_at_the_rows_that_are_kept(now: Any) -> None:
    rows, place = ended(now, *range(6, 0, -1)), retention.Place()
    rows[2].delete()
    assert trim(now, 2, place=place) == 3
    assert place.at == rows[-2].completed_at


@pytest.mark.django_db(transaction=True)
@pytest.mark.postgres
@pytest.mark.mysql
@pytest.mark.parametrize("delete", [lambda now: trim(now, 0), lambda now: retention.discard(left(), using="default")])
def test_rows_that_another_process_is_deleting_are_passed_over(delete: Any, now: Any) -> None:
    rows = ended(now, 3, 2, 1)
    with transaction.atomic():
        list(JobExecution.objects.select_for_update().filter(pk=rows[0].pk))
        assert in_thread(lambda: delete(now)) == 2
    assert left() == {rows[0].pk}


@pytest.mark.django_db(transaction=True)
@pytest.mark.postgres
@pytest.mark.mysql
@pytest.mark.parametrize("delete", [lambda now: trim(now, 0), lambda now: retention.discard(left(), using="default")])
def test_what_is_deleted_waits_for_no_other_row_that_a_transaction_holds(delete: Any, now: Any) -> None:
    """MySQL, once it knows how small the table is, would read all of it to delete some."""
    kept, *others = JobExecutionFactory.build_batch(300, now=now, ok=True, worker=WorkerFactory(now=now))
    JobExecution.objects.bulk_create([kept, *others])
    analyze()
    with held(kept):
        assert in_thread(lambda: delete(now)) == len(others)
    assert left() == {kept.pk}


@pytest.mark.parametrize("others", [(), ("acc.before", "acc.first")], ids=["one name", "three names"])
def test_a_trim_reads_a_bounded_part_of_the_index(
    others: tuple[str, ...], now: Any, django_assert_max_num_queries: Any
) -> None:
    ended(now, *range(20))
    with django_assert_max_num_queries(5 if connection.vendor != "sqlite" else 3):
        trim(now, 5, limit=5, other_names=others)
