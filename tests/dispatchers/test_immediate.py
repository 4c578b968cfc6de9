"""Jobs that run in the thread that pushes them, in a test's transaction and outside of any."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import connection, connections, transaction

from django_jobs import JobContext, Keep, Reschedule, Retry, current_context, signals
from django_jobs.dispatchers import get_dispatcher
from django_jobs.dispatchers.immediate import ImmediateDispatcher
from django_jobs.models import JobExecution, JobState, Worker
from django_jobs.states import Status
from tests.acc.models import Thing
from tests.dispatchers.contract import DispatcherContract
from tests.factories import JobStateFactory, QueueStateFactory
from tests.runtime.workers import a_worker, ended, jobs_of
from tests.support import assert_consistent

if TYPE_CHECKING:
    from pytest_django import DjangoCaptureOnCommitCallbacks, Settings


class TestInAProcessOfRunjobs(DispatcherContract):
    @pytest.fixture
    def dispatcher(self) -> Iterator[ImmediateDispatcher]:
        made = ImmediateDispatcher({"LISTEN": False})
        with made.without_running():
            yield made
        made.close()


async def awaited(coroutine: Any) -> Any:
    return await coroutine


# The thread in which a coroutine has its queries run.
ident = sync_to_async(threading.get_ident)

both = pytest.mark.parametrize(
    "commits",
    [
        pytest.param(False, id="in a test's transaction", marks=pytest.mark.django_db),
        pytest.param(True, id="committed", marks=pytest.mark.django_db(transaction=True)),
    ],
)
in_a_test = pytest.mark.parametrize(
    "commits", [pytest.param(False, id="in a test's transaction", marks=pytest.mark.django_db)]
)


@pytest.fixture
def commit(
    commits: bool, settings: Settings, django_capture_on_commit_callbacks: DjangoCaptureOnCommitCallbacks
) -> Iterator[Callable[[], Any]]:
    """The block after which what was pushed inside has run."""
    settings.DJANGO_JOBS = {**settings.DJANGO_JOBS, "DISPATCHER": "immediate"}
    yield transaction.atomic if commits else lambda: django_capture_on_commit_callbacks(execute=True)
    assert_consistent()
    assert not Worker.objects.exists()


def now(row: JobExecution) -> JobExecution:
    row.refresh_from_db()
    return row


@both
def test_it_runs_at_commit_in_the_thread_that_pushed(commit: Callable[[], Any]) -> None:
    """In a TestCase nothing commits, so what tests push never runs.

    Sources: wagtail/wagtail PR#12787, pytest-dev/pytest-django#752.
    """
    seen: list[tuple[int, int]] = []

    def note(number: int) -> str:
        seen.append((number, threading.get_ident()))
        return "done"

    with jobs_of(note) as [noting]:
        with commit():
            row = noting.push(number=7)
            assert seen == []
        assert seen == [(7, threading.get_ident())]
    row = now(row)
    assert (row.status, row.result, row.attempt) == (Status.OK, "done", 1)
    assert noting.mode == "immediate"


@pytest.mark.django_db(transaction=True)
def test_all_of_a_bulk_push_run_the_best_ones_first(settings: Settings) -> None:
    settings.DJANGO_JOBS = {"DISPATCHER": "immediate"}
    order: list[str] = []

    def note(name: str) -> None:
        order.append(name)

    with jobs_of(note) as [noting]:
        noting.push_many([{"name": "a"}, {"name": "b"}, noting.using(priority="high").item(name="c")])
    assert order == ["c", "a", "b"]


@both
@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(1)], ids=type)
def test_a_failing_handler_does_not_break_who_pushes(commit: Callable[[], Any], error: BaseException) -> None:
    def fail() -> None:
        raise error

    with jobs_of(fail) as [failing]:
        with commit():
            Thing.objects.create(name="before")
            row = failing.push()
        assert Thing.objects.get().name == "before"
    assert (now(row).status, row.errors[0]["message"]) == (Status.ERROR, str(error))


@both
def test_a_handler_that_breaks_the_transaction_does_not_break_who_pushes(commit: Callable[[], Any]) -> None:
    """In synchronous mode a worker's clean-up broke the caller's transaction; source: Koed00/django-q#127, #368."""

    def collide() -> None:
        JobState.objects.create(job_name="x")
        with connection.cursor() as cursor:
            table = connection.ops.quote_name(JobState._meta.db_table)
            cursor.execute(f"INSERT INTO {table} (job_name) VALUES ('x')")

    with jobs_of(collide) as [colliding]:
        with commit():
            Thing.objects.create(name="before")
            row = colliding.push()
        assert Thing.objects.get().name == "before"
    assert now(row).status == Status.ERROR
    assert "IntegrityError" in row.errors[0]["exception"] or "OperationalError" in row.errors[0]["exception"]


@in_a_test
def test_a_failure_with_retry_waits_for_its_next_try(commit: Callable[[], Any]) -> None:
    def fail() -> None:
        raise ValueError("once more")

    with jobs_of(fail, retry=Retry(2, backoff=60)) as [failing]:
        with commit():
            row = failing.push()
        row = now(row)
        assert (row.status, row.attempt, row.error) == (Status.SCHEDULED, 1, "ValueError: once more")
        assert row.scheduled_at > row.updated_at


@in_a_test
def test_what_waits_for_its_time_runs_when_it_is_started_now(commit: Callable[[], Any]) -> None:
    def fail_once(ctx: JobContext) -> None:
        if ctx.attempt == 1:
            raise ValueError("once more")

    with jobs_of(fail_once, retry=Retry(2, backoff=60)) as [failing]:
        with commit():
            retried, delayed = failing.push(), failing.using(delay=60).push()
        with commit():
            now(retried).start_now()
            delayed.start_now()
    assert (now(retried).status, retried.attempt) == (Status.OK, 2)
    assert (now(delayed).status, delayed.attempt) == (Status.SCHEDULED, 1)


@in_a_test
def test_a_delayed_push_stays_scheduled(commit: Callable[[], Any]) -> None:
    def job() -> None:
        raise AssertionError("it ran")

    with jobs_of(job) as [delayed], commit():
        row = delayed.using(delay=60).push()
    assert now(row).status == Status.SCHEDULED


@both
def test_what_a_handler_pushes_runs_after_that_handler(commit: Callable[[], Any]) -> None:
    order: list[str] = []

    def inner() -> None:
        order.append("inner")

    def outer() -> None:
        with transaction.atomic():
            Thing.objects.create(name="of the handler")
            pushing.push()
        order.append("outer")

    with jobs_of(inner, outer) as [pushing, pushed]:
        with commit():
            pushed.push()
        assert order == ["outer", "inner"]
    assert set(JobExecution.objects.values_list("status", flat=True)) == {Status.OK}


@both
def test_a_coroutine_runs_too(commit: Callable[[], Any]) -> None:
    async def count(ctx: JobContext) -> int:
        assert current_context() is ctx
        return await Thing.objects.acount()

    with jobs_of(count) as [counting]:
        with commit():
            Thing.objects.create(name="seen")
            row = counting.push()
        assert (now(row).status, row.result) == (Status.OK, 1)


@pytest.mark.parametrize("commits", [pytest.param(True, marks=pytest.mark.django_db(transaction=True))])
@pytest.mark.parametrize("run", [asyncio.run, async_to_sync(awaited)], ids=["a loop", "a test's loop"])
def test_a_coroutine_that_asks_the_database_does_not_wait_for_the_coroutine_that_pushed_it(
    commit: Callable[[], Any], run: Callable[[Any], Any]
) -> None:
    """Fault: both were to run on one loop, and the thread for their queries was taken by the push, for ever."""
    seen: list[tuple[str, int, int]] = []

    async def inner() -> None:
        seen.append(("inner", await Thing.objects.acount(), await ident()))

    async def outer() -> None:
        await Thing.objects.acreate(name="of the handler")
        await pushing.apush()
        seen.append(("outer", await Thing.objects.acount(), await ident()))

    def returning() -> Any:
        return outer()

    async def push() -> int:
        await pushed.apush()
        await also.apush()
        # That of the thread of a loop would keep the database from being dropped.
        await sync_to_async(connections.close_all)()
        return await ident()

    with jobs_of(inner, outer, returning) as [pushing, pushed, also]:
        thread = run(push())
    assert seen == [(name, count, thread) for count in (1, 2) for name in ("outer", "inner")]
    assert set(JobExecution.objects.values_list("status", flat=True)) == {Status.OK}


@pytest.mark.parametrize("commits", [pytest.param(True, marks=pytest.mark.django_db(transaction=True))])
def test_a_transaction_that_a_handler_leaves_open_is_rolled_back_and_told(
    commit: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Fault: the connection of who pushed stayed without autocommit, and nothing that it wrote later was kept."""

    def leave_open() -> None:
        transaction.set_autocommit(False)
        Thing.objects.create(name="of the handler")

    with jobs_of(leave_open) as [leaving]:
        row = leaving.push()
    assert connection.get_autocommit()
    assert now(row).status == Status.OK
    assert not Thing.objects.exists()
    assert "tests.leave_open left a transaction open on 'default'; it is rolled back" in caplog.text


@both
def test_an_atomic_job_leaves_all_or_nothing(commit: Callable[[], Any]) -> None:
    def work(fails: bool) -> None:
        Thing.objects.create(name=f"fails={fails}")
        if fails:
            raise ValueError("no")

    with jobs_of(work, atomic=True) as [working]:
        with commit():
            good, bad = working.push(fails=False), working.push(fails=True)
        assert (now(good).status, now(bad).status) == (Status.OK, Status.ERROR)
    assert [thing.name for thing in Thing.objects.all()] == ["fails=False"]


@in_a_test
def test_the_signals_come_in_the_order_of_events(commit: Callable[[], Any]) -> None:
    events: list[str] = []

    def work() -> None:
        events.append("work")

    def started(**kwargs: Any) -> None:
        events.append("started")

    def finished(**kwargs: Any) -> None:
        events.append(f"finished {kwargs['execution'].status}")

    signals.job_started.connect(started)
    signals.job_finished.connect(finished)
    try:
        with jobs_of(work) as [working], commit():
            working.push()
    finally:
        signals.job_started.disconnect(started)
        signals.job_finished.disconnect(finished)
    assert events == ["started", "work", "finished ok"]


@in_a_test
@pytest.mark.parametrize(("keep", "left"), [(0, 0), (2, 2)])
def test_no_more_rows_stay_than_the_job_keeps(commit: Callable[[], Any], keep: int, left: int) -> None:
    def work() -> None: ...

    with jobs_of(work, keep=Keep(ok=keep)) as [working], commit():
        working.push_many([{}] * 4)
    assert JobExecution.objects.count() == left


@in_a_test
def test_what_is_paused_stays_pending(commit: Callable[[], Any]) -> None:
    def work() -> None:
        raise AssertionError("it ran")

    def also() -> None:
        raise AssertionError("it ran")

    JobStateFactory(job_name="tests.work", paused=True)
    QueueStateFactory(queue="slow", paused=True)
    with jobs_of(work, also) as [working, other], commit():
        rows = [working.push(), other.using(queue="slow").push()]
    assert [now(row).status for row in rows] == [Status.PENDING] * 2


@both
def test_a_job_with_a_limit_runs(commit: Callable[[], Any]) -> None:
    def work() -> None: ...

    with jobs_of(work, concurrency=1) as [working], commit():
        rows = working.push_many([{}] * 3)
    assert {now(row).status for row in rows} == {Status.OK}


@in_a_test
def test_a_reschedule_parks_the_row(commit: Callable[[], Any]) -> None:
    def later() -> None:
        raise Reschedule(delay=60)

    with jobs_of(later) as [waiting], commit():
        row = waiting.push()
    assert (now(row).status, row.attempt) == (Status.SCHEDULED, 0)


@in_a_test
def test_an_interrupt_from_the_keyboard_ends_who_pushed_and_not_only_the_job(commit: Callable[[], Any]) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with jobs_of(interrupted) as [working]:
        with pytest.raises(KeyboardInterrupt), commit():
            row = working.push()
        assert now(row).status == Status.ERROR


@pytest.mark.django_db(transaction=True)
def test_a_push_without_a_transaction_runs_before_it_returns(settings: Settings) -> None:
    settings.DJANGO_JOBS = {"DISPATCHER": "immediate"}

    def work() -> None: ...

    with jobs_of(work) as [working]:
        assert now(working.push()).status == Status.OK


@pytest.mark.django_db(transaction=True)
@pytest.mark.medium
def test_a_long_run_outside_of_a_transaction_beats(settings: Settings) -> None:
    settings.DJANGO_JOBS = {"DISPATCHER": "immediate", "HEARTBEAT_INTERVAL": 0.1, "WORKER_LOST_AFTER": 0.3}
    beats = []

    def work(ctx: JobContext) -> None:
        worker = Worker.objects.get()
        while not ctx.signal.wait(0.05) and len(beats) < 3:
            worker.refresh_from_db()
            beats.extend({worker.heartbeat_at} - set(beats))

    with jobs_of(work) as [working]:
        assert now(working.push()).status == Status.OK
    assert len(beats) == 3
    assert not Worker.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_in_a_process_of_runjobs_the_worker_runs_it(settings: Settings) -> None:
    settings.DJANGO_JOBS = {"DISPATCHER": "immediate"}
    threads: list[str] = []

    def work() -> None:
        threads.append(threading.current_thread().name)

    with jobs_of(work) as [working], get_dispatcher().without_running(), a_worker():
        assert ended(working.push()).status == Status.OK
    assert threads[0].startswith("django_jobs slot")
