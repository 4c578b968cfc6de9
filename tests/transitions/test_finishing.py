"""How runs leave RUNNING: what is written, and for whom."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from django_jobs import transitions
from django_jobs.models import JobExecution
from django_jobs.states import Status
from tests.support import assert_consistent
from tests.verbs import ENDINGS, ENTRY, VERBS, finish, only, running, stored

pytestmark = pytest.mark.django_db

committed = pytest.mark.django_db(transaction=True)


def test_success_ends_the_row_and_frees_its_key(now: datetime) -> None:
    row = running(now, key="K", error="an earlier fault")
    at = now + timedelta(seconds=2)
    ending = transitions.succeed(row, result={"n": 1}, logs=[["a line"]], progress={"done": 1})
    assert finish(ending, now=at) == {row.pk: Status.OK}
    found = stored(row)
    expected = {"status": "ok", "completed_at": at, "updated_at": at, "active_key": None, "error": "", "attempt": 1}
    expected |= {"result": {"n": 1}, "logs": [["a line"]], "progress": {"done": 1}, "run_no": 1}
    expected |= {"worker_id": row.worker_id, "started_at": row.started_at}
    assert {name: found[name] for name in expected} == expected


def test_a_failure_ends_the_row_and_adds_to_its_history(now: datetime) -> None:
    row = running(now, key="K", errors=[{"message": "the first"}])
    at = now + timedelta(seconds=2)
    ending = transitions.fail(row, error="boom", entry=ENTRY, fingerprint="f" * 32, logs=[["a line"]])
    assert finish(ending, now=at) == {row.pk: Status.ERROR}
    found = stored(row)
    expected = {"status": "error", "completed_at": at, "active_key": None, "error": "boom", "attempt": 1}
    expected |= {"errors": [{"message": "the first"}, ENTRY], "fingerprint": "f" * 32, "logs": [["a line"]]}
    assert {name: found[name] for name in expected} == expected


def test_the_history_keeps_the_newest_twenty_errors(now: datetime) -> None:
    row = running(now, errors=[{"n": n} for n in range(25)])
    finish(transitions.fail(row, error="boom", entry={"n": 25}), now=now)
    assert [entry["n"] for entry in stored(row)["errors"]] == list(range(6, 26))


def test_a_retry_with_backoff_is_scheduled_and_its_attempt_counts(now: datetime) -> None:
    row = running(now, key="K")
    at, due = now + timedelta(seconds=2), now + timedelta(seconds=60)
    assert finish(transitions.reschedule(row, at=due, error="boom", entry=ENTRY), now=at) == {row.pk: Status.SCHEDULED}
    found = stored(row)
    expected = {"status": "scheduled", "scheduled_at": due, "attempt": 1, "run_no": 1, "completed_at": None}
    expected |= {"active_key": row.active_key, "error": "boom", "errors": [ENTRY], "updated_at": at, "hinted_at": at}
    assert {name: found[name] for name in expected} == expected


def test_a_handler_that_reschedules_itself_gets_its_attempt_back(now: datetime) -> None:
    row = running(now, error="an earlier fault", errors=[ENTRY])
    finish(transitions.reschedule(row, at=now + timedelta(seconds=60), refund=True), now=now)
    found = stored(row)
    assert (found["status"], found["attempt"], found["run_no"]) == ("scheduled", 0, 1)
    assert (found["error"], found["errors"]) == ("an earlier fault", [ENTRY])


def test_a_released_row_is_pending_with_its_attempt_given_back(now: datetime) -> None:
    row = running(now, key="K", attempt=2)
    at = now + timedelta(seconds=2)
    assert finish(transitions.release(row), now=at) == {row.pk: Status.PENDING}
    found = stored(row)
    expected = {"status": "pending", "attempt": 1, "run_no": 2, "completed_at": None, "hinted_at": at}
    expected |= {"active_key": row.active_key, "scheduled_at": row.scheduled_at}
    assert {name: found[name] for name in expected} == expected


def test_what_a_run_does_not_say_stays_as_it_was(now: datetime) -> None:
    row = running(now, logs=[["before"]], progress={"done": 3}, fingerprint="f" * 32, result={"old": 1})
    finish(transitions.release(row), now=now)
    found = stored(row)
    assert (found["logs"], found["progress"], found["fingerprint"]) == ([["before"]], {"done": 3}, "f" * 32)
    assert found["result"] is None


@pytest.mark.parametrize("verb", ["fail", "reschedule", "release", "abort", "rescue", "bury"])
def test_a_cancel_mark_decides_where_a_row_goes(verb: str, now: datetime) -> None:
    row = running(now, key="K")
    assert transitions.mark_cancel(only(row), now=now, by="7", by_name="Ada") == 1
    at = now + timedelta(seconds=2)
    # The run knows nothing of the mark: `row` was read before it was made.
    assert VERBS[verb](row, at) == 1
    found = stored(row)
    expected = {"status": "cancelled", "completed_at": at, "active_key": None, "cancelled_by_name": "Ada"}
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("verb", ["fail", "reschedule", "release"])
def test_finish_says_that_a_mark_turned_the_ending(verb: str, now: datetime) -> None:
    marked, other = running(now), running(now)
    transitions.mark_cancel(only(marked), now=now, by="", by_name="")
    plain = ENDINGS[verb](other, now).status
    answer = finish(ENDINGS[verb](marked, now), ENDINGS[verb](other, now), now=now)
    assert answer == {marked.pk: Status.CANCELLED, other.pk: plain}


def test_a_mark_that_comes_too_late_does_not_undo_a_success(now: datetime) -> None:
    row = running(now)
    transitions.mark_cancel(only(row), now=now, by="7", by_name="Ada")
    assert finish(transitions.succeed(row), now=now) == {row.pk: Status.OK}
    assert stored(row)["status"] == "ok"


@pytest.mark.parametrize("verb", ENDINGS)
def test_an_older_run_changes_nothing(verb: str, now: datetime) -> None:
    """A worker that froze, was rescued and thaws holds a run_no that is no longer the row's."""
    row = running(now, run_no=1)
    JobExecution.objects.filter(pk=row.pk).update(run_no=2, attempt=2)
    before = stored(row)
    assert finish(ENDINGS[verb](row, now), now=now + timedelta(seconds=1)) == {}
    assert stored(row) == before


def test_a_batch_writes_exactly_the_rows_that_are_still_its_own(now: datetime) -> None:
    rows = {verb: running(now, key=verb) for verb in ENDINGS}
    lost = {verb: running(now) for verb in ENDINGS}
    ended, gone = running(now), running(now)
    finish(transitions.succeed(ended), now=now)
    only(gone).delete()
    only(*lost.values()).update(run_no=7)
    before = {verb: stored(row) for verb, row in lost.items()}
    at = now + timedelta(seconds=1)
    batch = [ENDINGS[verb](row, at) for verb, row in [*lost.items(), *rows.items()]]
    batch += [transitions.fail(ended, error="boom"), transitions.succeed(gone)]
    answer = finish(*batch, now=at)
    assert answer == {row.pk: ENDINGS[verb](row, at).status for verb, row in rows.items()}
    assert {verb: stored(row)["status"] for verb, row in rows.items()} == {
        verb: ENDINGS[verb](row, at).status for verb, row in rows.items()
    }
    assert {verb: stored(row) for verb, row in lost.items()} == before
    assert stored(ended)["status"] == "ok"
    assert_consistent()


@committed
def test_a_batch_with_lost_rows_is_written_outside_a_transaction_too(now: datetime) -> None:
    kept, lost = running(now), running(now)
    only(lost).update(run_no=7)
    assert finish(transitions.succeed(lost), transitions.succeed(kept), now=now) == {kept.pk: Status.OK}
    assert {stored(kept)["status"], stored(lost)["status"]} == {"ok", "running"}


def test_an_empty_batch_writes_nothing(now: datetime) -> None:
    assert finish(now=now) == {}


def test_dropped_rows_are_deleted(now: datetime) -> None:
    rows = [running(now), running(now, run_no=5)]
    stays = running(now)
    batch = [transitions.succeed(row, drop=True) for row in rows]
    assert finish(*batch, transitions.succeed(stays), now=now) == dict.fromkeys(
        [row.pk for row in [*rows, stays]], Status.OK
    )
    assert list(JobExecution.objects.values_list("pk", flat=True)) == [stays.pk]


def test_a_failure_that_would_be_dropped_ends_cancelled_when_it_is_marked(now: datetime) -> None:
    plain, marked, lost = (running(now) for _ in range(3))
    JobExecution.objects.filter(pk=marked.pk).update(cancel_requested_at=now)
    JobExecution.objects.filter(pk=lost.pk).update(run_no=lost.run_no + 1)
    batch = [transitions.fail(row, error="E: x", drop=True) for row in (plain, marked, lost)]
    assert finish(*batch, now=now) == {plain.pk: Status.ERROR, marked.pk: Status.CANCELLED}
    assert set(JobExecution.objects.values_list("pk", "status")) == {
        (marked.pk, Status.CANCELLED),
        (lost.pk, Status.RUNNING),
    }


def test_a_dropped_row_is_deleted_only_by_its_own_run(now: datetime) -> None:
    mine, newer, ended = running(now), running(now), running(now)
    batch = [transitions.succeed(row, drop=True) for row in (mine, newer, ended)]
    only(newer).update(run_no=2)
    finish(transitions.fail(ended, error="boom"), now=now)
    assert finish(*batch, now=now) == {mine.pk: Status.OK}
    assert set(JobExecution.objects.values_list("pk", flat=True)) == {newer.pk, ended.pk}
