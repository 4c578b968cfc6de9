"""Pushes while a transaction is open on another database than that of the executions."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import pytest
from django.db import connections, transaction

from django_jobs import DefinitionError, transitions
from django_jobs.models import JobExecution
from tests.acc import jobs
from tests.dispatchers.recording import RecordingDispatcher

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


def test_the_insert_waits_for_the_commit_of_the_other_database(recorder: RecordingDispatcher) -> None:
    with transaction.atomic(using="other"):
        row = jobs.mark.push(tag="a")
        many = jobs.mark.push_many([{"tag": "b"}, {"tag": "c"}])
        assert row.pk is not None
        assert [each.created for each in (row, *many)] == [None] * 3
        assert not JobExecution.objects.exists()
    assert list(JobExecution.objects.order_by("pk")) == [row, *many]
    assert [each.created for each in (row, *many)] == [True] * 3
    assert recorder.hints == [("default", [row.pk], 0), ("default", [each.pk for each in many], 0)]


def test_a_rollback_there_leaves_nothing_here(recorder: RecordingDispatcher) -> None:
    with pytest.raises(ZeroDivisionError), transaction.atomic(using="other"):
        jobs.mark.push()
        raise ZeroDivisionError
    assert not JobExecution.objects.exists()
    assert recorder.hints == []


def test_with_a_transaction_on_both_the_insert_does_not_wait() -> None:
    with transaction.atomic(using="other"), transaction.atomic():
        assert jobs.mark.push().created is True
        assert JobExecution.objects.count() == 1


def test_a_key_is_refused_with_the_reason() -> None:
    keyed = jobs.mark.using(key="k")
    with transaction.atomic(using="other"):
        with pytest.raises(DefinitionError, match="inside a transaction on the database 'other'"):
            keyed.push()
        with pytest.raises(DefinitionError, match="inside a transaction on the database 'other'"):
            jobs.mark.push_many([{"tag": "a"}, jobs.mark.item(key="k")])
    assert not JobExecution.objects.exists()
    assert keyed.push().created is True


def test_an_insert_that_fails_after_that_commit_is_logged_as_lost(caplog: pytest.LogCaptureFixture) -> None:
    refusal = mock.patch.object(transitions, "insert", side_effect=ZeroDivisionError)
    with refusal, caplog.at_level(logging.ERROR, "django_jobs"), transaction.atomic(using="other"):
        row = jobs.mark.push()
    assert f"lost, since the other database had already committed: acc.mark {row.pk}" in caplog.text


def test_the_rows_go_where_the_router_says(settings: Any, recorder: RecordingDispatcher) -> None:
    settings.DATABASE_ROUTERS = [f"{__name__}.JobsElsewhere"]
    with transaction.atomic(using="other"):
        row = jobs.mark.using(key="k").push()
        assert connections["other"].run_on_commit
    assert row._state.db == "other"
    assert not JobExecution.objects.using("default").exists()
    again = jobs.mark.using(key="k").push()
    assert (again, again.created) == (row, False)
    again.cancel()
    assert JobExecution.objects.using("other").get().is_final
    assert again.retry().status == "pending"
    assert [ids for _queue, ids, _priority in recorder.hints] == [[row.pk], [row.pk]]


class JobsElsewhere:
    """Send the executions to the other database."""

    def db_for_write(self, model: Any, **hints: Any) -> str | None:
        return "other" if model._meta.app_label == "django_jobs" else None

    db_for_read = db_for_write
