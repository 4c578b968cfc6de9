"""The database dispatcher on PostgreSQL: NOTIFY to other processes, each of them a dispatcher of its own here."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import OperationalError, connection, transaction
from django.test import TestCase
from django.test.utils import CaptureQueriesContext

from django_jobs.dispatchers.database import DatabaseDispatcher
from django_jobs.dispatchers.postgres import channel, listener, sender
from django_jobs.dispatchers.postgres.channel import APPLICATION_NAME, Message
from django_jobs.fields import uuid7
from tests.acc import jobs
from tests.dispatchers.contract import DispatcherContract
from tests.dispatchers.peers import Peer, make_peer
from tests.support import wait_for
from tests.threads import race

__all__ = ["make_peer"]

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True)]

SESSIONS = "FROM pg_stat_activity WHERE application_name = %s AND datname = current_database()"


@pytest.fixture
def peer(make_peer: Callable[..., Peer]) -> Peer:
    peer = make_peer()
    peer.hear_nothing_yet()
    return peer


@pytest.fixture
def pusher() -> Iterator[DatabaseDispatcher]:
    """The dispatcher of a process that pushes, and runs nothing."""
    connection.ensure_connection()
    made = DatabaseDispatcher({})
    yield made
    made.close()


def sessions() -> int:
    """Return how many connections listen."""
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT count(*) {SESSIONS}", [APPLICATION_NAME])
        return int(cursor.fetchone()[0])


def end_sessions() -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT pg_terminate_backend(pid) {SESSIONS}", [APPLICATION_NAME])


class TestPostgresDispatcher(DispatcherContract):
    @pytest.fixture
    def dispatcher(self, peer: Peer) -> DatabaseDispatcher:
        return peer.dispatcher


def test_it_tells_that_workers_are_notified(pusher: DatabaseDispatcher) -> None:
    assert pusher.describe() == "NOTIFY"


def test_a_hint_wakes_the_workers_of_its_queue_in_another_process(pusher: DatabaseDispatcher, peer: Peer) -> None:
    mail, others = threading.Event(), threading.Event()
    peer.dispatcher.subscribe(["mail"], mail.set)
    peer.dispatcher.subscribe(None, others.set, exclude=["mail"])
    pusher.hint("mail", [uuid7()])
    assert mail.wait(20)
    assert peer.woken.wait(20)
    pusher.cancel_hint([uuid7()])
    assert peer.looked.wait(20)
    assert not others.is_set()


def test_a_cancel_hint_makes_other_processes_look_and_wakes_nobody(pusher: DatabaseDispatcher, peer: Peer) -> None:
    pusher.cancel_hint([uuid7()])
    assert peer.looked.wait(20)
    assert not peer.woken.is_set()


def test_a_push_that_is_committed_wakes_another_process_with_one_statement(peer: Peer) -> None:
    with CaptureQueriesContext(connection) as queries:
        jobs.mark.push()
    statements = [query["sql"] for query in queries]
    assert [statement.split("(")[0] for statement in statements if "pg_notify" in statement] == ["SELECT pg_notify"]
    assert statements.index(statements[-1]) == len(statements) - 1
    assert "pg_notify" in statements[-1]
    assert peer.woken.wait(20)


def test_a_push_that_is_rolled_back_tells_nobody(peer: Peer) -> None:
    with CaptureQueriesContext(connection) as queries, transaction.atomic():
        jobs.mark.push()
        transaction.set_rollback(True)
    assert not [query for query in queries if "pg_notify" in query["sql"]]


@pytest.mark.django_db
def test_nothing_is_sent_from_the_transaction_of_a_test(pusher: DatabaseDispatcher) -> None:
    with CaptureQueriesContext(connection) as queries, TestCase.captureOnCommitCallbacks(execute=True):
        jobs.mark.push()
    assert not [query for query in queries if "pg_notify" in query["sql"]]


def test_one_thread_and_one_connection_listen_however_many_subscriptions_there_are(peer: Peer) -> None:
    more = [peer.dispatcher.subscribe([f"queue {number}"], lambda: None) for number in range(5)]
    assert sessions() == 1
    for subscription in more:
        subscription.close()
    assert sessions() == 1
    peer.subscription.close()
    wait_for(lambda: sessions() == 0, 20, "its connection is closed")


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, Message]]:
    """Which messages were sent, but for those to the sender itself, and when that was decided."""
    times: list[tuple[float, Message]] = []
    send, take = channel.send, sender.Sender._take
    # By identity. A thread may be held up between the decision and the statement.
    decided: dict[int, float] = {}

    def decide(own: sender.Sender) -> Message:
        message = take(own)
        decided[id(message)] = own._sent_at
        return message

    def note(connection: Any, message: Message) -> None:
        if not message.probe:
            times.append((decided[id(message)], message))
        send(connection, message)

    monkeypatch.setattr(sender.Sender, "_take", decide)
    monkeypatch.setattr(channel, "send", note)
    return times


def test_many_threads_notify_at_most_once_in_10_ms_and_nothing_is_lost(
    pusher: DatabaseDispatcher, peer: Peer, sent: list[tuple[float, Message]]
) -> None:
    heard = {f"{thread} {number}": threading.Event() for thread in range(6) for number in range(25)}
    for queue, event in heard.items():
        peer.dispatcher.subscribe([queue], event.set)

    def push(thread: int) -> None:
        for number in range(25):
            pusher.hint(f"{thread} {number}", [uuid7()])
            time.sleep(0.001)

    race(*(lambda thread=thread: push(thread) for thread in range(6)))
    for queue, event in heard.items():
        assert event.wait(20), queue
    times = sorted(at for at, _ in sent)
    assert min(later - before for before, later in pairwise(times)) >= sender.GAP
    assert 1 < len(times) < len(heard)
    assert set().union(*(message.queues or set() for _, message in sent)) == set(heard)


@pytest.fixture
def long_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a busy machine have time for two hints within one gap."""
    monkeypatch.setattr(sender, "GAP", 0.5)
    monkeypatch.setattr(sender, "GOODBYE", 5.0)


@pytest.mark.usefixtures("long_gap")
def test_what_comes_right_after_a_notify_is_sent_when_the_gap_is_over(
    pusher: DatabaseDispatcher, peer: Peer, sent: list[tuple[float, Message]]
) -> None:
    late = threading.Event()
    peer.dispatcher.subscribe(["late"], late.set)
    pusher.hint("early", [uuid7()])
    pusher.hint("late", [uuid7()])
    pusher.cancel_hint([uuid7()])
    assert late.wait(20)
    assert peer.looked.wait(20)
    assert [(message.queues, message.cancel) for _, message in sent] == [({"early"}, False), ({"late"}, True)]


@pytest.mark.usefixtures("long_gap")
def test_what_comes_after_a_notify_that_took_the_waiting_along_has_a_gap_of_its_own(
    pusher: DatabaseDispatcher, sent: list[tuple[float, Message]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "MAX_GAP", sender.GAP)
    over, pushed = threading.Event(), threading.Event()

    def sleep(seconds: float) -> None:
        time.sleep(seconds)
        if threading.current_thread() is not threading.main_thread() and not over.is_set():
            over.set()
            assert pushed.wait(20)

    monkeypatch.setattr(sender, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    pusher.hint("early", [uuid7()])
    pusher.hint("waiting", [uuid7()])
    assert over.wait(20)
    for queue in ("along", "next"):
        pusher.hint(queue, [uuid7()])
    pushed.set()
    wait_for(lambda: len(sent) == 3, 20, "all were sent")
    assert [message.queues for _, message in sent] == [{"early"}, {"waiting", "along"}, {"next"}]
    assert sent[2][0] - sent[1][0] >= sender.GAP


@pytest.mark.usefixtures("long_gap")
def test_what_is_still_to_be_sent_goes_out_before_the_process_ends(
    pusher: DatabaseDispatcher, sent: list[tuple[float, Message]]
) -> None:
    pusher.hint("early", [uuid7()])
    pusher.hint("late", [uuid7()])
    # What Python calls at its end.
    pusher._peers._sender.flush()
    assert [message.queues for _, message in sent] == [{"early"}, {"late"}]


def test_a_thread_without_a_connection_opens_none(pusher: DatabaseDispatcher, peer: Peer) -> None:
    opened = []

    def push() -> None:
        pusher.hint("default", [uuid7()])
        opened.append(connection.connection)

    # Another thread sends it, and the second time there has to be a new one.
    for _ in range(2):
        peer.woken.clear()
        race(push)
        assert peer.woken.wait(20)
        wait_for(lambda: "django_jobs notify" not in {thread.name for thread in threading.enumerate()}, 20, "it ends")
    assert opened == [None, None]


def test_the_sending_threads_connection_is_made_anew_when_it_is_broken(
    pusher: DatabaseDispatcher, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "LINGER", 1.0)
    send, pids = channel.send, list[int]()

    def send_and_note(own: Any, message: Message) -> None:
        send(own, message)
        pids.append(own.connection.info.backend_pid)

    def arrives() -> bool:
        peer.woken.clear()
        # In a thread that has no connection.
        race(lambda: pusher.hint("default", [uuid7()]))
        return peer.woken.wait(0.3)

    monkeypatch.setattr(channel, "send", send_and_note)
    wait_for(arrives, 20, "it is sent")
    # What is sent may arrive before it is noted.
    wait_for(lambda: pids, 20, "its connection is known")
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(%s)", [pids[-1]])
    wait_for(arrives, 20, "it is sent again")


def test_a_thread_whose_connection_is_broken_has_its_hint_sent_by_another(
    pusher: DatabaseDispatcher, peer: Peer
) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        pid = cursor.fetchone()[0]

    def end() -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(%s)", [pid])

    race(end)
    pusher.hint("default", [uuid7()])
    assert peer.woken.wait(20)
    connection.close()


def test_a_notify_that_nobody_can_send_is_told_once(
    pusher: DatabaseDispatcher, peer: Peer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    send, tried = channel.send, threading.Semaphore(0)

    def fail(connection: Any, message: Message) -> None:
        tried.release()
        raise OperationalError("the queue of notifications\nis full")

    with caplog.at_level(logging.WARNING, "django_jobs"):
        monkeypatch.setattr(channel, "send", fail)
        for _ in range(3):
            pusher.hint("default", [uuid7()])
            # By the thread that pushes, unless the gap is not over, and by the one that sends what is left.
            assert tried.acquire(timeout=20)
            pusher._peers._sender.flush()
        monkeypatch.setattr(channel, "send", send)
        pusher.hint("default", [uuid7()])
        assert peer.woken.wait(20)
    assert [record.getMessage() for record in caplog.records] == [
        "NOTIFY failed; workers find rows by polling: the queue of notifications is full"
    ]


def test_a_lost_connection_is_made_anew_and_everybody_is_woken_once(
    pusher: DatabaseDispatcher, peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "django_jobs"):
        end_sessions()
        assert peer.woken.wait(20)
        assert peer.looked.wait(20)
        wait_for(lambda: len(caplog.records) == 2, 20, "it told that it works again")
    assert peer.subscription.problem() is None
    lost, again = (record.getMessage() for record in caplog.records)
    assert lost.startswith("no wake-ups arrive, work is found by polling: the listening connection is lost: ")
    assert again == "wake-ups arrive again"
    peer.woken.clear()
    pusher.hint("default", [uuid7()])
    assert peer.woken.wait(20)


def test_a_connection_lost_again_and_again_is_told_of_once(peer: Peer, caplog: pytest.LogCaptureFixture) -> None:
    listening = peer.dispatcher._peers._listener
    assert listening is not None
    with caplog.at_level(logging.WARNING, "django_jobs"):
        for _ in range(3):
            heard = listening._heard
            end_sessions()
            wait_for(lambda heard=heard: listening._heard > heard, 20, "it hears itself on a new connection")
    assert [record.getMessage() == "wake-ups arrive again" for record in caplog.records] == [False, True]


def test_while_the_server_is_away_the_problem_is_told_without_its_address_and_the_log_stays_short(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    open_listener, tried = channel.open_listener, threading.Semaphore(0)

    def refuse(alias: str) -> Any:
        tried.release()
        raise OperationalError('connection to server at "10.0.0.5" failed\nIs the server running?')

    with caplog.at_level(logging.WARNING, "django_jobs"):
        monkeypatch.setattr(channel, "open_listener", refuse)
        end_sessions()
        for _ in range(3):
            assert tried.acquire(timeout=20)
        problem = peer.subscription.problem()
        assert problem == listener.LOST
        monkeypatch.setattr(channel, "open_listener", open_listener)
        wait_for(lambda: peer.subscription.problem() is None, 20, "it is back")
        wait_for(lambda: len(caplog.records) > 1, 20, "it told so")
    assert len(caplog.records) == 2


def test_a_listener_that_does_not_hear_itself_says_so_once_and_notices_when_it_does(
    pusher: DatabaseDispatcher,
    make_peer: Callable[..., Peer],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(listener, "PROBE_PATIENCE", 0.1)
    monkeypatch.setattr(listener, "UNHEARD_PAUSE", 0.1)
    send, probes = channel.send, threading.Semaphore(0)

    def swallow(connection: Any, message: Message) -> None:
        if message.probe:
            probes.release()
        else:
            send(connection, message)

    with caplog.at_level(logging.WARNING, "django_jobs"):
        monkeypatch.setattr(channel, "send", swallow)
        peer = make_peer()
        peer.hear_nothing_yet()
        for _ in range(3):
            assert probes.acquire(timeout=20)
        assert peer.subscription.problem() == listener.UNHEARD
        assert [record.getMessage() for record in caplog.records] == [
            f"no wake-ups arrive, work is found by polling: {listener.UNHEARD}"
        ]
        monkeypatch.setattr(channel, "send", send)
        wait_for(lambda: peer.subscription.problem() is None, 20, "it hears itself")
        assert caplog.records[-1].getMessage() == "wake-ups arrive again"
    peer.woken.clear()
    pusher.hint("default", [uuid7()])
    assert peer.woken.wait(20)


def test_a_healthy_listener_tries_again_and_again_whether_it_hears_itself(
    make_peer: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "PROBE_INTERVAL", 0.05)
    send, probes = channel.send, threading.Semaphore(0)

    def note(connection: Any, message: Message) -> None:
        probes.release()
        send(connection, message)

    monkeypatch.setattr(channel, "send", note)
    peer = make_peer()
    peer.hear_nothing_yet()
    for _ in range(4):
        assert probes.acquire(timeout=20)
    assert peer.subscription.problem() is None


def test_with_a_driver_that_cannot_listen_the_start_line_and_the_problem_say_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    channel.missing_driver.cache_clear()
    monkeypatch.setattr("django.db.backends.postgresql.base.psycopg_version", lambda: (2, 9, 10))
    try:
        dispatcher = DatabaseDispatcher({})
        problem = dispatcher.subscribe(None, lambda: None).problem()
        assert problem == "NOTIFY and LISTEN need psycopg 3.2, found 2.9.10"
        assert dispatcher.describe() == f"within this process ({problem})"
        with CaptureQueriesContext(connection) as queries:
            dispatcher.hint("default", [uuid7()])
        assert (len(queries), sessions()) == (0, 0)
        dispatcher.close()
    finally:
        channel.missing_driver.cache_clear()


def test_the_alias_to_listen_on_may_be_another_one(
    pusher: DatabaseDispatcher, make_peer: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    aliases, open_listener = list[str](), channel.open_listener
    # As if both led to the same database.
    monkeypatch.setattr(channel, "open_listener", lambda alias: aliases.append(alias) or open_listener("default"))
    peer = make_peer(LISTEN="other")
    peer.hear_nothing_yet()
    assert aliases == ["other"]
    pusher.hint("default", [uuid7()])
    assert peer.woken.wait(20)


def test_turned_off_nothing_is_sent_and_nobody_listens() -> None:
    dispatcher = DatabaseDispatcher({"LISTEN": False})
    subscription = dispatcher.subscribe(None, lambda: None)
    with CaptureQueriesContext(connection) as queries:
        dispatcher.hint("default", [uuid7()])
        dispatcher.cancel_hint([uuid7()])
    assert (len(queries), sessions(), subscription.problem()) == (0, 0, None)
    dispatcher.close()


def test_tables_in_different_schemas_have_different_channels() -> None:
    with connection.cursor() as cursor:
        ours = channel.name(connection)
        cursor.execute("CREATE SCHEMA elsewhere; CREATE TABLE elsewhere.django_jobs_jobexecution ()")
        try:
            assert channel.name(connection) == ours
            cursor.execute("SET search_path = elsewhere, public")
            assert channel.name(connection) != ours
        finally:
            cursor.execute("RESET search_path; DROP SCHEMA elsewhere CASCADE")
