"""The loop: one thread, one tick after the other, through every fault."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import datetime
from queue import Queue
from typing import Any

import pytest
from django.db import connections

from django_jobs import loop as loops
from django_jobs.loop import MAX_BACKOFF, Loop

FOR_EVER = 3600.0


class Ticks:
    """A tick that does what it is told to, one act after the other, and the last one for ever."""

    def __init__(self, *acts: float | BaseException) -> None:
        self.acts = list(acts)
        self.done: Queue[int] = Queue()
        self.count = 0
        self.thread: threading.Thread | None = None

    def __call__(self, now: datetime | None = None) -> float:
        self.thread = threading.current_thread()
        self.count += 1
        self.done.put(self.count)
        act = self.acts.pop(0) if len(self.acts) > 1 else self.acts[0]
        if isinstance(act, BaseException):
            raise act
        return act

    def wait(self) -> int:
        """Wait for one more tick."""
        return self.done.get(timeout=20)


@pytest.fixture
def start() -> Any:
    started: list[Loop] = []

    def begin(tick: Callable[..., float], **options: Any) -> Loop:
        loop = Loop(tick, name="sample", **options)
        started.append(loop)
        loop.start()
        return loop

    yield begin
    for loop in started:
        loop.stop()
        assert loop.join(20)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "django_jobs.loop"]


def test_a_loop_ticks_at_once_in_a_daemon_thread_with_its_name(start: Any) -> None:
    ticks = Ticks(FOR_EVER)
    loop = start(ticks)
    assert ticks.wait() == 1
    assert ticks.thread is not None
    assert (ticks.thread.name, ticks.thread.daemon) == ("django_jobs sample", True)
    assert loop.is_alive


@pytest.mark.parametrize("delay", [0, 0.0, -5.0, 0.001])
def test_it_ticks_again_after_the_delay_that_the_tick_returned(delay: float, start: Any) -> None:
    ticks = Ticks(delay, delay, FOR_EVER)
    start(ticks)
    assert [ticks.wait() for _ in range(3)] == [1, 2, 3]


def test_a_wake_cuts_the_wait_short(start: Any) -> None:
    ticks = Ticks(FOR_EVER)
    loop = start(ticks)
    for expected in (1, 2, 3):
        assert ticks.wait() == expected
        loop.wake()


def test_a_wake_during_a_tick_is_not_lost(start: Any) -> None:
    inside, go_on, again = threading.Event(), threading.Event(), threading.Event()

    def tick(now: datetime | None = None) -> float:
        if inside.is_set():
            again.set()
        inside.set()
        assert go_on.wait(20)
        return FOR_EVER

    loop = start(tick)
    assert inside.wait(20)
    loop.wake()
    go_on.set()
    assert again.wait(20)


def test_a_stopped_loop_lets_its_tick_end_and_ticks_no_more(start: Any) -> None:
    inside, go_on = threading.Event(), threading.Event()
    ended: list[int] = []

    def tick(now: datetime | None = None) -> float:
        inside.set()
        assert go_on.wait(20)
        ended.append(1)
        return 0.0

    loop = start(tick)
    assert inside.wait(20)
    loop.stop()
    assert not loop.join(0)
    go_on.set()
    assert loop.join(20)
    assert (ended, loop.is_alive) == ([1], False)


def test_a_waiting_loop_stops_at_once(start: Any) -> None:
    ticks = Ticks(FOR_EVER)
    loop = start(ticks)
    ticks.wait()
    loop.stop()
    assert loop.join(20)
    assert ticks.count == 1


def test_a_loop_that_never_started_has_ended() -> None:
    loop = Loop(Ticks(FOR_EVER), name="sample")
    assert loop.join(0)
    assert not loop.is_alive


def test_a_loop_that_was_stopped_before_it_began_does_not_tick() -> None:
    ticks = Ticks(FOR_EVER)
    loop = Loop(ticks, name="sample")
    loop.stop()
    loop.start()
    assert loop.join(20)
    assert ticks.count == 0


def test_a_tick_that_raises_is_tried_again(start: Any, caplog: pytest.LogCaptureFixture) -> None:
    ticks = Ticks(ValueError("boom"), FOR_EVER)
    loop = start(ticks)
    ticks.wait()
    loop.wake()
    ticks.wait()
    loop.stop()
    assert loop.join(20)
    assert lines(caplog) == [
        "sample failed and will try again: ValueError: boom",
        "sample works again after 1 failures",
    ]


def test_the_pause_after_errors_grows_to_its_limit_and_begins_anew_after_a_success() -> None:
    loop = Loop(Ticks(*[ValueError("boom")] * 30, 7.0, ValueError("boom")), name="sample")
    pauses = [loop.turn() for _ in range(30)]
    assert 0.25 <= pauses[0] <= 0.5
    assert 0.5 <= pauses[1] <= 1.0
    assert all(MAX_BACKOFF / 2 <= pause <= MAX_BACKOFF for pause in pauses[7:])
    assert loop.turn() == 7.0
    assert 0.25 <= loop.turn() <= 0.5


def test_a_loop_may_try_again_sooner() -> None:
    loop = Loop(Ticks(ValueError("boom")), name="sample", max_backoff=1.0)
    assert all(loop.turn() <= 1.0 for _ in range(20))


@pytest.mark.parametrize("interval", [30.0, 0.0])
def test_one_kind_of_error_is_logged_once_until_a_tick_succeeds_and_seldom_when_it_comes_and_goes(
    interval: float, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loops, "LOG_INTERVAL", interval)
    first, other, third = ValueError("boom"), ValueError("bang"), KeyError("boom")
    loop = Loop(Ticks(first, first, other, first, 0.0, other, 0.0, third, other, 0.0), name="sample")
    for _ in range(10):
        loop.turn()
    again = ["sample failed and will try again: ValueError: bang"] * (not interval)
    assert lines(caplog) == [
        "sample failed and will try again: ValueError: boom",
        "sample failed and will try again: ValueError: bang",
        "sample works again after 4 failures",
        *again,
        *["sample works again after 1 failures"] * len(again),
        "sample failed and will try again: KeyError: 'boom'",
        *again,
        "sample works again after 2 failures",
    ]


def test_an_error_that_came_and_went_is_logged_when_it_stays(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(Ticks(ValueError("boom"), 0.0, ValueError("boom")), name="sample")
    for _ in range(3):
        loop.turn()
    assert len(lines(caplog)) == 2
    monkeypatch.setattr(loops, "LOG_INTERVAL", 0.0)
    for _ in range(2):
        loop.turn()
    assert lines(caplog)[2:] == ["sample failed and will try again: ValueError: boom"]


@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
def test_the_traceback_is_for_those_who_debug(level: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(level, logger="django_jobs.loop"):
        Loop(Ticks(ValueError("boom")), name="sample").turn()
    assert ("Traceback" in caplog.text) == (level == logging.DEBUG)


def test_connections_are_closed_after_an_error_and_at_the_end(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: Queue[str] = Queue()
    monkeypatch.setattr(connections, "close_all", lambda: closed.put(threading.current_thread().name))
    loop = start(Ticks(ValueError("boom"), FOR_EVER))
    assert closed.get(timeout=20) == "django_jobs sample"
    loop.stop()
    assert closed.get(timeout=20) == "django_jobs sample"


def test_a_thread_that_dies_says_so(caplog: pytest.LogCaptureFixture) -> None:
    told: Queue[BaseException] = Queue()
    end = SystemExit(3)
    loop = Loop(Ticks(end), name="sample", on_death=told.put)
    loop.start()
    assert told.get(timeout=20) is end
    assert loop.join(20)
    assert lines(caplog) == ["sample stopped working"]
    assert caplog.records[-1].levelno == logging.CRITICAL
