"""The best pending rows of several queues, read in one statement."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest

from django_jobs.runtime import heads as module
from django_jobs.runtime.heads import heads
from tests.factories import JobExecutionFactory

pytestmark = pytest.mark.django_db

NAMES = ["acc.mark"]


def test_they_come_best_first_over_all_queues(now: datetime) -> None:
    late = JobExecutionFactory(queue="a", now=now)
    urgent = JobExecutionFactory(queue="b", now=now, priority=50)
    early = JobExecutionFactory(queue="c", now=now - timedelta(seconds=9))
    for other in ({"queue": "d"}, {"job_name": "acc.add"}, {"running": True}, {"scheduled": True}):
        JobExecutionFactory(**{"queue": "a", "now": now, **other})
    found = heads(["a", "b", "c", "empty"], NAMES, limit=10, using="default")
    assert [(row.pk, row.queue, row.rank, row.job_name) for row in found] == [
        (row.pk, row.queue, row.rank, "acc.mark") for row in (urgent, early, late)
    ]


def test_of_each_queue_come_no_more_than_the_limit(now: datetime) -> None:
    first = {queue: JobExecutionFactory.create_batch(3, queue=queue, now=now)[0] for queue in ("a", "b")}
    assert {row.queue: row.pk for row in heads(["a", "b"], NAMES, limit=1, using="default")} == {
        queue: row.pk for queue, row in first.items()
    }
    assert len(heads(["a", "b"], NAMES, limit=2, using="default")) == 4


@pytest.mark.parametrize(
    ("changes", "statements"),
    [({}, 1), ({"AT_ONCE": 2}, 2), ({"PARAMETERS": 3}, 3)],
    ids=["few", "many queues", "many names"],
)
def test_many_queues_take_a_few_statements_and_give_the_same(
    changes: dict[str, int],
    statements: int,
    now: datetime,
    monkeypatch: pytest.MonkeyPatch,
    django_assert_num_queries: Any,
) -> None:
    expected = [JobExecutionFactory(queue=queue, now=now).pk for queue in ("c", "a", "b")]
    for name, value in changes.items():
        monkeypatch.setattr(module, name, value)
    with django_assert_num_queries(statements):
        assert [row.pk for row in heads(["a", "b", "c"], NAMES, limit=1, using="default")] == expected


def test_no_queue_costs_no_statement(django_assert_num_queries: Any) -> None:
    with django_assert_num_queries(0):
        assert heads([], NAMES, limit=1, using="default") == []
