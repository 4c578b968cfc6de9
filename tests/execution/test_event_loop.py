"""The event loop of coroutine handlers: how it ends, and that it takes everything along."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import pytest

from django_jobs.execution.event_loop import EventLoop


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    made = EventLoop()
    yield made
    made.stop()
    made.thread.join(20)


def begin(loop: EventLoop, handle: Callable[[threading.Event], Coroutine[Any, Any, None]]) -> None:
    """Return when the coroutine has called its event."""
    began = threading.Event()
    loop.run(lambda: handle(began))
    assert began.wait(20)


def end(loop: EventLoop) -> None:
    loop.stop()
    loop.thread.join(20)
    assert not loop.thread.is_alive()


def test_it_ends_when_it_is_told_to_and_without_a_word(loop: EventLoop, caplog: pytest.LogCaptureFixture) -> None:
    end(loop)
    assert caplog.messages == []


def test_once_it_has_ended_it_may_be_stopped_again_and_answers_no_more(loop: EventLoop) -> None:
    assert loop.answers()
    end(loop)
    loop.stop()
    assert not loop.answers()


def test_its_end_cancels_the_tasks_that_are_left(loop: EventLoop) -> None:
    cancelled = threading.Event()

    async def wait(began: threading.Event) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    begin(loop, wait)
    end(loop)
    assert cancelled.is_set()


def test_its_end_closes_asynchronous_generators(loop: EventLoop) -> None:
    closed = threading.Event()
    kept: list[AsyncIterator[int]] = []

    async def count() -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            closed.set()

    async def take_one(began: threading.Event) -> None:
        kept.append(count())
        await anext(kept[0])
        began.set()

    begin(loop, take_one)
    end(loop)
    assert closed.is_set()


def test_its_end_waits_for_the_threads_of_its_executor(loop: EventLoop) -> None:
    waited: list[bool] = []

    async def leave_to_thread(began: threading.Event) -> None:
        def linger() -> None:
            began.set()
            loop.thread.join(0.3)
            waited.append(loop.thread.is_alive())

        await asyncio.to_thread(linger)

    begin(loop, leave_to_thread)
    end(loop)
    assert waited == [True]
