"""Every verb of transitions in one table, each applied to one row: for the tests that try all of them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from django_jobs import transitions
from django_jobs.models import JobExecution, Worker
from django_jobs.states import Status
from django_jobs.transitions import Ending
from tests.factories import JobExecutionFactory, WorkerFactory


def only(*rows: JobExecution) -> Any:
    return JobExecution.objects.filter(pk__in=[row.pk for row in rows])


def running(now: datetime, **fields: Any) -> JobExecution:
    return JobExecutionFactory(**{"running": True, "now": now, "max_attempts": 3, **fields})


def stored(row: JobExecution) -> dict[str, Any]:
    return JobExecution.objects.values().get(pk=row.pk)


def claim(worker: Worker | Any, now: datetime, **changes: Any) -> list[JobExecution]:
    options = {
        "queue": "default",
        "names": ["acc.mark"],
        "worker_id": getattr(worker, "pk", worker),
        "limit": 100,
        "now": now,
        "using": "default",
    }
    return transitions.claim(**{**options, **changes})


def finish(*endings: Ending, now: datetime) -> dict[Any, Status]:
    return transitions.finish(endings, now=now, using="default")


# What is said of the attempt of a lost worker.
LOST: dict[str, Any] = {"error": "its worker is lost", "entry": {"exception": "WorkerLost", "worker": "host pid 1"}}


ENTRY = {"exception": "builtins.ValueError", "message": "boom"}

ENDINGS: dict[str, Callable[[JobExecution, datetime], Ending]] = {
    "succeed": lambda row, now: transitions.succeed(row),
    "fail": lambda row, now: transitions.fail(row, error="boom", entry=ENTRY),
    "reschedule": lambda row, now: transitions.reschedule(row, at=now + timedelta(seconds=9)),
    "release": lambda row, now: transitions.release(row),
    "abort": lambda row, now: transitions.abort(row),
}

# What one verb does to one row, and how many rows it says it moved.
VERBS: dict[str, Callable[[JobExecution, datetime], int]] = {
    **{
        verb: lambda row, now, make=make: len(finish(make(row, now), now=now))  # type: ignore[misc]
        for verb, make in ENDINGS.items()
    },
    "claim": lambda row, now: len(claim(WorkerFactory(now=now), now)),
    "promote": lambda row, now: transitions.promote(only(row), now=now),
    "start_now": lambda row, now: transitions.start_now(only(row), now=now),
    "park": lambda row, now: transitions.park(only(row), "paused", now=now),
    "unpark": lambda row, now: transitions.unpark(only(row), now=now),
    "rescue": lambda row, now: len(transitions.rescue(only(row), now=now, **LOST)),
    "bury": lambda row, now: len(transitions.bury(only(row), now=now, **LOST)),
    "cancel": lambda row, now: transitions.cancel(only(row), now=now, by="7", by_name="Ada"),
    "retry": lambda row, now: transitions.retry(only(row), now=now, retries=2, by="7", by_name="Ada"),
}
