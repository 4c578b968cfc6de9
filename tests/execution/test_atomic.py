from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import DatabaseError, DataError, InterfaceError, OperationalError, connection, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from django_jobs import retries
from django_jobs.exceptions import Cancelled, Reschedule
from django_jobs.execution import atomic
from django_jobs.execution.executor import execute
from django_jobs.execution.outcomes import Aborted, Failed, Lost, Ok, Rescheduled
from django_jobs.execution.run import Run
from django_jobs.models import JobExecution
from django_jobs.states import Status
from tests.acc.models import Thing
from tests.execution.runs import PATIENCE, run_of, spin
from tests.factories import JobExecutionFactory
from tests.support import wait_for

pytestmark = pytest.mark.django_db(transaction=True)

AT_ONCE = retries.Retry(3, backoff=None)


@pytest.fixture(autouse=True)
def _same_connection() -> Iterator[None]:
    yield
    connection.close()


def effect() -> None:
    Thing.objects.create(name="effect")


def atomic_run(handler: Any = effect, **options: Any) -> Run:
    run = run_of(handler, atomic=True, retry=AT_ONCE, max_attempts=4, **options)

    def finish_inside(outcome: Ok) -> bool:
        # In the handler's transaction, as the fenced end of the row.
        Thing.objects.create(name="end")
        return True

    run.finish_inside = finish_inside
    return run


def names() -> list[str]:
    return sorted(Thing.objects.values_list("name", flat=True))


def test_the_effects_and_the_end_of_the_row_are_committed_together() -> None:
    run = atomic_run()
    assert execute(run) == Ok()
    assert run.recorded
    assert names() == ["effect", "end"]


def test_a_failure_rolls_the_effects_back_and_is_written_later() -> None:
    def handler() -> None:
        effect()
        raise ValueError("no")

    run = atomic_run(handler)
    assert execute(run).message == "ValueError: no"
    assert not run.recorded
    assert names() == []


def test_a_run_that_lost_its_row_has_no_effect() -> None:
    run = atomic_run()
    run.finish_inside = lambda outcome: False
    assert execute(run) == Lost()
    assert not run.recorded
    assert names() == []


def test_reschedule_rolls_the_effects_back() -> None:
    def handler() -> None:
        effect()
        raise Reschedule(delay=5)

    assert execute(atomic_run(handler)) == Rescheduled(delay=5)
    assert names() == []


def test_an_interrupt_rolls_the_effects_back() -> None:
    arrived = threading.Event()

    def handler() -> None:
        effect()
        arrived.set()
        spin(threading.Event())

    run = atomic_run(handler)

    def interrupt() -> None:
        arrived.wait(PATIENCE)
        run.signal.set("cancelled")
        wait_for(lambda: run.gate.interrupt(Cancelled) and run.gate.sent, PATIENCE, "it was not sent")

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert execute(run) == Aborted()
    thread.join()
    assert names() == []


def test_a_database_error_that_the_handler_swallowed_fails_the_run() -> None:
    def handler() -> None:
        effect()
        try:
            with connection.cursor() as cursor:
                cursor.execute("SELECT nothing FROM nowhere")
        except DatabaseError:
            transaction.set_rollback(True)

    run = atomic_run(handler)
    outcome = execute(run)
    assert isinstance(outcome, Failed)
    assert outcome.message.startswith("TransactionManagementError")
    assert not run.recorded
    assert names() == []


def test_an_end_that_cannot_be_written_fails_the_run() -> None:
    def refuse(outcome: Ok) -> bool:
        raise DatabaseError("no space left")

    run = atomic_run()
    run.finish_inside = refuse
    assert execute(run).message == "DatabaseError: no space left"
    assert names() == []


def test_a_commit_hook_of_the_project_that_raises_takes_nothing_back(caplog: pytest.LogCaptureFixture) -> None:
    def handler() -> None:
        effect()

        def hook() -> None:
            raise ValueError("mail server is down")

        transaction.on_commit(hook)

    run = atomic_run(handler)
    assert execute(run) == Ok()
    assert run.recorded
    assert names() == ["effect", "end"]
    assert "a commit hook of tests.sample raised" in caplog.text
    assert "mail server is down" in caplog.text


class Answer:
    """A commit whose answer is lost, after it happened or instead of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, happens: bool) -> None:
        commit = BaseDatabaseWrapper._commit

        def lost(wrapper: BaseDatabaseWrapper) -> None:
            monkeypatch.undo()
            if happens:
                commit(wrapper)
            raise OperationalError("server closed the connection unexpectedly")

        monkeypatch.setattr(BaseDatabaseWrapper, "_commit", lost)


def test_a_commit_whose_answer_was_lost_is_settled_by_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    run = atomic_run()
    run.settle = lambda: names() == ["effect", "end"]
    Answer(monkeypatch, happens=True)
    assert execute(run) == Ok()
    assert run.recorded


def test_a_commit_that_did_not_happen_is_a_failure_with_another_try(monkeypatch: pytest.MonkeyPatch) -> None:
    run = atomic_run()
    run.settle = lambda: names() == ["effect", "end"]
    Answer(monkeypatch, happens=False)
    outcome = execute(run)
    assert outcome.message == "OperationalError: server closed the connection unexpectedly"
    assert outcome.delay == 0
    assert not run.recorded
    assert names() == []


@pytest.mark.parametrize(
    ("change", "happened"),
    [({}, False), ({"status": Status.OK}, True), ({"status": Status.OK, "run_no": 99}, False)],
    ids=["running", "ended", "another run"],
)
def test_only_the_end_of_this_very_run_tells_that_its_commit_happened(change: dict[str, Any], happened: bool) -> None:
    row = JobExecutionFactory(running=True)
    run = atomic_run()
    run.execution = row
    atomic.write_inside(run, "default")
    JobExecution.objects.filter(pk=row.pk).update(completed_at=row.started_at if change else None, **change)
    assert run.settle is not None
    assert run.settle() is happened


@pytest.mark.parametrize("why", ["it was given up", "it is no lost connection"])
def test_nobody_waits_for_a_commit_that_will_not_be_settled(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def settle() -> bool:
        raise InterfaceError("still no connection") if run.gate.abandoned else DataError("no such column")

    def wait(seconds: float) -> None:
        raise AssertionError("it waited")

    run = atomic_run()
    run.settle = settle
    if why == "it was given up":
        run.gate.abandoned = True
    monkeypatch.setattr(atomic, "time", SimpleNamespace(monotonic=time.monotonic, sleep=wait))
    assert not atomic._settle(run)


@pytest.mark.medium
def test_a_commit_is_settled_when_the_database_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []

    def settle() -> bool:
        looks.append(1)
        if len(looks) < 3:
            raise InterfaceError("still no connection")
        return True

    run = atomic_run()
    run.settle = settle
    Answer(monkeypatch, happens=True)
    assert execute(run) == Ok()
    assert run.recorded
    assert len(looks) == 3


@pytest.mark.medium
def test_a_commit_that_nobody_can_settle_is_left_to_the_fence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def settle() -> bool:
        raise InterfaceError("still no connection")

    run = atomic_run()
    run.settle = settle
    Answer(monkeypatch, happens=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(atomic, "SETTLE_PATIENCE", 0.1)
        assert isinstance(execute(run), Failed)
    assert not run.recorded
    assert "cannot tell whether the commit" in caplog.text


def test_a_transaction_that_cannot_begin_is_a_failure_and_the_handler_is_not_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[bool] = []

    def refuse(self: BaseDatabaseWrapper, *args: Any, **kwargs: Any) -> None:
        raise OperationalError("too many connections")

    monkeypatch.setattr(BaseDatabaseWrapper, "set_autocommit", refuse)
    outcome = execute(atomic_run(lambda: called.append(True)))
    monkeypatch.undo()
    assert outcome.message == "OperationalError: too many connections"
    assert called == []


@pytest.mark.django_db
def test_inside_a_callers_transaction_the_effects_are_the_callers() -> None:
    with transaction.atomic():
        assert execute(atomic_run()) == Ok()
        assert names() == ["effect", "end"]
        transaction.set_rollback(True)
    assert names() == []
