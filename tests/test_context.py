from __future__ import annotations

import asyncio
import json
import threading
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from django_jobs.context import (
    JobContext,
    Reason,
    RunSignal,
    current_context,
    enter_context,
    leave_context,
    shielded,
)
from django_jobs.exceptions import Cancelled, TimedOut

PATIENCE = 10.0


def test_a_signal_that_is_not_set_says_so_and_raises_nothing() -> None:
    signal = RunSignal()
    assert not signal.is_set()
    assert signal.reason is None
    assert not signal.wait(0)
    signal.raise_if_set()
    assert not signal.observed


@pytest.mark.parametrize("reason", ["cancelled", "shutdown", "lost"])
def test_a_set_signal_raises_cancelled_and_says_why(reason: Reason) -> None:
    signal = RunSignal()
    signal.set(reason)
    with pytest.raises(Cancelled, match=reason):
        signal.raise_if_set()


def test_a_timeout_raises_timed_out() -> None:
    signal = RunSignal()
    signal.set("timeout")
    with pytest.raises(TimedOut):
        signal.raise_if_set()


@pytest.mark.parametrize("look", [RunSignal.is_set, RunSignal.wait, lambda signal: signal.reason])
def test_looking_at_a_set_signal_is_remembered(look: object) -> None:
    signal = RunSignal()
    signal.set("cancelled")
    assert not signal.observed
    assert look(signal)  # type: ignore[operator]
    assert signal.observed


def test_peeking_is_no_look() -> None:
    signal = RunSignal()
    signal.set("cancelled")
    assert signal.peek() == "cancelled"
    assert not signal.observed


def test_the_first_reason_stays_and_only_a_lost_row_replaces_it() -> None:
    signal = RunSignal()
    assert signal.set("cancelled")
    assert not signal.set("timeout")
    assert signal.peek() == "cancelled"
    assert signal.set("lost")
    assert not signal.set("lost")
    assert not signal.set("shutdown")
    assert signal.peek() == "lost"


def test_setting_it_wakes_everybody_who_waits() -> None:
    signal = RunSignal()
    woken = [threading.Event() for _ in range(3)]

    def wait(event: threading.Event) -> None:
        if signal.wait(PATIENCE):
            event.set()

    for event in woken:
        threading.Thread(target=wait, args=(event,), daemon=True).start()
    signal.set("shutdown")
    assert all(event.wait(PATIENCE) for event in woken)


def test_a_coroutine_waits_for_it_without_blocking_its_loop() -> None:
    signal = RunSignal()

    async def scenario() -> bool:
        waiting = asyncio.create_task(signal.await_set(PATIENCE))
        await asyncio.sleep(0)
        threading.Thread(target=signal.set, args=("cancelled",)).start()
        return await waiting

    assert asyncio.run(scenario())
    assert asyncio.run(signal.await_set())


def test_a_coroutine_waits_no_longer_than_it_said() -> None:
    assert asyncio.run(RunSignal().await_set(0)) is False


def test_a_waiting_loop_that_is_closed_does_not_keep_the_signal_from_others() -> None:
    signal = RunSignal()
    loop = asyncio.new_event_loop()
    waiting = loop.create_task(signal.await_set())
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    assert signal.set("cancelled")
    assert signal.is_set()
    # Its loop cannot run it any more.
    waiting.get_coro().close()  # type: ignore[union-attr]
    waiting._log_destroy_pending = False  # type: ignore[attr-defined]


def test_a_detached_context_is_that_of_a_first_and_only_attempt_without_a_row() -> None:
    context = JobContext.detached("shop.send", {"order_id": 42})
    assert context.execution_id is None
    assert (context.job_name, context.payload) == ("shop.send", {"order_id": 42})
    assert (context.attempt, context.max_attempts) == (1, 1)
    assert (context.key, context.organization_id) == ("", None)
    assert abs(datetime.now(UTC) - context.now) < timedelta(seconds=60)
    assert context.now == context.now
    assert not context.signal.is_set()
    with context.shield():
        context.progress(1, total=2, note="half")
    assert context.reported == {"done": 1, "total": 2, "note": "half"}


@pytest.mark.parametrize("numbers", [(float("nan"), None), (1, float("inf"))])
def test_progress_takes_only_numbers_that_json_knows(numbers: tuple[float, float | None]) -> None:
    with pytest.raises(ValueError, match="finite"):
        JobContext.detached("shop.send", {}).progress(*numbers)


@pytest.mark.parametrize("number", [Decimal("1.5"), Fraction(3, 2)])
def test_progress_takes_numbers_of_any_kind_and_keeps_what_json_can_hold(number: Any) -> None:
    context = JobContext.detached("shop.send", {})
    context.progress(number, total=number)
    assert json.dumps(context.reported) == '{"done": 1.5, "total": 1.5, "note": ""}'


def test_a_long_note_is_cut() -> None:
    context = JobContext.detached("shop.send", {})
    context.progress(1, note="x" * 1000)
    assert context.reported is not None
    assert len(context.reported["note"]) == 200


def test_there_is_no_current_context_outside_of_runs_and_the_shield_there_does_nothing() -> None:
    assert current_context() is None
    with shielded():
        pass


def test_a_context_is_current_between_enter_and_leave() -> None:
    context = JobContext.detached("shop.send", {})
    token = enter_context(context)
    assert current_context() is context
    leave_context(token)
    assert current_context() is None
