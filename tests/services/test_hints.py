"""When rows are announced, how often, and when not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from django.db import connection, transaction

from django_jobs import dispatchers
from django_jobs.fields import uuid7
from django_jobs.models import JobExecution
from tests.acc import jobs
from tests.dispatchers.recording import RecordingDispatcher

if TYPE_CHECKING:
    from pytest_django import DjangoCaptureOnCommitCallbacks


class Oops(Exception):
    pass


@pytest.mark.django_db(transaction=True)
def test_a_push_outside_of_a_transaction_is_announced_at_once(recorder: RecordingDispatcher) -> None:
    row = jobs.mark.using(queue="mail", priority=7).push()
    assert recorder.hints == [("mail", [row.pk], 7)]


def test_of_rows_announced_together_the_best_go_first(recorder: RecordingDispatcher) -> None:
    normal, other, best, second = (uuid7() for _ in range(4))
    rows = [("mail", 0, normal), ("default", 0, other), ("mail", -50, best), ("mail", -50, second)]
    dispatchers.announce_all(rows)
    assert recorder.hints == [("mail", [best, second], 50), ("default", [other], 0), ("mail", [normal], 0)]


@pytest.mark.django_db(transaction=True)
def test_pushes_of_one_transaction_are_announced_together_after_its_commit(recorder: RecordingDispatcher) -> None:
    """The wake-up follows the commit, and a rolled-back block or savepoint gives none.

    Fault: a broker was told inside the block, so a worker started before the commit (RealOrangeOne/django-tasks-rq#11,
    rq/django-rq#187).
    """
    with transaction.atomic():
        first = jobs.mark.push()
        second = jobs.slow.push()
        urgent = jobs.mark.using(priority="high").push()
        mail = jobs.mark.using(queue="mail").push()
        third = jobs.mark.push()
        assert recorder.hints == []
        assert len(connection.run_on_commit) == 2
    assert recorder.hints == [
        ("default", [urgent.pk], 50),
        ("default", [first.pk, second.pk, third.pk], 0),
        ("mail", [mail.pk], 0),
    ]


@pytest.mark.django_db(transaction=True)
def test_a_rolled_back_transaction_is_not_announced(recorder: RecordingDispatcher) -> None:
    with pytest.raises(Oops), transaction.atomic():
        jobs.mark.push()
        raise Oops
    # What comes next on the same connection does not find the batch of the dead transaction.
    with transaction.atomic():
        row = jobs.mark.push()
    assert recorder.hints == [("default", [row.pk], 0)]
    assert JobExecution.objects.count() == 1


@pytest.mark.django_db(transaction=True)
def test_a_rolled_back_savepoint_takes_only_its_own_hints_along(recorder: RecordingDispatcher) -> None:
    with transaction.atomic():
        before = jobs.mark.push()
        with pytest.raises(Oops), transaction.atomic():
            jobs.mark.push()
            with transaction.atomic():
                jobs.mark.push()
            raise Oops
        with transaction.atomic():
            kept = jobs.mark.push()
        after = jobs.mark.push()
    announced = [pk for _queue, ids, _priority in recorder.hints for pk in ids]
    assert sorted(announced) == sorted([before.pk, kept.pk, after.pk])
    assert sorted(announced) == sorted(JobExecution.objects.values_list("pk", flat=True))


@pytest.mark.django_db(transaction=True)
def test_a_block_without_a_savepoint_belongs_to_the_one_around_it(recorder: RecordingDispatcher) -> None:
    with pytest.raises(Oops), transaction.atomic():
        with transaction.atomic(savepoint=False):
            jobs.mark.push()
        raise Oops
    with transaction.atomic(), transaction.atomic(savepoint=False):
        row = jobs.mark.push()
    assert recorder.hints == [("default", [row.pk], 0)]


@pytest.mark.django_db(transaction=True)
def test_without_autocommit_nothing_is_announced_and_the_row_is_there(recorder: RecordingDispatcher) -> None:
    transaction.set_autocommit(False)
    try:
        row = jobs.mark.push()
        keyed = jobs.mark.using(key="k").push()
        assert jobs.mark.using(key="k").push() == keyed
        transaction.commit()
    finally:
        transaction.set_autocommit(True)
    assert recorder.hints == []
    assert set(JobExecution.objects.values_list("pk", flat=True)) == {row.pk, keyed.pk}


@pytest.mark.django_db
def test_a_test_case_captures_the_hints_of_its_block_even_after_earlier_pushes(
    recorder: RecordingDispatcher, django_capture_on_commit_callbacks: DjangoCaptureOnCommitCallbacks
) -> None:
    jobs.mark.push()
    with django_capture_on_commit_callbacks(execute=True):
        first = jobs.mark.push()
        with transaction.atomic():
            second = jobs.mark.push()
    with django_capture_on_commit_callbacks(execute=True):
        third = jobs.mark.push()
    assert [ids for _queue, ids, _priority in recorder.hints] == [[first.pk], [second.pk], [third.pk]]


@pytest.mark.django_db(transaction=True)
def test_a_push_from_a_callback_after_commit_is_announced(recorder: RecordingDispatcher) -> None:
    pushed: list[JobExecution] = []
    with transaction.atomic():
        transaction.on_commit(lambda: pushed.append(jobs.mark.push()))
        first = jobs.mark.push()
    assert recorder.hints == [("default", [pushed[0].pk], 0), ("default", [first.pk], 0)]
