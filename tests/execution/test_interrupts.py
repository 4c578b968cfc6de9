from __future__ import annotations

import asyncio
import gc
import logging
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from django_jobs import retries
from django_jobs.context import JobContext, shielded
from django_jobs.exceptions import Cancelled, TimedOut
from django_jobs.execution import gate, logs
from django_jobs.execution.executor import aexecute, execute
from django_jobs.execution.gate import Sent
from django_jobs.execution.interrupts import IDLE, Interrupter
from django_jobs.execution.outcomes import Aborted, Failed, Lost, Ok, Outcome, Released
from django_jobs.execution.run import Run
from tests.execution.runs import PATIENCE, Slot, run_of, spin
from tests.support import wait_for

GRACE = 5.0
NOW = 1000.0
AT_ONCE = retries.Retry(3, backoff=None)


class Ladder:
    """An interrupter with what it gave up, and how often it asked for a tick."""

    def __init__(self) -> None:
        self.given_up: list[tuple[Run, Outcome]] = []
        self.wakes = 0
        self.interrupter = Interrupter(grace=GRACE, on_abandoned=self._on_abandoned, wake=self._wake)

    def _on_abandoned(self, run: Run, outcome: Outcome) -> None:
        self.given_up.append((run, outcome))

    def _wake(self) -> None:
        self.wakes += 1

    def start(self, run: Run) -> Slot:
        self.interrupter.register(run)
        return Slot(run)

    def tick_until(self, done: Callable[[], bool], now: float) -> None:
        """Tick at one instant until it took effect: a thread may be in code that must not be cut."""
        deadline = time.monotonic() + PATIENCE
        while not done():
            assert time.monotonic() < deadline
            time.sleep(min(self.interrupter.tick(now), 0.005))


@pytest.fixture
def ladder() -> Ladder:
    return Ladder()


class Spinner:
    """A handler that stays in Python code until something is raised in it, or the test lets it go."""

    def __init__(self, *, swallow: bool = False) -> None:
        self.arrived = threading.Event()
        self.release = threading.Event()
        self.caught: list[type[BaseException]] = []
        self.swallow = swallow

    def __call__(self) -> None:
        self.arrived.set()
        try:
            spin(self.release)
        except (Cancelled, TimedOut) as error:
            self.caught.append(type(error))
            if not self.swallow:
                raise

    def run(self, **options: Any) -> Run:
        def handler() -> None:
            self()

        return run_of(handler, **options)


def test_a_cancel_sets_the_signal_first_and_raises_after_the_grace(ladder: Ladder) -> None:
    spinner = Spinner()
    run = spinner.run()
    slot = ladder.start(run)
    assert spinner.arrived.wait(PATIENCE)
    ladder.interrupter.cancel(run, now=NOW)
    assert run.signal.peek() == "cancelled"
    assert ladder.interrupter.tick(NOW + GRACE - 1) == 1
    assert not run.gate.sent
    ladder.tick_until(lambda: run.gate.sent, NOW + GRACE)
    assert slot.outcome() == Aborted()
    assert spinner.caught == [Cancelled]


def test_a_handler_that_waits_for_the_signal_ends_at_once(ladder: Ladder) -> None:
    arrived = threading.Event()

    def handler(ctx: JobContext) -> None:
        arrived.set()
        assert ctx.signal.wait(PATIENCE)
        assert ctx.signal.reason == "cancelled"

    run = run_of(handler)
    slot = ladder.start(run)
    assert arrived.wait(PATIENCE)
    ladder.interrupter.cancel(run)
    assert slot.outcome() == Aborted()
    assert not run.gate.sent


def test_a_timeout_raises_in_the_same_step_and_is_retried_as_any_failure(ladder: Ladder) -> None:
    spinner = Spinner()
    run = spinner.run(timeout=30, retry=AT_ONCE, max_attempts=4)
    slot = ladder.start(run)
    assert spinner.arrived.wait(PATIENCE)
    assert run.deadline is not None
    assert ladder.interrupter.tick(run.deadline - 1) == 1
    ladder.tick_until(lambda: run.gate.sent, run.deadline)
    outcome = slot.outcome()
    assert outcome.message == "TimedOut: timed out after 30 s"
    # The log and error trackers show the text of the exception itself.
    assert str(outcome.exception) == "timed out after 30 s"
    assert "spin(" in outcome.error["traceback"]
    assert "TimedOut: timed out after 30 s" in outcome.error["traceback"]
    assert outcome.delay == 0
    assert spinner.caught == [TimedOut]


def test_the_last_attempt_that_times_out_is_not_run_again(ladder: Ladder) -> None:
    """A timed-out task with one attempt was started again and again: django-q2/django-q2#114, #173."""
    spinner = Spinner()
    run = spinner.run(timeout=0.5)
    slot = ladder.start(run)
    assert spinner.arrived.wait(PATIENCE)
    ladder.tick_until(lambda: run.gate.sent, run.started + 0.5)
    outcome = slot.outcome()
    assert (outcome.message, outcome.delay) == ("TimedOut: timed out after 0.5 s", None)


@pytest.mark.parametrize("reason", ["cancelled", "timeout", "shutdown"])
def test_swallowing_the_exception_is_never_a_success(ladder: Ladder, reason: str) -> None:
    spinner = Spinner(swallow=True)
    run = spinner.run(timeout=60, retry=AT_ONCE, max_attempts=4)
    slot = ladder.start(run)
    assert spinner.arrived.wait(PATIENCE)
    assert run.deadline is not None
    if reason == "cancelled":
        ladder.interrupter.cancel(run, now=NOW)
    if reason == "shutdown":
        ladder.interrupter.shutdown(now=NOW)
    ladder.tick_until(lambda: run.gate.sent, run.deadline if reason == "timeout" else NOW + GRACE)
    outcome = slot.outcome()
    assert type(outcome) is {"cancelled": Aborted, "timeout": Failed, "shutdown": Released}[reason]


def test_a_job_that_forbids_it_gets_no_exception_but_is_given_up_at_its_timeout(ladder: Ladder) -> None:
    spinner = Spinner()
    run = spinner.run(timeout=30, interrupt=False)
    slot = ladder.start(run)
    assert spinner.arrived.wait(PATIENCE)
    assert run.deadline is not None
    assert ladder.interrupter.tick(run.deadline) == pytest.approx(GRACE)
    ladder.interrupter.tick(run.deadline + GRACE)
    ((given_up, outcome),) = ladder.given_up
    assert given_up is run
    assert isinstance(outcome, Failed)
    assert outcome.message == "TimedOut: timed out after 30 s, and its handler did not stop"
    assert "spin(" in outcome.error["traceback"]
    assert not run.gate.sent
    spinner.release.set()
    assert slot.outcome() == Lost()


def test_a_job_that_forbids_it_is_never_given_up_for_a_cancel(ladder: Ladder) -> None:
    spinner = Spinner()
    run = spinner.run(interrupt=False)
    slot = ladder.start(run)
    assert spinner.arrived.wait(PATIENCE)
    ladder.interrupter.cancel(run, now=NOW)
    ladder.interrupter.tick(NOW + 100 * GRACE)
    assert ladder.given_up == []
    spinner.release.set()
    assert slot.outcome() == Ok()


def test_a_handler_stuck_in_a_system_call_is_given_up_and_its_late_outcome_is_dropped(ladder: Ladder) -> None:
    """Threads blocked in a system call hung one slot after the other: Bogdanp/dramatiq#653, #211."""
    arrived = threading.Event()
    stuck = threading.Lock()
    stuck.acquire()

    def handler() -> str:
        arrived.set()
        stuck.acquire(timeout=PATIENCE)
        return "late"

    run = run_of(handler, timeout=2)
    slot = ladder.start(run)
    assert arrived.wait(PATIENCE)
    assert run.deadline is not None
    ladder.tick_until(lambda: run.gate.sent, run.deadline)
    assert ladder.given_up == []
    ladder.interrupter.tick(run.deadline + GRACE)
    ((_, outcome),) = ladder.given_up
    assert isinstance(outcome, Failed)
    assert "stuck.acquire" in outcome.error["traceback"]
    stuck.release()
    assert slot.outcome() == Lost()
    assert run.gate.abandoned


def test_a_cancelled_handler_that_does_not_stop_is_given_up_after_its_second_grace(ladder: Ladder) -> None:
    spinner = Spinner(swallow=True)
    arrived = threading.Event()
    release = threading.Event()

    def handler() -> None:
        spinner()
        arrived.set()
        release.wait(PATIENCE)

    run = run_of(handler)
    slot = ladder.start(run)
    assert spinner.arrived.wait(PATIENCE)
    ladder.interrupter.cancel(run, now=NOW)
    ladder.tick_until(arrived.is_set, NOW + GRACE)
    ladder.interrupter.tick(NOW + 2 * GRACE - 0.1)
    assert ladder.given_up == []
    ladder.interrupter.tick(NOW + 2 * GRACE)
    assert ladder.given_up == [(run, Aborted())]
    release.set()
    assert slot.outcome() == Lost()


def test_a_shutdown_gives_up_the_last_handler_at_its_limit(ladder: Ladder) -> None:
    stuck = threading.Event()
    arrived = threading.Event()

    def handler() -> None:
        arrived.set()
        stuck.wait(PATIENCE)

    run = run_of(handler, retry=AT_ONCE)
    slot = ladder.start(run)
    assert arrived.wait(PATIENCE)
    ladder.interrupter.shutdown(now=NOW, give_up_at=NOW + GRACE + 1)
    ladder.tick_until(lambda: run.gate.sent, NOW + GRACE)
    ladder.interrupter.tick(NOW + GRACE + 1)
    assert ladder.given_up == [(run, Released())]
    stuck.set()
    assert slot.outcome() == Lost()


def test_a_shutdown_with_less_time_than_two_graces_raises_the_exception_at_half_of_it(ladder: Ladder) -> None:
    spinner = Spinner()
    run = spinner.run(retry=AT_ONCE)
    slot = ladder.start(run)
    assert spinner.arrived.wait(PATIENCE)
    ladder.interrupter.shutdown(now=NOW, give_up_at=NOW + GRACE - 1)
    ladder.interrupter.tick(NOW + 1)
    assert not run.gate.sent
    ladder.tick_until(lambda: run.gate.sent, NOW + GRACE / 2)
    assert slot.outcome() == Released()
    assert ladder.given_up == []


def test_without_a_grace_a_handler_has_still_time_to_leave_after_its_exception() -> None:
    given_up: list[Any] = []
    spinner = Spinner()
    run = spinner.run(timeout=0.01)
    interrupter = Interrupter(grace=0, on_abandoned=lambda *what: given_up.append(what))
    interrupter.register(run)
    slot = Slot(run)
    assert spinner.arrived.wait(PATIENCE)
    late = run.started + 0.02
    while not run.gate.sent:
        interrupter.tick(late)
    interrupter.tick(late + 0.1)
    assert isinstance(slot.outcome(), Failed)
    assert given_up == []


def test_a_run_that_starts_during_a_shutdown_is_told_at_once(ladder: Ladder) -> None:
    ladder.interrupter.shutdown(now=NOW)
    run = run_of(lambda: None)
    ladder.interrupter.register(run)
    assert execute(run) == Released()


def test_a_lost_run_is_stopped_and_its_outcome_dropped(ladder: Ladder) -> None:
    spinner = Spinner()
    run = spinner.run()
    slot = ladder.start(run)
    assert spinner.arrived.wait(PATIENCE)
    ladder.interrupter.cancel(run, now=NOW)
    ladder.interrupter.lost(run, now=NOW)
    assert run.signal.peek() == "lost"
    ladder.tick_until(lambda: run.gate.sent, NOW + GRACE)
    assert slot.outcome() == Lost()


def test_the_exception_waits_for_the_end_of_a_shield(ladder: Ladder) -> None:
    inside, leave = threading.Event(), threading.Event()
    done: list[str] = []

    def handler(ctx: JobContext) -> None:
        with ctx.shield(), ctx.shield():
            inside.set()
            spin(leave)
            done.append("shielded")
        done.append("after")

    run = run_of(handler)
    slot = ladder.start(run)
    assert inside.wait(PATIENCE)
    ladder.interrupter.cancel(run, now=NOW)
    ladder.interrupter.tick(NOW + GRACE)
    ladder.interrupter.tick(NOW + 10 * GRACE)
    assert not run.gate.sent
    assert ladder.given_up == []
    leave.set()
    assert slot.outcome() == Aborted()
    assert done == ["shielded"]
    assert run.gate.sent


def test_code_of_ours_that_a_handler_calls_is_shielded(ladder: Ladder) -> None:
    inside, leave = threading.Event(), threading.Event()

    def handler() -> None:
        with shielded():
            inside.set()
            spin(leave)

    run = run_of(handler)
    slot = ladder.start(run)
    assert inside.wait(PATIENCE)
    assert run.gate.interrupt(Cancelled) is Sent.SHIELDED
    leave.set()
    assert slot.outcome().error["exception"] == "django_jobs.exceptions.Cancelled"


def test_another_threads_work_is_no_shield(ladder: Ladder) -> None:
    spinner = Spinner()
    run = spinner.run()
    slot = ladder.start(run)
    assert spinner.arrived.wait(PATIENCE)
    with run.gate:
        ladder.interrupter.cancel(run, now=NOW)
        ladder.tick_until(lambda: run.gate.sent, NOW + GRACE)
    assert slot.outcome() == Aborted()


def test_a_second_cancel_does_not_start_the_grace_anew(ladder: Ladder) -> None:
    spinner = Spinner()
    run = spinner.run()
    slot = ladder.start(run)
    assert spinner.arrived.wait(PATIENCE)
    ladder.interrupter.cancel(run, now=NOW)
    ladder.interrupter.cancel(run, now=NOW + GRACE - 1)
    ladder.tick_until(lambda: run.gate.sent, NOW + GRACE)
    assert slot.outcome() == Aborted()


def test_a_timeout_during_the_grace_of_a_cancel_raises_at_once(ladder: Ladder) -> None:
    spinner = Spinner()
    run = spinner.run(timeout=30)
    slot = ladder.start(run)
    assert spinner.arrived.wait(PATIENCE)
    assert run.deadline is not None
    ladder.interrupter.cancel(run, now=run.deadline - 1)
    ladder.tick_until(lambda: run.gate.sent, run.deadline)
    assert slot.outcome() == Aborted()


def test_a_run_that_ended_is_left_alone(ladder: Ladder) -> None:
    run = run_of(lambda: None)
    slot = ladder.start(run)
    assert slot.outcome() == Ok()
    ladder.interrupter.unregister(run)
    ladder.interrupter.unregister(run)
    ladder.interrupter.cancel(run, now=NOW)
    assert ladder.interrupter.tick(NOW + GRACE) == IDLE
    assert run.signal.peek() is None
    assert run.gate.interrupt(Cancelled) is Sent.NEVER


def test_a_run_whose_handler_has_not_begun_is_neither_raised_in_nor_forgotten(ladder: Ladder) -> None:
    run = run_of(lambda: None, timeout=1)
    ladder.interrupter.register(run)
    ladder.interrupter.tick(run.started + 1)
    ladder.interrupter.tick(run.started + 1 + GRACE)
    assert ladder.given_up == []
    assert ladder.interrupter.runs == [run]


def test_an_earlier_deadline_wakes_the_loop_and_a_later_one_does_not(ladder: Ladder) -> None:
    early, late = run_of(lambda: None, timeout=10), run_of(lambda: None, timeout=50)
    ladder.interrupter.register(late)
    assert ladder.interrupter.tick(late.started) == pytest.approx(50, abs=1)
    before = ladder.wakes
    ladder.interrupter.register(run_of(lambda: None, timeout=1000))
    ladder.interrupter.register(run_of(lambda: None))
    assert ladder.wakes == before
    ladder.interrupter.register(early)
    assert ladder.wakes == before + 1
    assert ladder.interrupter.tick(early.started) == pytest.approx(10, abs=1)


def test_one_run_that_cannot_be_stopped_does_not_keep_the_others(ladder: Ladder) -> None:
    spinner = Spinner()
    broken, run = run_of(lambda: None), spinner.run()
    ladder.interrupter.register(broken)
    slot = ladder.start(run)
    assert spinner.arrived.wait(PATIENCE)
    ladder.interrupter.cancel(broken, now=NOW)
    ladder.interrupter.cancel(run, now=NOW)
    broken.job = SimpleNamespace(name="broken")  # type: ignore[assignment]
    ladder.tick_until(lambda: run.gate.sent, NOW + GRACE)
    assert slot.outcome() == Aborted()


def test_the_exception_is_not_sent_into_code_whose_locks_everybody_shares(ladder: Ladder) -> None:
    inside, leave = list[bool](), list[bool]()
    # As if it were a function of that module.
    module = {"__name__": "logging.handlers", "inside": inside, "leave": leave}
    exec("def work():\n inside.append(True)\n while not leave: pass", module)

    def handler() -> None:
        module["work"]()  # type: ignore[operator]
        spin(threading.Event())

    run = run_of(handler)
    slot = ladder.start(run)
    wait_for(lambda: inside, PATIENCE, "the handler did not begin")
    assert run.gate.interrupt(Cancelled) is Sent.LATER
    assert not run.gate.sent
    leave.append(True)
    ladder.interrupter.cancel(run, now=NOW)
    ladder.tick_until(lambda: run.gate.sent, NOW + GRACE)
    assert slot.outcome() == Aborted()


async def _astart(run: Run, arrived: asyncio.Event) -> asyncio.Task[Outcome]:
    task = asyncio.create_task(aexecute(run))
    await asyncio.wait_for(arrived.wait(), PATIENCE)
    return task


@pytest.mark.parametrize(
    ("reason", "expected"), [("cancelled", Aborted), ("timeout", Failed), ("shutdown", Released), ("lost", Lost)]
)
def test_the_task_of_a_coroutine_is_cancelled_as_the_second_step(ladder: Ladder, reason: str, expected: type) -> None:
    async def scenario() -> Outcome:
        arrived = asyncio.Event()

        async def handler() -> None:
            arrived.set()
            await asyncio.sleep(PATIENCE)

        run = run_of(handler, timeout=60, retry=AT_ONCE, max_attempts=4)
        ladder.interrupter.register(run)
        task = await _astart(run, arrived)
        assert run.deadline is not None
        match reason:
            case "cancelled":
                ladder.interrupter.cancel(run, now=NOW)
            case "shutdown":
                ladder.interrupter.shutdown(now=NOW)
            case "lost":
                ladder.interrupter.lost(run, now=NOW)
        ladder.interrupter.tick(run.deadline if reason == "timeout" else NOW + GRACE)
        return await asyncio.wait_for(task, PATIENCE)

    assert type(asyncio.run(scenario())) is expected


def test_a_coroutine_that_swallows_its_cancel_is_never_a_success(ladder: Ladder) -> None:
    async def scenario() -> Outcome:
        arrived = asyncio.Event()

        async def handler() -> str:
            arrived.set()
            try:
                await asyncio.sleep(PATIENCE)
            except asyncio.CancelledError:
                return "swallowed"
            return "slept"

        run = run_of(handler)
        ladder.interrupter.register(run)
        task = await _astart(run, arrived)
        ladder.interrupter.cancel(run, now=NOW)
        ladder.interrupter.tick(NOW + GRACE)
        return await asyncio.wait_for(task, PATIENCE)

    assert asyncio.run(scenario()) == Aborted()


def test_a_shield_keeps_the_cancel_of_a_coroutine_out(ladder: Ladder) -> None:
    done: list[str] = []

    async def scenario() -> Outcome:
        arrived, leave = asyncio.Event(), asyncio.Event()

        async def handler(ctx: JobContext) -> None:
            with ctx.shield():
                arrived.set()
                await leave.wait()
                done.append("shielded")
            await asyncio.sleep(PATIENCE)
            done.append("after")

        run = run_of(handler)
        ladder.interrupter.register(run)
        task = await _astart(run, arrived)
        ladder.interrupter.cancel(run, now=NOW)
        ladder.interrupter.tick(NOW + GRACE)
        await asyncio.sleep(0)
        leave.set()
        return await asyncio.wait_for(task, PATIENCE)

    assert asyncio.run(scenario()) == Aborted()
    assert done == ["shielded"]


def test_runs_of_a_blocked_loop_are_given_up(ladder: Ladder) -> None:
    arrived, release = threading.Event(), threading.Event()

    async def handler() -> None:
        arrived.set()
        release.wait(PATIENCE)

    run = run_of(handler, timeout=2)
    ladder.interrupter.register(run)
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(asyncio.run(aexecute(run))))
    thread.start()
    assert arrived.wait(PATIENCE)
    ladder.interrupter.tick(run.started + 2)
    ladder.interrupter.tick(run.started + 2 + GRACE)
    ((_, outcome),) = ladder.given_up
    assert isinstance(outcome, Failed)
    release.set()
    thread.join(PATIENCE)
    assert outcomes == [Lost()]


def test_an_awaitable_of_a_plain_function_is_interrupted_as_a_task(ladder: Ladder) -> None:
    arrived = threading.Event()

    async def work() -> None:
        arrived.set()
        await asyncio.sleep(PATIENCE)

    run = run_of(lambda: work(), manage_connections=True)
    slot = ladder.start(run)
    assert arrived.wait(PATIENCE)
    ladder.interrupter.cancel(run, now=NOW)
    ladder.tick_until(lambda: run.gate.sent, NOW + GRACE)
    assert slot.outcome() == Aborted()


@pytest.mark.medium
def test_an_interrupt_at_the_end_of_a_run_hits_neither_the_next_run_nor_our_own_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The guard of the locks of logging is taken out below, so the line comes in after them.
    line = logging.getLogger("tests.sample.silent")
    line.propagate = False
    line.addHandler(logging.NullHandler())
    record = line.makeRecord("tests.sample", logging.INFO, "", 0, "a line", (), None)
    let_go = [False]
    here: list[Run] = []
    strays: list[BaseException] = []
    results: Counter[tuple[type, bool]] = Counter()

    def between_look_and_sending(frame: object) -> bool:
        let_go[0] = True
        time.sleep(random.random() * 6e-5)
        return False

    def handler(ctx: JobContext, number: int) -> None:
        here.append(run_of_context[0])
        while not let_go[0]:
            time.sleep(0)
        for _ in range(number % 50):
            _step()
        # Half of them leave at once, the others by way of code of ours.
        if number % 2:
            line.callHandlers(record)
            ctx.progress(number)
            with ctx.shield():
                _step()

    template = run_of(handler, {"number": 0})
    run_of_context: list[Run] = []

    def slot() -> None:
        for number in range(2000):
            try:
                template.execution._payload_json = f'{{"number": {number}}}'
                run = Run(template.execution, template.job, manage_connections=False)
                run_of_context[:] = [run]
                let_go[0] = False
                outcome = execute(run)
                for _ in range(20):
                    _step()
                assert not run.gate.lock.locked()
                assert not logs._making.locked()
                results[type(outcome), run.gate.sent] += 1
            except BaseException as error:
                strays.append(error)

    monkeypatch.setattr(gate, "_is_fragile", between_look_and_sending)
    interval = sys.getswitchinterval()
    # An exception that lands in a finalizer is reported and forgotten; here that would be a warning.
    gc.disable()
    sys.setswitchinterval(1e-5)
    try:
        thread = threading.Thread(target=slot, daemon=True)
        thread.start()
        while thread.is_alive():
            if here:
                run = here.pop()
                run.signal.set("cancelled")
                run.gate.interrupt(Cancelled)
            time.sleep(0)
    finally:
        sys.setswitchinterval(interval)
        gc.enable()
    assert strays == []
    assert sum(results.values()) == 2000
    # Both sides of the race were met: sent in time, and sent while the handler was leaving.
    assert results[Aborted, True] > 100
    assert results[Ok, True] > 100


def _step() -> int:
    return sum(range(3))
