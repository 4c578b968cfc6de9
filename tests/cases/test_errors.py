"""Exceptions that are hard to show, and attempts that are hard to count."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from django_jobs import JobContext, Retry, clock, transitions
from django_jobs.models import JobExecution
from django_jobs.states import Status
from tests.acc import jobs
from tests.portable.fixtures import finished, portable_tasks
from tests.runtime.workers import a_worker, ended, jobs_of
from tests.support import Ledger, assert_consistent, wait_for

pytestmark = pytest.mark.django_db(transaction=True)


class TwoArguments(Exception):
    """It cannot be made again from its own `args`."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.a, self.b = a, b


class Unspeakable(Exception):
    """Neither str() nor repr() has an answer."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class HoldsLock(Exception):
    """It cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


def local() -> Exception:
    class Inner(Exception):
        pass

    return Inner("from inside")


def circle() -> Exception:
    one, other = ValueError("one"), KeyError("other")
    one.__cause__, other.__cause__ = other, one
    return one


@pytest.mark.medium
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: TwoArguments(1, 2), "TwoArguments"),
        (Unspeakable, "Unspeakable: <str() failed>"),
        (HoldsLock, "HoldsLock: holds a lock"),
        (local, "Inner: from inside"),
        (circle, "ValueError: one"),
    ],
)
def test_an_exception_that_is_hard_to_show_fails_only_its_own_run(make: Callable[[], Exception], name: str) -> None:
    """An exception that cannot be pickled, or whose own str() raises, takes the worker down with it.

    Sources: celery/celery#6185, #6990, #2943, Yelp/paasta PR#1335.
    """
    tries: list[int] = []

    def burst() -> None:
        tries.append(1)
        raise make()

    with jobs_of(burst) as [bursting], a_worker(concurrency=1):
        row = ended(bursting.push())
        assert (row.status, row.error) == (Status.ERROR, name)
        assert name.partition(":")[0] in row.errors[0]["exception"]
        assert ended(bursting.push()).status == Status.ERROR
    assert len(tries) == 2
    assert_consistent()


@pytest.mark.medium
@pytest.mark.parametrize("retries", [0, 1, 2])
def test_a_job_that_fails_runs_once_and_then_once_for_each_retry(retries: int) -> None:
    """Edge values of the limit give one run too many, or dead jobs that are not queued again.

    Sources: OCA/queue#814, django-q2/django-q2 PR#185.
    """
    tries: list[int] = []

    def burst(ctx: JobContext) -> None:
        tries.append(ctx.attempt)
        raise ValueError

    with jobs_of(burst, retry=Retry(retries, backoff=None)) as [bursting], a_worker() as worker:
        row = bursting.push()

        def is_over() -> bool:
            transitions.promote(JobExecution.objects.all(), now=clock.now("default"))
            worker.wake()
            row.refresh_from_db()
            return row.is_final

        wait_for(is_over, 15, "it failed for good")
    assert row.status == Status.ERROR
    assert tries == list(range(1, retries + 2))
    assert (row.attempt, row.max_attempts, len(row.errors)) == (retries + 1, retries + 1, retries + 1)
    assert_consistent()


@pytest.mark.medium
def test_the_strict_order_of_priorities_is_the_one_of_the_push(ledger: Ledger) -> None:
    """Which end of the scale comes first is not the same in every place, and lower ones starve unannounced.

    Here -100..100, higher first, and strict. Source: taskcluster/taskcluster#9131.
    """
    priorities = [0, -100, 100, "low", "high", 7, "critical", "normal", -7]
    rows = [jobs.mark.using(priority=priority).push(tag=str(n)) for n, priority in enumerate(priorities)]
    with a_worker(concurrency=1):
        for row in rows:
            ended(row)
    order = [priorities[int(entry.tag)] for entry in ledger.starts()]
    assert order == [100, "critical", "high", 7, 0, "normal", -7, "low", -100]
    with portable_tasks() as tasks:
        numbers = [0, -100, 100, 7, -7]
        enqueued = [tasks.mark.using(priority=number).enqueue(number) for number in numbers]
        with a_worker(concurrency=1):
            for result in enqueued:
                finished(result)
        assert tasks.ran == sorted(numbers, reverse=True)
