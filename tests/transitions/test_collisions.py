"""Verbs that collide with other statements."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import OperationalError, connection, transaction

from django_jobs import contention, transitions
from django_jobs.models import JobExecution, Worker
from django_jobs.states import TRANSITIONS, Status
from tests.factories import JobExecutionFactory, ready_for
from tests.support import wait_for
from tests.threads import race
from tests.verbs import LOST, VERBS, claim, finish, only, running, stored

pytestmark = pytest.mark.django_db

committed = pytest.mark.django_db(transaction=True)


def collision() -> OperationalError:
    """Return the error with which this engine gives up on a statement because of another one."""
    if connection.vendor == "sqlite":
        cause: Exception = sqlite3.OperationalError("database is locked")
        cause.sqlite_errorcode = sqlite3.SQLITE_BUSY  # type: ignore[attr-defined]
    elif connection.vendor == "postgresql":
        from psycopg import errors

        cause = errors.DeadlockDetected("deadlock detected")
    else:
        import pymysql

        cause = pymysql.err.OperationalError(1213, "Deadlock found when trying to get lock")
    error = OperationalError(*cause.args)
    error.__cause__ = cause
    return error


@contextmanager
def colliding(times: int, when: str) -> Iterator[list[str]]:
    """Let the first statements that begin with `when` collide with others; collect those statements."""
    seen: list[str] = []

    def wrapper(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if sql.lstrip().startswith(when):
            seen.append(sql)
            if len(seen) <= times:
                raise collision()
        return execute(sql, params, many, context)

    with connection.execute_wrapper(wrapper):
        yield seen


@committed
def test_a_claim_that_collides_is_repeated(now: datetime, worker: Worker) -> None:
    row = JobExecutionFactory(now=now)
    with colliding(2, "UPDATE") as seen:
        (claimed,) = claim(worker, now)
    assert (claimed.pk, claimed.run_no, len(seen)) == (row.pk, 1, 3)
    assert (stored(row)["run_no"], stored(row)["attempt"]) == (1, 1)


@committed
@pytest.mark.medium
def test_every_other_verb_that_collides_is_repeated_too(now: datetime) -> None:
    for verb in sorted(set(VERBS) - {"claim"}):
        row = ready_for(verb, now)
        with colliding(2, "UPDATE") as seen:
            assert VERBS[verb](row, now) == 1, verb
        assert len(seen) == 3, verb


@committed
def test_a_rescue_that_collides_still_names_the_rows_it_moved_before(now: datetime) -> None:
    rows = [running(now), running(now), running(now)]
    seen = []

    def wrapper(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if sql.startswith("UPDATE"):
            seen.append(sql)
            if len(seen) == 3:
                raise collision()
        return execute(sql, params, many, context)

    with connection.execute_wrapper(wrapper):
        moved = transitions.rescue(only(*rows), now=now, **LOST)
    assert sorted(moved) == sorted(row.pk for row in rows)
    assert {row["rescues"] for row in JobExecution.objects.values("rescues")} == {1}


@committed
def test_a_verb_that_always_collides_gives_up_in_the_end(now: datetime, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(contention, "time", SimpleNamespace(sleep=pauses.append))
    row = JobExecutionFactory(now=now)
    with colliding(99, "UPDATE") as seen, pytest.raises(OperationalError):
        transitions.park(only(row), "paused", now=now)
    assert (len(seen), len(pauses)) == (contention.TRIES, contention.TRIES - 1)


@committed
def test_nothing_is_repeated_inside_a_callers_transaction(now: datetime) -> None:
    for verb in ("cancel", "release", "rescue"):
        row = JobExecutionFactory(now=now, status=min(TRANSITIONS[verb].sources), max_attempts=3)
        with colliding(99, "UPDATE") as seen, pytest.raises(OperationalError), transaction.atomic():
            VERBS[verb](row, now)
        assert len(seen) == 1, verb


@committed
@pytest.mark.postgres
@pytest.mark.mysql
def test_a_batch_survives_a_real_deadlock(now: datetime) -> None:
    first, second = running(now), running(now)
    holding, may_go_on = threading.Event(), threading.Event()

    def other() -> str:
        try:
            with transaction.atomic():
                only(second).update(hinted_at=now)
                holding.set()
                assert may_go_on.wait(20)
                only(first).update(hinted_at=now)
        except OperationalError as error:
            return "victim" if contention.is_contention(error) else repr(error)
        return "survivor"

    def batch() -> Any:
        assert holding.wait(20)
        return finish(transitions.succeed(first), transitions.succeed(second), now=now)

    def watch() -> None:
        assert holding.wait(20)
        # The batch has written the first row and waits for the second.
        wait_for(lambda: not _lockable(first), 20, "the batch holds the first row")
        may_go_on.set()

    fate, answer, _ = race(other, batch, watch)
    assert fate in {"victim", "survivor"}
    assert answer == {first.pk: Status.OK, second.pk: Status.OK}
    assert set(JobExecution.objects.values_list("status", flat=True)) == {"ok"}


def _lockable(row: JobExecution) -> bool:
    with transaction.atomic():
        return only(row).select_for_update(skip_locked=True).exists()
