from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import connection, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from django_jobs.exceptions import Cancelled
from django_jobs.execution.executor import aexecute, execute
from django_jobs.execution.outcomes import Aborted, Failed, Ok
from tests.acc.models import Thing
from tests.execution.runs import PATIENCE, outcome_of, run_of, spin
from tests.support import wait_for

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def slot() -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """One thread, as those of the pool, for everything that a test sends to it."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(max_workers=1) as thread:
        yield lambda work: thread.submit(work).result(PATIENCE)
        thread.submit(connections.close_all).result(PATIENCE)


def run_in(slot: Any, handler: Callable[[], Any], **options: Any) -> Any:
    return slot(lambda: outcome_of(handler, manage_connections=True, **options))


def leave_a_block_open() -> None:
    transaction.atomic().__enter__()
    Thing.objects.create(name="lost")


def leave_a_broken_block_open() -> None:
    leave_a_block_open()
    transaction.set_rollback(True)


def leave_nested_blocks_open() -> None:
    leave_a_block_open()
    leave_a_block_open()


def leave_autocommit_off() -> None:
    transaction.set_autocommit(False)
    Thing.objects.create(name="lost")


def leave_a_transaction_of_its_own_open() -> None:
    with connection.cursor() as cursor:
        cursor.execute("BEGIN")
    Thing.objects.create(name="lost")


def close_inside_a_block() -> None:
    leave_a_block_open()
    connection.close()


def raise_inside_a_block_left_open() -> None:
    leave_a_block_open()
    raise ValueError


@pytest.mark.parametrize(
    "handler",
    [
        leave_a_block_open,
        leave_a_broken_block_open,
        leave_nested_blocks_open,
        leave_autocommit_off,
        leave_a_transaction_of_its_own_open,
        close_inside_a_block,
        raise_inside_a_block_left_open,
    ],
)
def test_a_transaction_left_open_is_rolled_back_and_reported(
    handler: Callable[[], None], slot: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="django_jobs"):
        run_in(slot, handler)
    assert "tests.sample left a transaction open on 'default'" in caplog.text
    assert Thing.objects.count() == 0
    # The next run on this thread writes as if nothing had been.
    assert run_in(slot, lambda: Thing.objects.create(name="kept").pk) != Ok()
    assert [thing.name for thing in Thing.objects.all()] == ["kept"]


class Mysqlclient:
    """A connection of PyMySQL that tells as little about its transaction as one of mysqlclient."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw

    def __getattr__(self, name: str) -> Any:
        if name == "server_status":
            raise AttributeError(name)
        return getattr(self._raw, name)


@pytest.mark.mysql
def test_a_transaction_is_rolled_back_where_the_driver_does_not_tell_of_it(
    slot: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(connections["default"].settings_dict, "CONN_MAX_AGE", None)

    def handler() -> None:
        connection.ensure_connection()
        connection.connection = Mysqlclient(connection.connection)
        leave_a_transaction_of_its_own_open()

    assert run_in(slot, handler) == Ok()
    assert run_in(slot, lambda: Thing.objects.create(name="kept").pk) != Ok()
    assert [thing.name for thing in Thing.objects.all()] == ["kept"]


def test_a_run_that_leaves_nothing_open_is_not_reported(slot: Any, caplog: pytest.LogCaptureFixture) -> None:
    def handler() -> None:
        with transaction.atomic():
            Thing.objects.create(name="kept")

    with caplog.at_level(logging.WARNING, logger="django_jobs"):
        assert run_in(slot, handler) == Ok()
    assert caplog.text == ""
    assert Thing.objects.count() == 1


def test_the_log_of_queries_does_not_grow_from_run_to_run(
    slot: Any, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long-lived worker grew by the query log of each connection: procrastinate-org/procrastinate#1316."""
    settings.DEBUG = True

    def handler() -> int:
        Thing.objects.count()
        return len(connection.queries_log)

    monkeypatch.setitem(connections["default"].settings_dict, "CONN_MAX_AGE", None)
    # The first run also logs what its connection asks for when it is made.
    run_in(slot, handler)
    assert [run_in(slot, handler) for _ in range(2)] == [Ok(result=1)] * 2
    assert slot(lambda: len(connection.queries_log)) == 0


def test_a_connection_past_its_age_is_closed_and_a_young_one_is_kept(
    slot: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_kept() -> bool:
        run_in(slot, lambda: Thing.objects.count())
        return bool(slot(lambda: connection.connection is not None))

    monkeypatch.setitem(connections["default"].settings_dict, "CONN_MAX_AGE", None)
    assert is_kept()
    slot(connections.close_all)
    monkeypatch.setitem(connections["default"].settings_dict, "CONN_MAX_AGE", 0)
    assert not is_kept()


def test_an_interrupted_run_leaves_no_connection(slot: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(connections["default"].settings_dict, "CONN_MAX_AGE", None)
    arrived = threading.Event()

    def handler() -> None:
        Thing.objects.count()
        arrived.set()
        spin(threading.Event())

    run = run_of(handler, manage_connections=True)

    def interrupt() -> None:
        arrived.wait(PATIENCE)
        wait_for(lambda: run.gate.interrupt(Cancelled) and run.gate.sent, PATIENCE, "it was not sent")

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert isinstance(slot(lambda: execute(run)), Aborted)
    thread.join()
    assert slot(lambda: connection.connection is None)


def test_a_connection_that_cannot_be_cleaned_is_dropped(
    slot: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: BaseDatabaseWrapper) -> None:
        raise LookupError("no idea")

    slot(Thing.objects.count)
    monkeypatch.setattr(BaseDatabaseWrapper, "close_if_unusable_or_obsolete", broken)
    assert run_in(slot, lambda: None) == Ok()
    monkeypatch.undo()
    assert "could not be reset" in caplog.text
    assert slot(Thing.objects.count) == 0


@pytest.mark.django_db
def test_inside_a_callers_transaction_connections_are_left_alone() -> None:
    """A wrapper that closed connections in eager mode broke the caller's transaction: Koed00/django-q#127, #368."""
    before = connection.connection
    with transaction.atomic():
        Thing.objects.create(name="callers")
        assert outcome_of(lambda: Thing.objects.create(name="jobs").pk, manage_connections=False) != Ok()
        assert connection.connection is before
        assert Thing.objects.count() == 2


def test_a_coroutine_uses_the_database_and_its_lines_are_captured() -> None:
    """State written inside a running loop was refused with SynchronousOnlyOperation: django-celery-results#495."""
    made = Thing.objects.create(name="made")

    async def handler(pk: int) -> str:
        await asyncio.sleep(0)
        thing = await Thing.objects.aget(pk=pk)
        logging.getLogger("tests.sample").warning("found %s", thing.name)
        return str(thing.name)

    run = run_of(handler, {"pk": made.pk}, manage_connections=True)
    assert asyncio.run(aexecute(run)) == Ok(result="made")
    assert [entry["message"] for entry in run.log_entries()] == ["found made"]


def test_coroutines_at_once_use_threads_of_their_own_and_close_their_connections() -> None:
    used: list[tuple[int, BaseDatabaseWrapper]] = []
    both = threading.Barrier(2)

    def query() -> None:
        # Each waits for the other: on one thread they would never meet.
        both.wait(PATIENCE)
        Thing.objects.count()
        used.append((threading.get_ident(), connections["default"]))

    async def handler() -> None:
        await sync_to_async(query)()

    async def scenario() -> list[Any]:
        return await asyncio.gather(*(aexecute(run_of(handler, manage_connections=True)) for _ in range(2)))

    assert asyncio.run(scenario()) == [Ok(), Ok()]
    assert len({thread for thread, _ in used}) == 2
    for _, wrapper in used:
        wait_for(lambda wrapper=wrapper: wrapper.connection is None, PATIENCE, "the connection stayed open")


@pytest.mark.django_db
def test_a_coroutine_inside_a_callers_transaction_shares_it() -> None:
    async def handler() -> int:
        return await Thing.objects.acount()

    with transaction.atomic():
        Thing.objects.create(name="callers")
        assert outcome_of(handler, manage_connections=False) == Ok(result=1)


@pytest.mark.parametrize("exception", [SystemExit(1), KeyboardInterrupt(), asyncio.CancelledError()])
def test_no_exception_of_a_coroutine_ends_its_loop(exception: BaseException) -> None:
    async def handler() -> None:
        raise exception

    async def scenario() -> tuple[Any, Any]:
        return await aexecute(run_of(handler)), await aexecute(run_of(lambda: asyncio.sleep(0, "next")))

    first, second = asyncio.run(scenario())
    assert isinstance(first, Failed)
    assert first.message.startswith(type(exception).__name__)
    assert second == Ok(result="next")
