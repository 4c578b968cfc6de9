"""What holds of all verbs."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest
from django.db import connections

from django_jobs import transitions
from django_jobs.models import Worker
from django_jobs.states import FINAL, TRANSITIONS, Status
from tests.factories import JobExecutionFactory
from tests.support import assert_consistent
from tests.verbs import VERBS, claim, finish, stored

pytestmark = pytest.mark.django_db

committed = pytest.mark.django_db(transaction=True)


def test_every_transition_but_the_first_has_a_verb_here() -> None:
    assert set(VERBS) == set(TRANSITIONS) - {"push"}


@pytest.mark.parametrize("status", list(Status))
@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_moves_rows_of_its_sources_and_no_others(verb: str, status: Status, now: datetime) -> None:
    move = TRANSITIONS[verb]
    row = JobExecutionFactory(
        now=now,
        status=status,
        max_attempts=3,
        key="K",
        scheduled_at=now - timedelta(seconds=1),
        parked_reason="paused" if verb == "unpark" else "",
    )
    before = stored(row)
    count = VERBS[verb](row, now)
    after = stored(row)
    if status in move.sources:
        assert (count, after["status"] in move.targets) == (1, True)
    else:
        assert (count, after) == (0, before)
    assert_consistent()


def test_final_rows_are_never_claimed_whatever_the_clock_says(now: datetime, worker: Worker) -> None:
    for status in FINAL:
        JobExecutionFactory(now=now, status=status)
    assert claim(worker, now + timedelta(seconds=40)) == []
    assert claim(worker, now - timedelta(days=1)) == []


@committed
def test_verbs_leave_no_transaction_open(now: datetime, worker: Worker) -> None:
    JobExecutionFactory(now=now)
    (row,) = claim(worker, now)
    finish(transitions.succeed(row), now=now)
    assert connections["default"].get_autocommit() and not connections["default"].in_atomic_block
