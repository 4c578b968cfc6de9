"""The worker role in this process: claims, slots, writes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
import time
from typing import Any

import pytest
from django.db import OperationalError

from django_jobs import InvalidPayload, JobContext, Keep, Reschedule, Retry, clock, job, services, signals, transitions
from django_jobs.execution import announcer, event_loop
from django_jobs.execution.liveness import Watch
from django_jobs.models import JobExecution, jobs_alias
from django_jobs.runtime import stage
from django_jobs.runtime.worker import Observed
from django_jobs.states import Status
from tests.runtime.workers import a_liveness, a_worker, ended, jobs_of
from tests.support import assert_consistent, wait_for

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_pushed_job_runs_and_ends_ok() -> None:
    seen: list[int] = []

    def count(number: int) -> str:
        seen.append(number)
        return "done"

    with jobs_of(count) as [counting], a_worker():
        row = ended(counting.push(number=7))
    assert (row.status, row.result, row.attempt, seen) == (Status.OK, "done", 1, [7])
    assert row.started_at <= row.completed_at
    assert_consistent()


def test_what_is_nested_deepest_is_stored_on_every_engine() -> None:
    deepest: Any = 1
    for _ in range(30):
        deepest = [deepest]

    def echo(number: int, value: Any) -> Any:
        return [value]

    def log_and_echo(number: int, value: Any) -> Any:
        logging.getLogger(__name__).warning("one line")
        # More than can be stored.
        return [[value]]

    with jobs_of(echo, log_and_echo) as [echoing, logging_too], a_worker():
        row = ended(echoing.push(number=1, value=deepest))
        assert (row.status, row.payload["value"], row.result) == (Status.OK, deepest, [deepest])
        row = ended(logging_too.push(number=1, value=deepest))
        assert (row.status, row.result, len(row.logs)) == (Status.OK, None, 1)
        with pytest.raises(InvalidPayload, match="nested deeper than 31 levels"):
            echoing.push(number=1, value=[deepest])


def test_never_more_rows_are_claimed_than_slots_are_free() -> None:
    release = threading.Event()

    def hold(number: int) -> None:
        release.wait(20)

    with jobs_of(hold) as [holding]:
        rows = holding.push_many([{"number": n} for n in range(5)])
        with a_worker(concurrency=2):
            wait_for(lambda: JobExecution.objects.running().count() == 2, 10, "two rows run")
            # What is not running was not touched: a second worker could take it.
            untouched = [row for row in JobExecution.objects.pending() if row.attempt == 0 and row.worker_id is None]
            assert len(untouched) == 3
            release.set()
            for row in rows:
                assert ended(row).status == Status.OK


def test_a_job_of_higher_priority_is_claimed_first_over_all_queues() -> None:
    order: list[str] = []

    def note(name: str) -> None:
        order.append(name)

    with jobs_of(note) as [noting]:
        noting.using(queue="a", priority="low").push(name="low")
        noting.using(queue="b").push(name="normal")
        noting.using(queue="a", priority="critical").push(name="critical")
        noting.using(queue="b", priority="high").push(name="high")

        seen = Observed()
        seen.pending_queues = frozenset({"a", "b"})
        with a_worker(concurrency=1, observed=seen) as worker:
            wait_for(lambda: worker.claimed == 4 and worker.is_idle, 10, "all ran")
    assert order == ["critical", "high", "normal", "low"]


def test_a_paused_job_and_a_paused_queue_are_left_alone() -> None:
    def first() -> None: ...

    def second() -> None: ...

    paused = Observed()
    paused.paused_jobs = frozenset({"tests.first"})
    paused.paused_queues = paused.pending_queues = frozenset({"slow"})
    with jobs_of(first, second) as [one, two]:
        left = [one.push(), two.using(queue="slow").push()]
        done = two.push()
        with a_worker(observed=paused):
            assert ended(done).status == Status.OK
        for row in left:
            row.refresh_from_db()
            assert row.status == Status.PENDING


@pytest.mark.parametrize("what", ["job", "queue"])
def test_a_pause_holds_also_when_stage_is_late(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a process that had been frozen, or whose stage had lost its connection, still started rows."""

    def first() -> None: ...

    def second() -> None: ...

    monkeypatch.setattr(stage, "PAUSES_FOR", 0.0)
    with jobs_of(first, second) as [one, two]:
        seen = stage.Stage(using=jobs_alias())
        seen.tick()
        seen.pending_queues = frozenset({"default", "other"})
        if what == "job":
            one.pause()
        else:
            services.pause_queue("default")
        left = one.push()
        with a_worker(observed=seen):
            assert ended(two.using(queue="other").push()).status == Status.OK
        left.refresh_from_db()
        assert left.status == Status.PENDING


def test_an_async_job_runs_on_the_event_loop_beside_others() -> None:
    """An async handler's row never moved where a loop was running; source: celery/django-celery-results#495."""
    met = []

    async def meet(ctx: JobContext) -> None:
        met.append(asyncio.get_running_loop())
        assert await JobExecution.objects.filter(pk=ctx.execution_id).aexists()

    with jobs_of(meet) as [meeting], a_worker(concurrency=3):
        rows = meeting.push_many([{}] * 3)
        assert {ended(row).status for row in rows} == {Status.OK}
    assert len({id(loop) for loop in met}) == 1


def test_a_task_that_exits_ends_neither_the_event_loop_nor_the_runs_on_it() -> None:
    left, release = threading.Event(), threading.Event()

    async def waits() -> None:
        await asyncio.to_thread(release.wait, 10)

    async def leaves() -> None:
        async def part() -> None:
            raise SystemExit(1)

        task = asyncio.create_task(part())
        await asyncio.wait([task])
        # What nobody asked for, asyncio would tell when the task is collected, in the midst of another test.
        assert isinstance(task.exception(), SystemExit)
        left.set()

    with jobs_of(waits, leaves) as [waiting, leaving], a_worker():
        rows = [waiting.push(), leaving.push()]
        assert left.wait(10)
        release.set()
        assert [ended(row).status for row in rows] == [Status.OK, Status.OK]


def _leave(how: str) -> None:
    if how == "exit":
        sys.exit(3)
    if how == "raise":
        raise ValueError(how)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("kind", ["sync", "atomic", "async"])
@pytest.mark.parametrize(("how", "code"), [("return", 0), ("exit", 3), ("raise", 1)])
def test_a_process_that_a_handler_forks_ends_where_it_leaves_the_handler(kind: str, how: str, code: int) -> None:
    """Fault: it went on as a second worker, ended the row of the run, and stayed for ever."""

    def sync() -> int:
        if not (child := os.fork()):
            _leave(how)
            return 0
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    async def coroutine() -> int:
        return sync()

    handler = coroutine if kind == "async" else sync
    with jobs_of(handler, atomic=kind == "atomic", timeout=20) as [forking], a_worker():
        row = ended(forking.push(), 20)
    assert (row.status, row.result) == (Status.OK, code)


def test_a_handler_that_stops_the_event_loop_ends_neither_it_nor_the_runs_on_it() -> None:
    stopped, release = threading.Event(), threading.Event()

    async def waits() -> None:
        await asyncio.to_thread(release.wait, 10)

    async def stops() -> None:
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0)
        stopped.set()

    with jobs_of(waits, stops) as [waiting, stopping], a_worker():
        rows = [waiting.push(), stopping.push()]
        assert stopped.wait(10)
        release.set()
        assert [ended(row).status for row in (*rows, stopping.push())] == [Status.OK] * 3


@pytest.mark.parametrize("signal", [signals.job_started, signals.job_succeeded, signals.job_finished])
def test_a_receiver_that_raises_keyboard_interrupt_ends_no_thread_of_the_worker(signal: Any) -> None:
    received, died = [], []

    def receive(**kwargs: Any) -> None:
        received.append(1)
        raise KeyboardInterrupt

    def fine() -> None: ...

    signal.connect(receive)
    try:
        with jobs_of(fine) as [fining], a_worker(on_death=died.append):
            for times in (1, 2):
                assert ended(fining.push()).status == Status.OK
                wait_for(lambda times=times: len(received) == times, 10, "the receiver was told")
    finally:
        signal.disconnect(receive)
    assert died == []


@pytest.mark.medium
def test_rows_go_back_untried_while_the_system_has_no_threads_for_them(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.DJANGO_JOBS = {**settings.DJANGO_JOBS, "POLL_INTERVAL": 0.1}
    scarce = ["django_jobs slot 1", "django_jobs event loop"]
    start = threading.Thread.start

    def start_or_not(thread: threading.Thread) -> None:
        if thread.name in scarce:
            scarce.remove(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    def sync() -> None: ...

    async def coroutine() -> None: ...

    with jobs_of(sync, coroutine) as [one, other], a_worker(concurrency=1):
        monkeypatch.setattr(threading.Thread, "start", start_or_not)
        rows = [ended(job.push()) for job in (one, other)]
    assert scarce == []
    assert [(row.status, row.attempt) for row in rows] == [(Status.OK, 1)] * 2


def test_a_failure_is_retried_when_its_backoff_is_over_and_keeps_its_history() -> None:
    tries: list[int] = []

    def flaky(ctx: JobContext) -> None:
        tries.append(ctx.attempt)
        if ctx.attempt < 3:
            raise ValueError(f"try {ctx.attempt}")

    with jobs_of(flaky, retry=Retry(3, backoff=0)) as [flaking], a_worker() as worker:
        row = flaking.push()

        def promoted() -> bool:
            transitions.promote(JobExecution.objects.all(), now=clock.now("default"))
            worker.wake()
            row.refresh_from_db()
            return row.is_final

        wait_for(promoted, 15, "the job succeeded at last")
    assert (row.status, row.attempt, tries) == (Status.OK, 3, [1, 2, 3])
    assert [entry["message"] for entry in row.errors] == ["try 1", "try 2"]


def test_a_reschedule_costs_no_attempt() -> None:
    def later() -> None:
        raise Reschedule(delay=3600)

    with jobs_of(later) as [waiting], a_worker():
        row = waiting.push()
        wait_for(lambda: JobExecution.objects.scheduled().filter(pk=row.pk).exists(), 10, "it is scheduled")
    row.refresh_from_db()
    assert (row.attempt, row.errors) == (0, [])
    assert 3500 < (row.scheduled_at - row.updated_at).total_seconds() <= 3600


@pytest.mark.medium
@pytest.mark.parametrize(
    "raised",
    [SystemExit(0), SystemExit("msg"), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError(), MemoryError()],
)
def test_whatever_a_handler_raises_ends_its_row_and_costs_no_slot(raised: BaseException) -> None:
    """An exception outside Exception took the thread with it; source: Bogdanp/dramatiq#445, #211."""
    meeting = threading.Barrier(2)

    def burst() -> None:
        raise raised

    def meet() -> None:
        meeting.wait(10)

    with jobs_of(burst, meet) as [bursting, meet_job], a_worker(concurrency=2):
        for row in [bursting.push(), bursting.push()]:
            assert ended(row).status == Status.ERROR
            assert type(raised).__name__ in row.error
        # Both slots are needed for these two to end.
        assert {ended(row).status for row in [meet_job.push(), meet_job.push()]} == {Status.OK}


def test_a_job_cancelled_while_it_waits_never_starts() -> None:
    """A job that was reserved locally started although it was cancelled; source: celery/celery#1007."""
    release, order = threading.Event(), []

    def note(name: str) -> None:
        order.append(name)
        if name == "first":
            release.wait(20)

    with jobs_of(note) as [noting]:
        _, second, third = noting.push_many([{"name": n} for n in ("first", "second", "third")])
        with a_worker(concurrency=1):
            wait_for(lambda: order == ["first"], 10, "the first one runs")
            second.cancel(by="a person")
            release.set()
            assert ended(third).status == Status.OK
    assert order == ["first", "third"]
    second.refresh_from_db()
    assert (second.status, second.cancelled_by_name) == (Status.CANCELLED, "a person")


def test_a_cancel_reaches_the_running_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Watch, "INTERVAL", 0.1)
    started = threading.Event()

    def heed(ctx: JobContext) -> None:
        started.set()
        ctx.signal.wait(20)

    with jobs_of(heed) as [heeding], a_worker():
        row = heeding.push()
        assert started.wait(10)
        row.cancel(by="a person")
        assert ended(row).status == Status.CANCELLED


@pytest.mark.medium
def test_a_timeout_is_an_ordinary_failure() -> None:
    def stall(ctx: JobContext) -> None:
        ctx.signal.wait(20)

    with jobs_of(stall, timeout=0.2) as [stalling], a_worker():
        row = ended(stalling.push())
    assert (row.status, row.error) == (Status.ERROR, "TimedOut: timed out after 0.2 s")


@pytest.mark.medium
def test_a_handler_that_does_not_stop_loses_its_slot_and_not_the_worker(settings: Any) -> None:
    settings.DJANGO_JOBS = {**settings.DJANGO_JOBS, "INTERRUPT_GRACE": 0.2}
    release, recycled = threading.Event(), []

    def stuck() -> None:
        # One long call into C: no exception lands before it is over.
        release.wait(20)

    def fine() -> None: ...

    with jobs_of(stuck, timeout=0.2) as [sticking]:
        fining = job(name="tests.fine")(fine)
        with a_worker(concurrency=1, on_recycle=recycled.append):
            row = ended(sticking.push())
            assert row.status == Status.ERROR
            assert "did not stop" in row.error
            wait_for(lambda: recycled, 20, "the process was asked to recycle")
            assert ended(fining.push()).status == Status.OK
            release.set()


@pytest.mark.medium
def test_a_thread_into_which_an_exception_was_sent_runs_nothing_else(settings: Any) -> None:
    """Another one may still be on its way."""
    settings.DJANGO_JOBS = {**settings.DJANGO_JOBS, "INTERRUPT_GRACE": 0.1}
    threads: list[threading.Thread] = []

    def spin() -> None:
        threads.append(threading.current_thread())
        while True:
            time.sleep(0.01)

    def fine() -> None:
        threads.append(threading.current_thread())

    with jobs_of(spin, timeout=0.1) as [spinning]:
        fining = job(name="tests.fine")(fine)
        with a_worker(concurrency=1):
            assert ended(spinning.push()).status == Status.ERROR
            assert ended(fining.push()).status == Status.OK
    assert threads[0] is not threads[1]


@pytest.mark.medium
def test_a_task_that_does_not_end_costs_the_others_on_its_event_loop_nothing(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.DJANGO_JOBS = {**settings.DJANGO_JOBS, "INTERRUPT_GRACE": 0.1}
    # However busy the machine is.
    monkeypatch.setattr(event_loop, "PATIENCE", 20.0)
    release, go_on, began, asked = (threading.Event() for _ in range(4))
    answers = event_loop.EventLoop.answers

    def note(loop: event_loop.EventLoop) -> bool:
        answered = answers(loop)
        asked.set()
        return answered

    async def resist() -> None:
        while not release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    async def patient() -> None:
        began.set()
        await asyncio.to_thread(go_on.wait, 20)

    monkeypatch.setattr(event_loop.EventLoop, "answers", note)
    with jobs_of(patient) as [waiting], a_worker():
        resisting = job(name="tests.resist", timeout=0.1)(resist)
        beside = waiting.push()
        assert began.wait(10)
        assert ended(resisting.push()).status == Status.ERROR
        assert asked.wait(20)
        go_on.set()
        assert ended(beside).status == Status.OK
        release.set()


def beside_again(row: JobExecution) -> bool:
    """Whether the row was handed back and claimed again."""
    row.refresh_from_db()
    return row.run_no > 1


@pytest.mark.medium
def test_a_blocked_event_loop_is_given_up_with_all_its_runs(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.DJANGO_JOBS = {**settings.DJANGO_JOBS, "INTERRUPT_GRACE": 0.2}
    monkeypatch.setattr(event_loop, "PATIENCE", 0.2)
    release, waiting = threading.Event(), threading.Event()

    async def wait_long() -> None:
        waiting.set()
        await asyncio.sleep(60)

    async def block() -> None:
        release.wait(20)

    async def fine() -> None: ...

    with jobs_of(wait_long, fine, retry=1) as [long_job, fining]:
        blocking = job(name="tests.block", timeout=0.2)(block)
        with a_worker(concurrency=3) as worker:
            beside = long_job.push()
            assert waiting.wait(10)
            assert ended(blocking.push()).status == Status.ERROR
            wait_for(
                lambda: JobExecution.objects.get(pk=beside.pk).run_no != 1 or not worker.running(), 10, "it is free"
            )
            assert ended(fining.push()).status == Status.OK
            release.set()
            JobExecution.objects.filter(pk=beside.pk).delete()


@pytest.mark.medium
def test_slow_receivers_hold_up_claims_and_no_memory(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.DJANGO_JOBS = {**settings.DJANGO_JOBS, "POLL_INTERVAL": 0.1}
    release, started = threading.Event(), []

    def receive(**kwargs: Any) -> None:
        started.append(1)
        release.wait(20)

    def fine() -> None: ...

    monkeypatch.setattr(announcer, "BACKLOG_MAX", 4)
    signals.job_finished.connect(receive)
    try:
        with jobs_of(fine) as [fining], a_worker(concurrency=2) as worker:
            # More than are told in one go.
            fining.push_many([{}] * 500)
            wait_for(lambda: started, 10, "the receiver is busy")
            wait_for(lambda: worker._engine.room == 0, 10, "runs wait for the receiver")
            assert JobExecution.objects.pending().exists()
            release.set()
            wait_for(lambda: worker.claimed == 500 and worker.is_idle, 20, "all ran")
            assert not JobExecution.objects.exclude(status=Status.OK).exists()
    finally:
        signals.job_finished.disconnect(receive)


def test_shutdown_hands_back_what_has_retry_and_ends_what_has_none(settings: Any) -> None:
    settings.DJANGO_JOBS = {**settings.DJANGO_JOBS, "INTERRUPT_GRACE": 0.2}
    running = threading.Barrier(3)

    def with_retry(ctx: JobContext) -> None:
        running.wait(10)
        ctx.signal.wait(20)

    def without(ctx: JobContext) -> None:
        running.wait(10)
        ctx.signal.wait(20)

    with jobs_of(with_retry, retry=1) as [retried]:
        single = job(name="tests.without")(without)
        rows = [retried.push(), single.push()]
        with a_worker(concurrency=2) as worker:
            running.wait(10)
            assert not worker.drain(0.05)
            worker.shutdown(time.monotonic() + 10)
    handed, interrupted = (JobExecution.objects.get(pk=row.pk) for row in rows)
    assert (handed.status, handed.attempt) == (Status.PENDING, 0)
    assert interrupted.status == Status.ERROR
    assert "interrupted by shutdown" in interrupted.error


def test_end_signals_come_after_the_write_in_the_order_of_events() -> None:
    heard: list[tuple[str, str]] = []

    def hear(name: str) -> Any:
        def receiver(sender: Any, execution: JobExecution, **kwargs: Any) -> None:
            heard.append((name, JobExecution.objects.get(pk=execution.pk).status))

        return receiver

    names = ["job_started", "job_succeeded", "job_failed", "job_cancelled", "job_finished"]
    receivers = {name: hear(name) for name in names}

    def fine() -> None: ...

    for name, receiver in receivers.items():
        getattr(signals, name).connect(receiver)
    try:
        with jobs_of(fine) as [fining], a_worker():
            ended(fining.push())
            wait_for(lambda: len(heard) == 3, 20, "all signals came")
    finally:
        for name, receiver in receivers.items():
            getattr(signals, name).disconnect(receiver)
    assert heard == [("job_started", "running"), ("job_succeeded", "ok"), ("job_finished", "ok")]


def test_successes_beyond_keep_leave_no_row_and_the_newest_stay() -> None:
    def count(number: int) -> None: ...

    with jobs_of(count, keep=Keep(ok=3)) as [counting]:
        rows = counting.push_many([{"number": n} for n in range(50)])
        # One after the other, so that the last ones end last.
        with a_worker(concurrency=1) as worker:
            wait_for(lambda: worker.claimed == 50 and worker.is_idle, 15, "all ran")
    assert set(JobExecution.objects.values_list("status", flat=True)) == {Status.OK}
    kept = set(JobExecution.objects.values_list("pk", flat=True))
    assert len(kept) < 50
    assert {row.pk for row in rows[-3:]} <= kept


def test_record_none_leaves_no_row_whatever_the_end() -> None:
    def fine() -> None: ...

    def fail() -> None:
        raise ValueError

    with jobs_of(fine, fail, record="none") as [fining, failing], a_worker() as worker:
        fining.push()
        failing.push()
        wait_for(lambda: worker.claimed == 2 and worker.is_idle, 10, "both ran")
    assert not JobExecution.objects.exists()


def test_receivers_have_call_and_run_at_hand_though_no_row_is_kept() -> None:
    """Fault: one that measured how long a row had waited, or read its result, asked for a row that was deleted."""
    seen: dict[str, tuple[Any, ...]] = {}

    def note(execution: JobExecution, **kwargs: Any) -> None:
        assert all([execution.created_at, execution.scheduled_at, execution.started_at, execution.completed_at])
        assert execution.tick_at is None
        seen[execution.error] = (execution.status, execution.error or execution.result)

    def fine() -> int:
        return 7

    def fail() -> None:
        raise ValueError("boom")

    signals.job_finished.connect(note)
    try:
        with jobs_of(fine, fail, record="none") as [fining, failing], a_worker():
            fining.push()
            failing.push()
            wait_for(lambda: len(seen) == 2, 10, "both ends were told")
    finally:
        signals.job_finished.disconnect(note)
    assert not JobExecution.objects.exists()
    assert sorted(seen.values()) == [(Status.ERROR, "ValueError: boom"), (Status.OK, 7)]


def test_what_is_claimed_runs_at_once_though_the_next_claim_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: rows of one queue waited for twenty seconds when the statement for another one ran into a time limit."""
    original, failures = transitions.claim, []

    def claim(*, queue: str, **options: Any) -> list[JobExecution]:
        if queue == "second" and not failures:
            failures.append(1)
            raise OperationalError("canceling statement due to lock timeout")
        return original(queue=queue, **options)

    def fine() -> None: ...

    with jobs_of(fine) as [fining]:
        first = fining.using(queue="first", priority="high").push()
        second = fining.using(queue="second").push()
        observed = Observed()
        observed.pending_queues = frozenset({"first", "second"})
        monkeypatch.setattr(transitions, "claim", claim)
        with a_worker(observed=observed):
            assert [ended(row, 8).run_no for row in (first, second)] == [1, 1]
    assert failures == [1]


def test_a_worker_that_others_may_hold_for_dead_claims_nothing() -> None:
    def fine() -> None: ...

    with jobs_of(fine) as [fining]:
        row = fining.push()
        liveness = a_liveness()
        liveness.retire("test")
        assert not transitions.claim(
            queue="default",
            names=["tests.fine"],
            worker_id=liveness.worker_id,
            limit=1,
            now=clock.now("default"),
            using="default",
        )
        row.refresh_from_db()
        assert row.status == Status.PENDING
