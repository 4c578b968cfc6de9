"""Jobs that run in slots of the process that pushes them."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from django.db import DatabaseError, connections, transaction
from django.utils.autoreload import DJANGO_AUTORELOAD_ENV

from django_jobs import JobContext, Retry, clock, dispatchers, pauses, transitions
from django_jobs.admin.banner import outages
from django_jobs.dispatchers import direct as direct_mode
from django_jobs.dispatchers import get_dispatcher
from django_jobs.dispatchers.direct import DirectDispatcher
from django_jobs.execution import direct
from django_jobs.execution.backlog import Backlog, Entry
from django_jobs.execution.liveness import Watch
from django_jobs.fields import uuid7
from django_jobs.models import JobExecution, Worker
from django_jobs.runtime.fleet import Fleet
from django_jobs.served import Served
from django_jobs.states import Status
from tests.acc.jobs import mark, slow, slow_retry
from tests.dispatchers.contract import DispatcherContract
from tests.factories import JobExecutionFactory, JobStateFactory, QueueStateFactory, WorkerFactory
from tests.runtime.workers import a_worker, ended, jobs_of
from tests.support import assert_consistent, wait_for

if TYPE_CHECKING:
    from pytest_django import Settings


class TestInAProcessOfRunjobs(DispatcherContract):
    @pytest.fixture
    def dispatcher(self) -> Iterator[DirectDispatcher]:
        made = DirectDispatcher({"LISTEN": False})
        with made.without_running():
            yield made
        made.close()


@pytest.fixture
def mode(transactional_db: None, settings: Settings) -> Iterator[Callable[..., DirectDispatcher]]:
    """Put direct mode in force, with other settings if need be; end it after the test."""
    made: list[DirectDispatcher] = []

    def begin(**options: Any) -> DirectDispatcher:
        short = {"INTERRUPT_GRACE": 0.1, "DRAIN_TIMEOUT": 0.3}
        settings.DJANGO_JOBS = {**settings.DJANGO_JOBS, "DISPATCHER": "direct", **short, **options}
        dispatcher = get_dispatcher()
        assert isinstance(dispatcher, DirectDispatcher)
        made.append(dispatcher)
        return dispatcher

    yield begin
    for dispatcher in made:
        dispatcher.close()
    assert_consistent()


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("django_jobs")]


def test_nothing_starts_before_the_first_push(mode: Callable[..., DirectDispatcher]) -> None:
    before = threads()
    # A hint of no row is a mere wake-up.
    mode().hint("default", [])
    assert threads() == before
    assert not Worker.objects.exists()


def test_a_push_runs_in_this_process_after_its_commit(mode: Callable[..., DirectDispatcher]) -> None:
    mode()
    seen: list[tuple[int, str]] = []

    def note(number: int) -> str:
        seen.append((number, threading.current_thread().name))
        return "done"

    before = threads()
    with jobs_of(note) as [noting]:
        with transaction.atomic():
            row = noting.push(number=7)
            assert threads() == before
        row = ended(row)
    assert (row.status, row.result, row.attempt) == (Status.OK, "done", 1)
    assert [number for number, _ in seen] == [7]
    assert seen[0][1].startswith("django_jobs slot")
    assert noting.mode == "direct"
    worker = Worker.objects.get(pk=row.worker_id)
    assert (worker.roles, worker.queues, worker.pid, worker.slots) == (["direct"], [], os.getpid(), 4)
    assert "tests.note" in worker.names


def test_what_is_more_than_the_slots_waits_in_the_table_and_the_best_goes_first(
    mode: Callable[..., DirectDispatcher],
) -> None:
    mode(DIRECT_CONCURRENCY=1)
    order: list[str] = []
    release = threading.Event()

    def hold() -> None:
        release.wait(10)

    def note(name: str) -> None:
        order.append(name)

    with jobs_of(hold, note) as [holding, noting]:
        first = holding.push()
        wait_for(lambda: JobExecution.objects.running().exists(), 10, "the slot is taken")
        waiting = [noting.using(queue="mail", priority="low").push(name="low"), noting.push(name="normal")]
        waiting += [noting.using(queue="mail", priority="critical").push(name="critical")]
        untouched = JobExecution.objects.pending()
        assert untouched.count() == 3 and not untouched.filter(worker_id__isnull=False).exists()
        release.set()
        for row in (first, *waiting):
            assert ended(row).status == Status.OK
    assert order == ["critical", "normal", "low"]


def test_the_retry_of_a_failed_run_is_left_to_runjobs(mode: Callable[..., DirectDispatcher]) -> None:
    mode()

    def fail() -> None:
        raise ValueError("once more")

    with jobs_of(fail, retry=Retry(1, backoff=None)) as [failing]:
        row = failing.push()
        wait_for(lambda: JobExecution.objects.scheduled().filter(pk=row.pk, attempt=1).exists(), 10, "it waits")
        # Whoever makes it due, here the hand of a person, has it run here again.
        JobExecution.objects.get(pk=row.pk).start_now()
        row = ended(row)
    assert (row.status, row.attempt) == (Status.ERROR, 2)


def test_a_cancel_reaches_the_handler(mode: Callable[..., DirectDispatcher], monkeypatch: pytest.MonkeyPatch) -> None:
    # Told of it, the watch looks at once.
    monkeypatch.setattr(Watch, "INTERVAL", 60.0)
    mode()
    began = threading.Event()

    def work(ctx: JobContext) -> None:
        began.set()
        ctx.signal.wait(10)

    with jobs_of(work) as [working]:
        row = working.push()
        assert began.wait(10)
        row.cancel()
        assert ended(row).status == Status.CANCELLED


def test_a_cancel_that_meets_the_end_of_what_runs_here_still_reaches_other_processes(
    mode: Callable[..., DirectDispatcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: it raised when another thread ended the runner between two looks at it."""

    class EndedOnceSeen(direct_mode._Process):
        @property
        def _runner(self) -> direct.DirectRunner | None:
            return self.__dict__.pop("_runner", None)

    dispatcher, looks = mode(), threading.Event()
    ended(mark.push())
    runner, here = runner_of(dispatcher), dispatcher._here()
    subscription = dispatcher.subscribe(None, threading.Event().set, looks.set)
    with monkeypatch.context() as patch:
        patch.setattr(here, "__class__", EndedOnceSeen)
        dispatcher.cancel_hint([uuid7()])
    here._runner = runner
    assert looks.wait(20)
    subscription.close()


def test_what_is_paused_is_left_alone(mode: Callable[..., DirectDispatcher]) -> None:
    mode()

    def first() -> None: ...

    def second() -> None: ...

    JobStateFactory(job_name="tests.first", paused=True)
    QueueStateFactory(queue="slow", paused=True)
    with jobs_of(first, second) as [one, two]:
        left = [one.push(), two.using(queue="slow").push()]
        assert ended(two.push()).status == Status.OK
        for row in left:
            row.refresh_from_db()
            assert row.status == Status.PENDING


@pytest.mark.medium
def test_pauses_are_read_once_a_second(mode: Callable[..., DirectDispatcher], monkeypatch: pytest.MonkeyPatch) -> None:
    mode()
    reads: list[str] = []
    monkeypatch.setattr(pauses, "paused", lambda using: reads.append(using) or (frozenset(), frozenset()))

    def work() -> None: ...

    with jobs_of(work) as [working]:
        started = time.monotonic()
        for _ in range(5):
            assert ended(working.push()).status == Status.OK
        assert 0 < len(reads) <= 1 + int((time.monotonic() - started) / 0.9)


def test_pauses_are_as_old_as_their_question(
    mode: Callable[..., DirectDispatcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that took long is out of date the sooner."""
    dispatcher = mode()
    ended(mark.push())
    answered_at: list[float] = []

    def answer(using: str) -> tuple[frozenset[str], frozenset[str]]:
        time.sleep(0.001)
        answered_at.append(time.monotonic())
        return frozenset(), frozenset()

    monkeypatch.setattr(pauses, "paused", answer)
    monkeypatch.setattr(direct, "PAUSES_FOR", -1.0)
    runner_of(dispatcher)._pauses()
    assert runner_of(dispatcher)._paused[0] < answered_at[0]


@pytest.mark.medium
def test_a_job_with_a_limit_keeps_it_and_its_rows_follow_one_another(
    mode: Callable[..., DirectDispatcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The end of a run, and not the time, brings the next one.
    monkeypatch.setattr(direct, "SOON", 60.0)
    mode()
    lock, peaks = threading.Lock(), []
    running = 0

    def work() -> None:
        nonlocal running
        with lock:
            running += 1
            peaks.append(running)
        time.sleep(0.02)
        with lock:
            running -= 1

    with jobs_of(work, concurrency=2) as [working]:
        rows = working.push_many([{}] * 8)
        assert {ended(row).status for row in rows} == {Status.OK}
    assert max(peaks) <= 2


def test_rows_that_others_took_or_ended_are_forgotten(mode: Callable[..., DirectDispatcher]) -> None:
    dispatcher = mode()

    def work() -> None: ...

    with jobs_of(work) as [working]:
        gone = [
            JobExecutionFactory(job_name="tests.work", status=status).pk
            for status in (Status.RUNNING, Status.OK, Status.CANCELLED, Status.SCHEDULED)
        ]
        dispatcher.hint("default", [*gone, uuid7()])
        assert ended(working.push()).status == Status.OK
        runner = runner_of(dispatcher)
        wait_for(lambda: len(runner._backlog) == 0, 10, "nothing is remembered of the others")
    assert JobExecution.objects.filter(pk__in=gone, worker_id=runner._liveness.worker_id).count() == 0


def test_a_row_that_runs_here_already_is_forgotten_and_one_whose_claim_lost_its_reply_is_not(
    mode: Callable[..., DirectDispatcher],
) -> None:
    dispatcher, begun, release = mode(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        release.wait(10)

    with jobs_of(work) as [working]:
        row = working.push()
        # Not once the row says so: its claim is written before this process takes it over.
        assert begun.wait(10)
        runner = runner_of(dispatcher)
        stray = JobExecutionFactory(job_name="tests.work", running=True)
        JobExecution.objects.filter(pk=stray.pk).update(worker_id=runner._liveness.worker_id)
        # The watch hands it back.
        assert runner._still_waiting([row.pk, stray.pk], {"tests.work"}) == {stray.pk: "tests.work"}
        release.set()
        assert ended(row).status == Status.OK
        stray.delete()


@pytest.mark.medium
def test_a_row_that_another_transaction_holds_runs_when_that_has_ended(mode: Callable[..., DirectDispatcher]) -> None:
    dispatcher = mode()

    def work() -> None: ...

    with jobs_of(work) as [working]:
        row = JobExecutionFactory(job_name="tests.work")
        with transaction.atomic():
            JobExecution.objects.filter(pk=row.pk).update(error="held")
            dispatcher.hint("default", [row.pk])
            if connections["default"].vendor == "sqlite":
                # Nobody else writes anything meanwhile.
                time.sleep(0.2)
            else:
                assert ended_elsewhere(working) == Status.OK
        assert ended(row).status == Status.OK


def ended_elsewhere(job: Any) -> str:
    """Push and wait in another thread, as this one is inside a transaction."""
    found: list[str] = []

    def push() -> None:
        try:
            found.append(ended(job.push()).status)
        finally:
            connections.close_all()

    pusher = threading.Thread(target=push)
    pusher.start()
    pusher.join(20)
    (status,) = found
    return status


@pytest.mark.medium
def test_after_an_outage_of_the_database_it_runs_what_it_was_told(
    mode: Callable[..., DirectDispatcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    mode()
    monkeypatch.setattr(direct, "AGAIN", 0.05)
    claim, failures = transitions.claim, iter(range(1))

    def failing(**options: Any) -> list[JobExecution]:
        if next(failures, None) is not None:
            raise DatabaseError("the server has gone away")
        return claim(**options)

    monkeypatch.setattr(transitions, "claim", failing)

    def work() -> None: ...

    with jobs_of(work) as [working]:
        assert ended(working.push()).status == Status.OK


def test_a_full_backlog_leaves_the_rest_to_runjobs(
    mode: Callable[..., DirectDispatcher], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(direct, "BACKLOG_MAX", 2)
    dispatcher = mode(DIRECT_CONCURRENCY=1)
    release = threading.Event()

    def hold() -> None:
        release.wait(10)

    def is_taken() -> bool:
        # The backlog forgets a row a moment after its claim is written.
        return JobExecution.objects.running().exists() and not len(runner_of(dispatcher)._backlog)

    woken = threading.Event()
    with jobs_of(hold) as [holding]:
        first = holding.push()
        wait_for(is_taken, 10, "the slot is taken")
        dispatcher.subscribe(["default"], woken.set)
        rows = [holding.push(), holding.push()]
        assert not woken.is_set()
        with caplog.at_level(logging.WARNING, "django_jobs"):
            left = [holding.push(), holding.push()]
        # A worker in another process hears of it, where the database carries hints.
        assert woken.is_set()
        release.set()
        for row in (first, *rows):
            assert ended(row).status == Status.OK
        for row in left:
            row.refresh_from_db()
            assert row.status == Status.PENDING
    assert [record.getMessage() for record in caplog.records] == [
        "2 executions wait for slots in this process; more are left to runjobs"
    ]


def runner_of(dispatcher: DirectDispatcher) -> direct.DirectRunner:
    runner = dispatcher._here()._runner
    assert runner is not None
    return runner


@pytest.mark.medium
def test_its_end_lets_runs_end_and_retires_its_worker(mode: Callable[..., DirectDispatcher]) -> None:
    dispatcher = mode()
    began = threading.Event()

    def work() -> None:
        began.set()
        time.sleep(0.2)

    with jobs_of(work) as [working]:
        row = working.push()
        assert began.wait(10)
        dispatcher.close()
        row.refresh_from_db()
        assert row.status == Status.OK
        worker = Worker.objects.get()
        assert (worker.stopped_at is not None, worker.stop_reason) == (True, "the dispatcher was closed")
        # The next one begins anew.
        assert ended(working.push()).status == Status.OK
    assert Worker.objects.count() == 2


def test_its_end_lets_what_a_claim_still_brings_run(
    mode: Callable[..., DirectDispatcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatcher = mode(DRAIN_TIMEOUT=5)
    claim, claiming, go_on = transitions.claim, threading.Event(), threading.Event()

    def late(**options: Any) -> list[JobExecution]:
        claiming.set()
        assert go_on.wait(20)
        return claim(**options)

    monkeypatch.setattr(transitions, "claim", late)
    row = mark.push()
    assert claiming.wait(20)
    ending = threading.Thread(target=dispatcher.close)
    ending.start()
    ending.join(0.2)
    assert ending.is_alive()
    go_on.set()
    ending.join(10)
    row.refresh_from_db()
    assert row.status == Status.OK


@pytest.mark.parametrize(("reloads", "drain"), [("true", direct_mode.RELOAD_DRAIN), ("", None)])
def test_a_reload_does_not_wait_as_long_as_another_end(
    reloads: str, drain: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float | None] = []
    monkeypatch.setenv(DJANGO_AUTORELOAD_ENV, reloads)
    monkeypatch.setattr(direct_mode._Process, "end", lambda process, reason, drain: waits.append(drain))
    direct_mode._Process(os.getpid())._exit()
    assert waits == [drain]


@pytest.mark.medium
def test_its_end_hands_back_what_has_retry_and_ends_what_has_none(mode: Callable[..., DirectDispatcher]) -> None:
    dispatcher = mode()
    rows = [slow_retry.push(s=20), slow.push(s=20)]
    wait_for(lambda: JobExecution.objects.running().count() == 2, 10, "both run")
    started = time.monotonic()
    dispatcher.close()
    assert time.monotonic() - started < 15
    for row in rows:
        row.refresh_from_db()
    assert [(row.status, row.attempt) for row in rows] == [(Status.PENDING, 0), (Status.ERROR, 1)]
    assert "interrupted by shutdown" in rows[1].error


@pytest.mark.medium
def test_with_every_slot_stuck_it_leaves_its_rows_to_runjobs(
    mode: Callable[..., DirectDispatcher], caplog: pytest.LogCaptureFixture
) -> None:
    dispatcher = mode(DIRECT_CONCURRENCY=1)
    release, woken = threading.Event(), threading.Event()

    def stuck() -> None:
        release.wait(20)

    with jobs_of(stuck, timeout=0.1, interrupt=False) as [sticking]:
        with caplog.at_level(logging.ERROR, "django_jobs"):
            assert ended(sticking.push()).status == Status.ERROR
        dispatcher.subscribe(None, woken.set)
        left = sticking.push()
        assert woken.is_set()
        with a_worker():
            assert ended(left).status == Status.ERROR
        release.set()
    assert left.worker_id != Worker.objects.get(roles=["direct"]).pk
    assert "every slot of pid" in caplog.text


def test_a_thread_that_dies_costs_what_runs_and_not_the_process(mode: Callable[..., DirectDispatcher]) -> None:
    dispatcher = mode()

    def work() -> None: ...

    with jobs_of(work) as [working]:
        first = ended(working.push())
        broken = runner_of(dispatcher)
        running = slow_retry.push(s=20, heed=True)
        broken._on_death(RuntimeError("out of luck"))
        wait_for(lambda: not Worker.objects.filter(pk=first.worker_id, stopped_at=None).exists(), 10, "it says goodbye")
        second = ended(working.push())
        running.refresh_from_db()
    assert second.worker_id != first.worker_id
    wait_for(lambda: not any(loop.is_alive for loop in broken._engine.loops), 10, "its threads have ended")
    assert "RuntimeError: out of luck" in Worker.objects.get(pk=first.worker_id).stop_reason
    # Others rescue what a stopped worker holds.
    assert running.status in {Status.PENDING, Status.RUNNING}


def test_a_process_that_has_no_threads_left_says_so_and_tries_again(
    mode: Callable[..., DirectDispatcher], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mode()
    before = threads()
    scarce, start = ["django_jobs direct"], threading.Thread.start

    def start_or_not(thread: threading.Thread) -> None:
        if thread.name in scarce:
            scarce.remove(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(dispatchers, "_logged_at", float("-inf"))
    monkeypatch.setattr(threading.Thread, "start", start_or_not)
    with caplog.at_level(logging.ERROR, "django_jobs"):
        left = mark.push()
    assert "can't start new thread" in caplog.text
    wait_for(lambda: len(threads()) <= len(before), 10, "those that had started have ended")
    assert ended(mark.push()).status == Status.OK
    left.refresh_from_db()
    assert left.status == Status.PENDING


def test_what_is_pushed_while_the_process_ends_is_left_to_runjobs_without_a_word(
    mode: Callable[..., DirectDispatcher], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Hooks of atexit push, and threads that Python waits for after the last line of a script."""

    def refuse(call: Callable[[], object]) -> None:
        raise RuntimeError("can't register atexit after shutdown")

    monkeypatch.setattr(direct_mode, "at_exit", refuse)
    monkeypatch.setattr(dispatchers, "_logged_at", float("-inf"))
    dispatcher, woken = mode(), threading.Event()
    # As in a process that has pushed nothing before.
    monkeypatch.setattr(dispatcher, "_processes", {})
    subscription = dispatcher.subscribe(None, woken.set)
    row = mark.push()
    assert woken.wait(20)
    subscription.close()
    assert not Worker.objects.exists()
    row.refresh_from_db()
    assert row.status == Status.PENDING
    assert caplog.text == ""


def test_what_a_run_pushes_while_the_dispatcher_is_closed_is_left_to_runjobs(
    mode: Callable[..., DirectDispatcher],
) -> None:
    """Fault: it was started beside what was drained, and died with the server."""
    dispatcher = mode(DRAIN_TIMEOUT=5)
    began, go_on = threading.Event(), threading.Event()
    pushed: list[JobExecution] = []

    def work() -> None: ...

    def push() -> None:
        began.set()
        assert go_on.wait(20)
        pushed.append(working.push())

    with jobs_of(push, work) as [pushing, working]:
        row = pushing.push()
        assert began.wait(10)
        runner = runner_of(dispatcher)
        closing = threading.Thread(target=dispatcher.close)
        closing.start()
        wait_for(lambda: not runner.is_open, 20, "it is being closed")
        go_on.set()
        closing.join(10)
        row.refresh_from_db()
        assert row.status == Status.OK
        pushed[0].refresh_from_db()
        assert pushed[0].status == Status.PENDING
        assert Worker.objects.count() == 1


def test_a_first_push_that_meets_the_end_of_the_process_starts_nothing(
    mode: Callable[..., DirectDispatcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a thread that had just seen that the process does not end started what nobody ends."""
    dispatcher = mode()
    monkeypatch.setattr(dispatcher, "_processes", {})
    here = dispatcher._here()

    lock = here._lock

    class TakenAtTheEnd:
        def __enter__(self) -> None:
            here._lock = lock
            here._exit()
            lock.acquire()

        def __exit__(self, *args: object) -> None:
            lock.release()

    monkeypatch.setattr(here, "_lock", TakenAtTheEnd())
    row = mark.push()
    assert here._runner is None
    row.refresh_from_db()
    assert row.status == Status.PENDING


def test_the_end_of_the_process_is_heeded_once_however_often_the_dispatcher_was_closed(
    mode: Callable[..., DirectDispatcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks: list[Callable[[], object]] = []
    monkeypatch.setattr(direct_mode, "at_exit", hooks.append)
    dispatcher = mode()
    monkeypatch.setattr(dispatcher, "_processes", {})
    for _ in range(2):
        assert ended(mark.push()).status == Status.OK
        dispatcher.close()
    assert len(hooks) == 1


def test_ctrl_c_ends_the_wait_for_what_runs_at_the_end_of_the_process(
    mode: Callable[..., DirectDispatcher], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    dispatcher = mode()
    monkeypatch.setattr(dispatcher, "_processes", {})
    ended(mark.push())
    with monkeypatch.context() as patch:
        patch.setattr(runner_of(dispatcher), "end", interrupt)
        dispatcher._here()._exit()
    assert "its rows will be rescued" in caplog.text
    dispatcher.close()


def test_a_forked_child_begins_anew_and_touches_nothing_of_its_parent(
    mode: Callable[..., DirectDispatcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatcher = mode()
    parents = ended(mark.push()).worker_id
    here, pid = dispatcher._here(), os.getpid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: pid + 1)
        here._exit()
        assert not Worker.objects.exclude(stopped_at=None).exists()
        assert ended(mark.push()).worker_id != parents
        dispatcher.close()
    assert ended(mark.push()).worker_id == parents


def test_in_a_process_of_runjobs_the_worker_runs_what_is_pushed(mode: Callable[..., DirectDispatcher]) -> None:
    dispatcher = mode()
    with dispatcher.without_running(), a_worker():
        row = ended(mark.push())
    assert Worker.objects.get(pk=row.worker_id).roles == ["worker"]
    assert dispatcher._here()._runner is None


def test_a_process_that_runs_jobs_already_goes_on_while_runjobs_is_called_in_it(
    mode: Callable[..., DirectDispatcher],
) -> None:
    dispatcher = mode()
    before = ended(mark.push())
    with dispatcher.without_running():
        assert ended(mark.push()).worker_id == before.worker_id


@pytest.mark.django_db
def test_a_process_in_direct_mode_counts_for_no_worker(settings: Settings) -> None:
    settings.DJANGO_JOBS = {"DISPATCHER": "direct"}
    now = clock.now("default")
    WorkerFactory(roles=["direct"], queues=[], names=["acc.mark", "acc.only_here"], now=now)
    view = Fleet(using="default").look(now)
    assert (view.listed, view.listed_lately, view.settled_queues) == (frozenset(), frozenset(), Served())
    assert any("No worker has been seen" in line for line in outages())


class TestBacklog:
    def told(self, *ranks: int, queue: str = "default") -> list[Entry]:
        return [Entry(rank, uuid7(), queue) for rank in ranks]

    def test_the_best_come_first_one_queue_at_a_time(self) -> None:
        backlog = Backlog(10)
        low, high, other = (*self.told(5, -5), *self.told(0, queue="mail"))
        assert backlog.put([low, high, other]) == []
        assert [backlog.take(3), backlog.take(3), backlog.take(3), backlog.take(3)] == [[high], [other], [low], []]

    def test_no_more_are_taken_than_asked_for_the_older_ones_first(self) -> None:
        backlog = Backlog(10)
        rows = self.told(0, 0, 0)
        backlog.put(reversed(rows))
        assert (backlog.take(2), len(backlog)) == (rows[:2], 1)

    def test_each_row_is_kept_once_and_what_does_not_fit_comes_back(self) -> None:
        backlog = Backlog(2)
        rows = self.told(0, 0, 0)
        assert backlog.put([rows[0], rows[0]]) == []
        assert backlog.put(rows) == [rows[2].pk]

    def test_what_is_put_back_comes_when_its_time_is_over_also_to_a_full_one(self) -> None:
        backlog = Backlog(1)
        (row,) = self.told(0)
        backlog.put([row])
        taken = backlog.take(1)
        backlog.put_back([], delay=0)
        backlog.put(self.told(1))
        backlog.put_back(taken, delay=0.1)
        assert (len(backlog), len(backlog.take(1)), backlog.take(1)) == (2, 1, [])
        wait_for(lambda: backlog.take(1) == [row], 20, "the row comes back")

    def test_of_a_job_at_its_limit_a_few_come_back_at_a_time_and_at_once_when_runs_ended(self) -> None:
        backlog = Backlog(10)
        rows = self.told(0, 0, 0, 0, 0)
        backlog.put_back(rows, delay=60, job="shop.sync")
        assert backlog.take(2) == []
        backlog.hasten({"shop.sync", "shop.other"})
        assert (backlog.take(2), backlog.take(2)) == (rows[:2], [])
        backlog.hasten({"shop.sync"})
        assert backlog.take(9) == rows[2:]
        assert len(backlog) == 0
