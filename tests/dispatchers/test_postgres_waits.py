"""How long the threads of the postgres dispatcher wait, and what ends them, mostly by a clock of ours."""

from __future__ import annotations

import atexit
import logging
import random
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import OperationalError, connection

from django_jobs.dispatchers.postgres import channel, listener, sender
from django_jobs.dispatchers.postgres.channel import Message
from django_jobs.dispatchers.postgres.listener import Listener, _are_shared, _UnheardError
from django_jobs.dispatchers.postgres.peers import Peers
from django_jobs.dispatchers.postgres.sender import Sender

Unstarted = Callable[[], Listener]


@pytest.fixture
def time_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Stop the clock of both modules at a moment."""

    def stop(moment: float) -> None:
        for module in (listener, sender):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: moment))

    stop(100.0)
    return stop


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A listener whose thread does not run; what it hears is in `heard`."""
    monkeypatch.setattr(listener, "start_thread", lambda run, name: threading.current_thread())
    heard: list[Message] = []
    made: Any = Listener(name="me", using="default", via="default", hear=heard.append, catch_up=lambda: None)
    made.heard = heard
    with made._bell, made._ear:
        yield made


@pytest.mark.parametrize(
    ("probes", "heard", "sent_at", "rest"), [(1, 0, 98.0, 3.0), (1, 0, 95.0, 0.0), (1, 1, 90.0, 50.0)]
)
def test_a_listener_looks_at_its_probe_when_that_is_late_or_old(
    made: Any, time_of: Any, probes: int, heard: int, sent_at: float, rest: float
) -> None:
    made._probes, made._heard, made._probed_at = probes, heard, sent_at
    assert made._probe() == rest


def test_a_probe_that_is_too_late_counts_as_unheard(made: Any, time_of: Any) -> None:
    made._probes, made._heard, made._probed_at = 1, 0, 94.9
    with pytest.raises(_UnheardError):
        made._probe()


def test_a_listener_does_not_pass_on_what_its_own_process_sends(made: Any) -> None:
    theirs = Message(sender="you", queues=frozenset({"mail"}))
    made._receive(Message(sender="me", queues=frozenset({"mail"})))
    made._receive(theirs)
    assert made.heard == [theirs]


def test_a_listener_that_is_stopped_by_what_it_calls_does_not_wait_for_itself(made: Any) -> None:
    made.stop()
    assert made._stopped.is_set()


def test_a_listener_tries_again_after_growing_pauses_and_seldom_where_it_hears_nothing(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random, "uniform", lambda least, most: most)
    errors: list[Exception] = [*[OperationalError("down")] * 8, _UnheardError(), OperationalError("down")]
    pauses: list[float] = []

    def fail(alias: str) -> None:
        raise errors.pop(0)

    monkeypatch.setattr(channel, "open_listener", fail)
    made._stopped = SimpleNamespace(is_set=lambda: not errors, wait=pauses.append)
    made._run()
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 60.0, 5.0])


def test_sessions_are_shared_that_change_or_are_behind_both_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_session", next)

    def shared(ours: list[int], theirs: list[int]) -> bool:
        asked: Any = iter(ours), iter(theirs)
        return _are_shared(*asked)

    assert not shared([1] * 5, [2] * 5)
    assert shared([1, 1, 1, 1, 3], [2] * 5)
    assert shared([1] * 5, [2, 2, 2, 2, 1])
    # A pool that rotates the ordinary connections only says nothing about ours.
    assert not shared([1] * 5, [2, 3, 2, 3, 2])


def test_the_gap_doubles_while_sends_follow_one_another(time_of: Callable[[float], None]) -> None:
    made, gaps = Sender("me"), []
    for moment in (100.0, 100.01, 100.03, 100.07, 101.0):
        time_of(moment)
        made._take()
        gaps.append(made._gap)
    made.close()
    assert gaps == [0.01, 0.02, 0.04, 0.04, 0.01]


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("fails", [False, True])
def test_in_a_process_that_can_start_no_thread_a_push_sends_itself_and_hears_of_failures(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("can't start new thread")

    def send(connection: Any, message: Message) -> None:
        if fails:
            raise OperationalError("the connection is broken")
        sent.append(message.queues)

    sent: list[Any] = []
    monkeypatch.setattr(sender, "start_thread", refuse)
    monkeypatch.setattr(channel, "send", send)
    made = Sender("me")
    # The second comes within the gap, which a thread would wait for.
    for _ in range(2):
        if fails:
            with pytest.raises(OperationalError):
                made.send("default", queue="mail")
        else:
            made.send("default", queue="mail")
    made.close()
    assert sent == ([] if fails else [{"mail"}] * 2)


@pytest.mark.django_db(transaction=True)
def test_the_sending_thread_tells_of_a_failure_once_until_it_succeeds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    outcomes = iter([True, True, False, True])

    def send(connection: Any, message: Message) -> None:
        if next(outcomes):
            raise OperationalError("down")

    monkeypatch.setattr(channel, "send", send)
    made = Sender("me")
    with caplog.at_level(logging.WARNING, "django_jobs"):
        for _ in range(4):
            made._send_or_tell("default", Message(sender="me"))
    made.close()
    assert caplog.messages == ["NOTIFY failed; workers find rows by polling: down"] * 2


def test_a_closed_sender_is_forgotten_by_the_end_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks: list[Any] = []
    monkeypatch.setattr(atexit, "register", hooks.append)
    monkeypatch.setattr(atexit, "unregister", hooks.remove)
    made = Sender("me")
    assert hooks == [made.flush]
    made.close()
    assert hooks == []


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_a_listener_that_was_stopped_has_closed_its_connection() -> None:
    listens = threading.Event()
    made = Listener(name="me", using="default", via="default", hear=lambda message: None, catch_up=listens.set)
    assert listens.wait(20)
    made.stop(20)
    assert not made._thread.is_alive()


@pytest.mark.postgres
@pytest.mark.django_db
def test_with_autocommit_off_nobody_is_told_and_the_problem_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(connection.settings_dict, "AUTOCOMMIT", False)
    made = Peers(None, lambda message: None)
    assert not made.are_reached
    assert "AUTOCOMMIT off" in str(made.problem())
    made.close()
