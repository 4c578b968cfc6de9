"""Rows with keys that wait for their time."""

from __future__ import annotations

import pytest

from django_jobs import KeyTaken
from django_jobs.models import JobExecution
from django_jobs.states import Status
from tests.acc import jobs
from tests.cases.test_stopping import Start, became, canary
from tests.support import Ledger, assert_consistent, wait_for


@pytest.mark.subprocess
def test_keys_of_rows_that_come_due_together_hold_nothing_up(runjobs: Start, ledger: Ledger) -> None:
    """When due rows are moved on, one conflicts with its twin or with itself, and none of the batch is moved.

    Source: riverqueue/river PR#619.
    """
    process = runjobs().wait_ready()
    keyed = jobs.mark.using(key="K", delay=1.2).push(tag="keyed")
    due = jobs.mark.push_many([jobs.mark.using(delay=1).item(tag="due") for _ in range(50)])
    # A second push says what waits already, and changes nothing of it.
    second = jobs.mark.using(key="K", delay=0, priority="critical").push(tag="second")
    assert (second.pk, second.created, second.status, second.rank) == (keyed.pk, False, Status.SCHEDULED, keyed.rank)
    assert second.scheduled_at == keyed.scheduled_at
    for row in (*due, keyed):
        ended = became(row, Status.OK)
        # By the database's clock, of which this process and the worker each have an estimate of their own.
        assert ended.started_at >= ended.scheduled_at
    assert [entry.tag for entry in ledger.starts(keyed.pk)] == ["keyed"]
    canary(ledger, process)
    assert_consistent()


@pytest.mark.subprocess
@pytest.mark.slow
def test_a_row_that_waits_for_its_next_try_keeps_its_key_from_a_twin(runjobs: Start, ledger: Ledger) -> None:
    """See above: a running row that fails into waiting meets one that waits with its key.

    Here none can be there: the key stays with the row until it has ended. Source: riverqueue/river PR#619.
    """
    process = runjobs().wait_ready()
    over = jobs.boom_retry.using(key="K").push(tag="first")
    became(over, Status.ERROR)
    waiting = jobs.boom_retry.using(key="K", delay=0.6).push(tag="second")
    assert waiting.created is True
    with pytest.raises(KeyTaken):
        over.retry()
    wait_for(lambda: len(ledger.starts(waiting.pk)) == 3, 10, "it was tried three times")
    became(waiting, Status.ERROR)
    over.refresh_from_db()
    assert (over.status, len(ledger.starts(over.pk))) == (Status.ERROR, 3)
    assert JobExecution.objects.count() == 2
    over.retry()
    wait_for(lambda: len(ledger.starts(over.pk)) == 6, 10, "it was tried three times more")
    became(over, Status.ERROR)
    canary(ledger, process)
    assert_consistent()
