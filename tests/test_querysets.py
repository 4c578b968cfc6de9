"""The vocabulary of reads, and the digest of a key."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from hypothesis import given
from hypothesis import strategies as st

from django_jobs.models import JobExecution, Worker
from django_jobs.querysets import key_digest
from django_jobs.states import FINAL, LIVE, Status
from tests.cases.routers import Replica
from tests.factories import JobExecutionFactory, WorkerFactory

pytestmark = pytest.mark.django_db

SECOND = timedelta(seconds=1)


@pytest.fixture
def one_of_each(now: datetime) -> dict[str, JobExecution]:
    return {status.value: JobExecutionFactory(now=now, status=status) for status in Status}


def names(rows: Any) -> set[str]:
    return set(rows.values_list("status", flat=True))


def test_rows_are_told_by_where_they_stand(one_of_each: dict[str, JobExecution]) -> None:
    rows = JobExecution.objects
    assert names(rows.pending()) == {"pending"}
    assert names(rows.running()) == {"running"}
    assert names(rows.scheduled()) == {"scheduled"}
    assert names(rows.live()) == set(LIVE)
    assert names(rows.finished()) == set(FINAL)
    assert set(FINAL) | set(LIVE) == set(Status)
    assert not FINAL & LIVE


def test_a_parked_row_is_scheduled_for_another_reason_than_its_time(now: datetime) -> None:
    parked = JobExecutionFactory(now=now, parked=True)
    JobExecutionFactory(now=now, scheduled=True)
    assert list(JobExecution.objects.parked()) == [parked]


def test_a_row_is_due_from_its_very_instant_on(now: datetime) -> None:
    row = JobExecutionFactory(now=now, scheduled=True, scheduled_at=now)
    JobExecutionFactory(now=now, parked=True, scheduled_at=now - SECOND)
    JobExecutionFactory(now=now, status=Status.PENDING, scheduled_at=now - SECOND)
    assert list(JobExecution.objects.due(now)) == [row]
    assert not JobExecution.objects.due(now - timedelta(microseconds=1)).exists()


def test_a_worker_has_the_running_rows_of_its_id(now: datetime) -> None:
    worker = WorkerFactory(now=now)
    row = JobExecutionFactory(now=now, running=True, worker=worker)
    JobExecutionFactory(now=now, ok=True, worker=worker)
    JobExecutionFactory(now=now, running=True)
    assert list(JobExecution.objects.of_worker(worker.pk)) == [row]


def test_rows_of_a_key_are_found_live_or_not_and_no_others(now: datetime) -> None:
    rows = [
        JobExecutionFactory(now=now, key="K", organization_id="A", status=status) for status in (Status.PENDING, *FINAL)
    ]
    JobExecutionFactory(now=now, key="K", job_name="acc.slow")
    JobExecutionFactory(now=now, key="k", organization_id="A")
    found = JobExecution.objects.with_key("A", "K").filter(job_name="acc.mark")
    assert {row.pk for row in found} == {row.pk for row in rows}


def test_only_finished_rows_are_deleted(one_of_each: dict[str, JobExecution]) -> None:
    assert JobExecution.objects.all().delete_finished() == 3
    assert names(JobExecution.objects.all()) == set(LIVE)
    assert JobExecution.objects.all().delete_finished() == 0


def test_deleting_is_one_statement_and_keeps_to_the_set(now: datetime) -> None:
    rows = JobExecutionFactory.create_batch(3, now=now, ok=True)
    with CaptureQueriesContext(connection) as queries:
        assert JobExecution.objects.filter(pk__in=[row.pk for row in rows[:2]]).delete_finished() == 2
    assert len(queries) == 1
    assert list(JobExecution.objects.all()) == rows[2:]


@pytest.mark.django_db(databases=["default", "other"])
def test_rows_are_deleted_where_they_are_written(now: datetime, settings: Any) -> None:
    JobExecutionFactory(now=now, ok=True)
    settings.DATABASE_ROUTERS = [Replica()]
    assert JobExecution.objects.all().delete_finished() == 1
    assert not JobExecution.objects.using("default").exists()


def test_a_worker_that_is_silent_or_has_stopped_is_not_fresh(now: datetime) -> None:
    fresh = {WorkerFactory(now=now).pk, WorkerFactory(now=now, heartbeat_at=now - 44 * SECOND).pk}
    WorkerFactory(now=now, heartbeat_at=now - 45 * SECOND)
    WorkerFactory(now=now, dead=True)
    WorkerFactory(now=now, stopped=True)
    WorkerFactory(now=now, dead=True, stopped=True)
    assert set(Worker.objects.fresh(now).values_list("pk", flat=True)) == fresh


# The digest of a key


def test_a_digest_fits_its_column_whatever_the_key_is() -> None:
    """Long names and keys pass on SQLite and raise elsewhere. (Koed00/django-q#489)"""
    for key in ("", "K", "k" * 256, "k" * 10_000, "💥" * 300):
        assert len(key_digest(None, key)) == 48
        assert len(key_digest("o" * 64, key)) == 48


def test_two_long_keys_with_one_beginning_are_two_keys() -> None:
    assert key_digest(None, "k" * 1000 + "a") != key_digest(None, "k" * 1000 + "b")


# Values of a stable function: rows of today must be found by the code of tomorrow.
@pytest.mark.parametrize(
    ("organization", "key", "digest"),
    [
        (None, "K", "a9e5d61499766784385068b99544abd8d3d60b76155f955f"),
        ("acme", "K", "a6c58e76946427792dddb0a4fc51d4d8dd8fb5dd20deb69a"),
    ],
)
def test_a_digest_never_changes(organization: str | None, key: str, digest: str) -> None:
    assert key_digest(organization, key) == digest


def test_no_organization_is_not_the_organization_without_a_name() -> None:
    assert key_digest(None, "K") != key_digest("", "K")


# Few characters, so that pairs often differ only in where the one part ends.
keys = st.text("a0:|/\0\né💥", max_size=4)
organizations = st.none() | keys


@given(first=st.tuples(organizations, keys), second=st.tuples(organizations, keys))
def test_different_pairs_have_different_digests(first: tuple[Any, str], second: tuple[Any, str]) -> None:
    assert (key_digest(*first) == key_digest(*second)) == (first == second)


@pytest.mark.parametrize(("first", "second"), [(("a", "bc"), ("ab", "c")), (("a\nb", "c"), ("a", "b\nc"))])
def test_what_is_organization_and_what_is_key_is_kept_apart(first: tuple[str, str], second: tuple[str, str]) -> None:
    assert key_digest(*first) != key_digest(*second)
