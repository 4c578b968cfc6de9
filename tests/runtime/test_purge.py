"""Purge: delete the executions of jobs that no process knows, on request."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

import pytest

from django_jobs import retention
from django_jobs.models import JobExecution
from django_jobs.runtime import purge as purging
from django_jobs.runtime.purge import Leftover, leftovers, purge, unregistered
from django_jobs.services import bulk
from django_jobs.states import Parked
from tests.factories import JobExecutionFactory, WorkerFactory

pytestmark = pytest.mark.django_db


def rows(name: str, **fields: Any) -> None:
    worker = WorkerFactory(names=[])
    for kind in ("ok", "failed", "cancelled", "running"):
        JobExecutionFactory(job_name=name, worker=worker, **{kind: True}, **fields)
    JobExecutionFactory(job_name=name, pending=True, **fields)
    JobExecutionFactory(job_name=name, scheduled=True, **fields)
    JobExecutionFactory(job_name=name, parked=True, parked_reason=Parked.UNKNOWN, **fields)


def left(name: str) -> Counter[str]:
    return Counter(JobExecution.objects.filter(job_name=name).values_list("status", flat=True))


def test_finished_and_parked_rows_of_unknown_names_are_purged_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log tells who did it, since no row is left to tell."""
    caplog.set_level("INFO", logger="django_jobs")
    rows("old.gone")
    rows("acc.mark")

    assert unregistered(using="default") == ["old.gone"]
    assert leftovers(["old.gone"], using="default") == [Leftover(name="old.gone", finished=3, parked=1, live=3)]
    assert sum(purge(["old.gone", "acc.mark"], using="default", by="ops")) == 4

    assert left("old.gone") == {"pending": 1, "scheduled": 1, "running": 1}
    assert sum(left("acc.mark").values()) == 7
    assert caplog.messages == ["4 executions of old.gone were purged by ops"]


def test_a_name_that_a_process_listed_a_moment_ago_is_known() -> None:
    """A deploy replaces the processes one after the other, and code here may be older than theirs."""
    JobExecutionFactory(job_name="new.one", ok=True)
    worker = WorkerFactory(names=["new.one"], roles=["scheduler"], stopped=True)
    assert unregistered(using="default") == []
    assert list(purge(["new.one"], using="default")) == []
    worker.heartbeat_at -= timedelta(minutes=2)
    worker.save()
    assert unregistered(using="default") == ["new.one"]


def test_a_name_that_is_deployed_meanwhile_is_left_alone_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: of many rows those went as well whose job a worker had begun to run again."""
    monkeypatch.setattr(bulk, "PAGE", 2)
    for _ in range(4):
        JobExecutionFactory(job_name="old.back", parked=True)
        JobExecutionFactory(job_name="old.back", ok=True)
    cancels = purging.transitions.cancel

    def cancel(*args: Any, **kwargs: Any) -> int:
        WorkerFactory(names=["old.back"])
        return cancels(*args, **kwargs)

    monkeypatch.setattr(purging.transitions, "cancel", cancel)
    assert list(purge(["old.back"], using="default")) == []
    assert left("old.back") == {"cancelled": 2, "scheduled": 2, "ok": 4}


def test_it_goes_portion_by_portion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(purging, "BATCH", 2)
    assert retention.BATCH != 2
    for _ in range(3):
        JobExecutionFactory(job_name="old.gone", parked=True)
        JobExecutionFactory(job_name="old.gone", cancelled=True)
    assert list(purge(["old.gone"], using="default")) == [2, 2, 2]
    assert not JobExecution.objects.exists()


def test_the_key_of_a_purged_row_is_free() -> None:
    for kind in ("parked", "ok"):
        JobExecutionFactory(job_name="old.gone", key="k", **{kind: True})
    assert sum(purge(["old.gone"], using="default")) == 2
    JobExecutionFactory(job_name="old.gone", key="k")
