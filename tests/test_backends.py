"""Django's own tasks on the workers of django_jobs: what the framework promises, and what the engine does for it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.db import connections, transaction
from django.test import override_settings
from django.utils import timezone

from django_jobs import InvalidPayload, backends, clock, conf, job, job_finished, registry, retention
from django_jobs.backends import JobsBackend
from django_jobs.checks import check_jobs
from django_jobs.models import JobExecution, Worker
from django_jobs.states import Status
from tests.acc.models import Thing
from tests.factories import JobExecutionFactory
from tests.portable import (
    BaseTaskBackend,
    InvalidTask,
    TaskResultDoesNotExist,
    TaskResultMismatch,
    TaskResultStatus,
    task,
    task_backends,
    task_enqueued,
    task_finished,
    task_started,
)
from tests.portable.fixtures import finished, portable_tasks
from tests.runtime.support import heard
from tests.runtime.workers import a_worker
from tests.support import Runjobs, assert_consistent, manage, wait_for

READY, RUNNING = TaskResultStatus.READY, TaskResultStatus.RUNNING
SUCCESSFUL, FAILED = TaskResultStatus.SUCCESSFUL, TaskResultStatus.FAILED
PATH = "tests.portable.tasks"


@pytest.fixture
def tasks() -> Iterator[Any]:
    with portable_tasks() as module:
        yield module


def backend() -> Any:
    return task_backends["default"]


def row_of(result: Any) -> JobExecution:
    return JobExecution.objects.get(pk=result.id)


class TestDefinition:
    def test_a_task_is_a_registered_job_named_by_its_path(self, tasks: Any) -> None:
        made = registry.get(f"{PATH}.see")
        assert (made.queue, made.priority, made.retries, made.description) == ("mail", 7, 0, "")
        assert registry.get(f"{PATH}.add").description == "Return the sum."
        assert registry.get(f"{PATH}.add_later").is_async
        assert registry.place(made).startswith(f"{PATH}.see (")

    def test_a_copy_made_by_using_registers_nothing(self, tasks: Any) -> None:
        before = registry.get(f"{PATH}.add")
        tasks.add.using(priority=50, queue_name="mail")
        assert registry.get(f"{PATH}.add") is before
        assert (before.queue, before.priority) == ("default", 0)

    def test_a_module_that_is_loaded_again_replaces_its_own_tasks(self, tasks: Any, tmp_path: Path) -> None:
        import importlib

        before = registry.get(f"{PATH}.add")
        importlib.reload(tasks)
        assert registry.get(f"{PATH}.add") is not before

    def test_the_backend_supports_all_there_is(self, tasks: Any) -> None:
        supports = {name for name in dir(BaseTaskBackend) if name.startswith("supports_")}
        assert {name: getattr(backend(), name) for name in supports} == dict.fromkeys(supports, True)
        assert isinstance(backend(), BaseTaskBackend)

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"priority": 101}, "-100 and 100"),
            ({"priority": -101}, "-100 and 100"),
            ({"queue_name": "unknown"}, "unknown"),
            ({"takes_context": True}, "context"),
        ],
        ids=repr,
    )
    def test_what_django_refuses_is_refused(self, tasks: Any, options: dict[str, Any], match: str) -> None:
        with pytest.raises(InvalidTask, match=match):
            task(**options)(tasks.add.func)

    def test_a_function_inside_a_function_is_refused(self, tasks: Any) -> None:
        with pytest.raises(InvalidTask, match="module level"):
            task(lambda: None)

    @pytest.mark.parametrize(
        "changes",
        [{"queue_name": "no good"}, {"queue_name": "q" * 101}, {"run_after": datetime.max.replace(tzinfo=UTC)}],
        ids=["name", "length", "time"],
    )
    def test_what_no_row_can_hold_is_refused_before_it_is_enqueued(self, tasks: Any, changes: dict[str, Any]) -> None:
        with (
            override_settings(TASKS={"default": {"BACKEND": "django_jobs.backends.JobsBackend", "QUEUES": []}}),
            pytest.raises(InvalidTask, match=rf"{PATH}\.add: (queue|scheduled_at)="),
        ):
            tasks.add.using(**changes)

    def test_a_naive_run_after_is_refused(self, tasks: Any) -> None:
        with pytest.raises(InvalidTask, match="aware"):
            tasks.add.using(run_after=timezone.now().replace(tzinfo=None))

    def test_a_generator_is_refused_by_name(self, tasks: Any) -> None:
        with pytest.raises(InvalidTask, match="generate: a generator cannot be a handler"):
            task(generate)

    def test_a_name_that_no_row_can_have_is_refused_with_the_mend(
        self, tasks: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(plain, "__qualname__", "größe")
        with pytest.raises(InvalidTask, match=r"größe.*expected at most 200 ASCII letters"):
            task(plain)

    def test_a_job_that_has_the_name_already_is_named(self, tasks: Any) -> None:
        registry.unregister(f"{PATH}.add")
        job(name=f"{PATH}.add")(plain)
        with pytest.raises(InvalidTask, match=rf"Two jobs are called '{PATH}\.add'.*test_backends\.plain"):
            tasks.add.using()


def generate() -> Iterator[int]:
    yield 1


def plain() -> None: ...


@pytest.mark.django_db
class TestEnqueue:
    def test_it_is_one_row(self, tasks: Any) -> None:
        result = tasks.see.enqueue(1, two=[2, None])
        row = row_of(result)
        assert (row.job_name, row.status, row.queue, row.priority) == (f"{PATH}.see", Status.PENDING, "mail", 7)
        assert (row.payload, row.max_attempts) == ({"args": [1], "kwargs": {"two": [2, None]}}, 1)
        assert (result.task, result.status, result.backend) == (tasks.see, READY, "default")
        assert (result.args, result.kwargs, result.errors, result.worker_ids) == ([1], {"two": [2, None]}, [], [])
        assert result.enqueued_at == row.created_at
        assert (result.started_at, result.finished_at, result.last_attempted_at) == (None, None, None)
        assert_consistent()

    def test_operators_push_it_as_any_job(self, tasks: Any) -> None:
        with heard(task_enqueued) as told:
            call_command(
                "jobs", "push", f"{PATH}.see", payload='{"args": [1], "kwargs": {"two": 2}}', stdout=StringIO()
            )
        (result,) = [call["task_result"] for call in told]
        assert (result.args, result.kwargs, result.task.queue_name) == ([1], {"two": 2}, "mail")
        assert tasks.see.get_result(result.id) == result

    def test_a_rolled_back_transaction_drops_it(self, tasks: Any) -> None:
        with transaction.atomic():
            result = tasks.add.enqueue(1)
            assert tasks.add.get_result(result.id) == result
            transaction.set_rollback(True)
        assert not JobExecution.objects.exists()
        with pytest.raises(TaskResultDoesNotExist):
            tasks.add.get_result(result.id)

    @pytest.mark.parametrize("priority", [-100, -1, 0, 50, 100])
    def test_priorities_are_the_numbers_of_a_push(self, tasks: Any, priority: int) -> None:
        enqueued = row_of(tasks.add.using(priority=priority).enqueue(1))
        pushed = registry.get(f"{PATH}.add").using(priority=priority).push(args=[1], kwargs={})
        assert (enqueued.priority, enqueued.rank) == (pushed.priority, pushed.rank) == (priority, -priority)

    def test_run_after_is_the_time_it_is_due(self, tasks: Any) -> None:
        later = timezone.now() + timedelta(hours=1)
        result = tasks.add.using(run_after=later).enqueue(1)
        row = row_of(result)
        assert (row.status, row.scheduled_at) == (Status.SCHEDULED, later)
        again = tasks.add.get_result(result.id)
        assert (again.status, again.task.run_after) == (READY, later)

    def test_a_run_after_that_has_gone_by_is_at_once(self, tasks: Any) -> None:
        result = tasks.add.using(run_after=timezone.now() - timedelta(hours=1)).enqueue(1)
        assert row_of(result).status == Status.PENDING
        assert tasks.add.get_result(result.id).task.run_after is None

    def test_what_has_a_json_form_arrives_in_it(self, tasks: Any) -> None:
        result = tasks.see.enqueue((1, (2,)), b"text", Status.OK, range(2), key=True)
        assert row_of(result).payload == {"args": [[1, [2]], "text", "ok", [0, 1]], "kwargs": {"key": True}}
        assert result.args == [[1, [2]], "text", "ok", [0, 1]]

    def test_a_text_enum_that_says_something_else_is_its_value(self, tasks: Any) -> None:
        import enum

        class Colour(str, enum.Enum):  # noqa: UP042 - the older kind is the one meant
            RED = "red"

        class Size(enum.IntEnum):
            LARGE = 3

        assert tasks.see.enqueue(Colour.RED, Size.LARGE).args == ["red", 3]
        assert row_of(tasks.see.enqueue({Colour.RED: Colour.RED})).payload["args"] == [{"red": "red"}]

    @pytest.mark.parametrize(
        ("value", "path"),
        [
            (math.nan, "[0]"),
            ({"x": [math.inf]}, "[0].x[0]"),
            ([-math.inf], "[0][0]"),
            (Decimal("NaN"), "[0]"),
            ({"a": Decimal(1)}, "[0].a"),
            (Thing, "[0]"),
            ("x\x00", "[0]"),
            ("\ud800", "[0]"),
            ({1: 2}, "[0]"),
            (2**70, "[0]"),
            ({1, 2}, "[0]"),
            (b"\xff", "[0]"),
            (uuid.UUID(int=1), "[0]"),
            ("x" * 300_000, ""),
        ],
        ids=lambda value: ascii(value)[:30],
    )
    def test_a_bad_argument_writes_nothing_and_leaves_the_transaction_usable(
        self, tasks: Any, value: Any, path: str
    ) -> None:
        with transaction.atomic():
            Thing.objects.create(name="before")
            for args, kwargs, where in (((value,), {}, f"payload.args{path}"), ((), {"v": value}, "payload.kwargs.v")):
                with pytest.raises(InvalidPayload) as caught:
                    tasks.see.enqueue(*args, **kwargs)
                assert str(caught.value).startswith(f"{PATH}.see: ")
                assert (where if path else "262144") in str(caught.value)
            assert Thing.objects.count() == 1
        assert not JobExecution.objects.exists()

    def test_a_value_that_holds_itself_is_refused(self, tasks: Any) -> None:
        with pytest.raises(InvalidPayload, match="holds itself"):
            tasks.add.enqueue(tasks.VALUES["endless"])

    def test_a_task_of_another_queue_than_those_of_today_is_refused(self, tasks: Any) -> None:
        mail = tasks.add.using(queue_name="mail")
        with override_settings(TASKS={"default": {"BACKEND": "django_jobs.backends.JobsBackend"}}):
            with pytest.raises(InvalidTask, match="mail"):
                mail.enqueue(1)
            assert not JobExecution.objects.exists()


@pytest.mark.django_db
class TestGetResult:
    @pytest.mark.parametrize("result_id", [str(uuid.UUID(int=1)), "", "no id", "x" * 50, "\x00", None, 7], ids=repr)
    def test_an_unknown_id_does_not_exist(self, tasks: Any, result_id: Any) -> None:
        with pytest.raises(TaskResultDoesNotExist, match="No task result has the id"):
            backend().get_result(result_id)

    def test_a_plain_job_is_no_task(self, tasks: Any) -> None:
        made = job(name="tests.plain")(plain)
        for row in (made.push(), JobExecutionFactory(job_name="tests.gone")):
            with pytest.raises(TaskResultDoesNotExist, match=rf"{row.job_name} {row.pk} belongs to no task"):
                backend().get_result(str(row.pk))

    def test_the_result_of_another_task_is_a_mismatch(self, tasks: Any) -> None:
        with pytest.raises(TaskResultMismatch, match=rf"{PATH}\.add"):
            tasks.boom.get_result(tasks.add.enqueue(1).id)

    def test_it_has_the_task_as_it_was_enqueued(self, tasks: Any) -> None:
        result = tasks.add.using(priority=-5, queue_name="mail").enqueue(1)
        assert tasks.add.get_result(result.id) == result
        with override_settings(TASKS={"default": {"BACKEND": "django_jobs.backends.JobsBackend"}}):
            # Its queue is none of the backend's any more.
            assert tasks.add.get_result(result.id).task.queue_name == "mail"

    def test_a_waiting_row_that_is_cancelled_has_failed(
        self, tasks: Any, django_capture_on_commit_callbacks: Callable[..., Any]
    ) -> None:
        result = tasks.add.enqueue(1)
        with heard(task_finished) as told, django_capture_on_commit_callbacks(execute=True):
            row_of(result).cancel(by="a person")
        result.refresh()
        assert (result.status, result.worker_ids, result.started_at) == (FAILED, [], None)
        assert result.finished_at is not None
        assert [error.exception_class_path for error in result.errors] == ["django_jobs.exceptions.Cancelled"]
        assert "cancelled" in result.errors[0].traceback
        assert result.errors[0].exception_class.__name__ == "Cancelled"
        assert [call["task_result"] for call in told] == [result]
        with pytest.raises(ValueError, match="Task failed"):
            result.return_value  # noqa: B018 - asking is the test
        row_of(result).retry()
        result.refresh()
        assert (result.status, result.errors, result.finished_at) == (READY, [], None)

    def test_without_time_zones_it_has_the_projects_own_times(self, tasks: Any) -> None:
        # Without summer time: in other zones an hour from now may be a time that the clock leaves out.
        with override_settings(USE_TZ=False, TIME_ZONE="Asia/Kolkata"):
            later = timezone.now() + timedelta(hours=1)
            result = tasks.add.using(run_after=later).enqueue(1)
            assert result.enqueued_at is not None
            # The row has the database's clock.
            assert abs(timezone.now() - result.enqueued_at) < timedelta(minutes=1)
            assert tasks.add.get_result(result.id).task.run_after == later


@pytest.mark.medium
@pytest.mark.django_db(transaction=True)
class TestRun:
    @pytest.mark.parametrize("name", ["add", "add_later"])
    def test_a_task_runs_and_its_result_is_there(self, tasks: Any, name: str) -> None:
        enqueued = getattr(tasks, name).enqueue(40, b=2)
        with pytest.raises(ValueError, match="not finished"):
            enqueued.return_value  # noqa: B018 - asking is the test
        with a_worker():
            result = finished(enqueued)
        row = row_of(result)
        assert (result.status, result.return_value, result.errors) == (SUCCESSFUL, 42, [])
        assert (row.status, row.result) == (Status.OK, 42)
        assert result.enqueued_at <= result.started_at == result.last_attempted_at <= result.finished_at
        assert (result.worker_ids, result.attempts) == ([str(row.worker_id)], 1)
        assert_consistent()

    def test_the_asynchronous_twins_do_the_same(self, tasks: Any) -> None:
        async def story() -> Any:
            result = await tasks.add_later.aenqueue(1, b=1)
            for _ in range(1000):
                await result.arefresh()
                if result.is_finished:
                    break
                await asyncio.sleep(0.01)
            again = await tasks.add_later.aget_result(result.id)
            # The thread that asked has a connection of its own.
            await sync_to_async(connections.close_all)()
            return again

        with a_worker():
            assert asyncio.run(story()).return_value == 2

    @pytest.mark.parametrize("name", ["see", "see_later"])
    def test_the_context_shows_the_run(self, tasks: Any, name: str) -> None:
        with a_worker():
            result = finished(getattr(tasks, name).using(queue_name="mail", priority=7).enqueue(1, two=2))
        seen = result.return_value
        assert seen.pop("pid")
        assert seen == {
            "id": result.id,
            "attempt": 1,
            "status": "RUNNING",
            "args": [1],
            "kwargs": {"two": 2},
            "queue": "mail",
            "priority": 7,
        }

    def test_a_later_attempt_knows_its_number(self) -> None:
        with portable_tasks(retry=1) as tasks:
            result = tasks.see.enqueue()
            row = row_of(result)
            assert row.max_attempts == 2
            entry = {
                "exception": "ValueError",
                "worker": "a host",
                "attempt": 1,
                "started_at": row.created_at.isoformat(),
            }
            JobExecution.objects.filter(pk=row.pk).update(attempt=1, errors=[entry])
            with a_worker():
                finished(result)
        assert result.return_value["attempt"] == 2
        assert result.worker_ids == ["a host", str(row_of(result).worker_id)]
        assert result.started_at == result.enqueued_at < result.last_attempted_at
        assert [error.exception_class for error in result.errors] == [ValueError]

    def test_a_task_that_fails_tells_why_and_runs_no_second_time(self, tasks: Any) -> None:
        with a_worker():
            result = finished(tasks.boom.enqueue("no good"))
        (error,) = result.errors
        assert (result.status, result.attempts, row_of(result).status) == (FAILED, 1, Status.ERROR)
        assert (error.exception_class_path, error.exception_class) == ("builtins.ValueError", ValueError)
        assert "raise ValueError(text)" in error.traceback
        assert error.traceback.endswith("ValueError: no good\n")
        assert result.finished_at is not None
        assert_consistent()

    def test_arguments_that_do_not_fit_fail_the_run(self, tasks: Any) -> None:
        with a_worker():
            result = finished(tasks.add.enqueue(1, 2, 3))
        assert result.status == FAILED
        assert result.errors[0].exception_class is TypeError

    @pytest.mark.parametrize("name", ["give", "give_later"])
    @pytest.mark.parametrize(
        ("what", "reason"),
        [
            ("nan", r"result\[1\]: nan is not JSON"),
            ("inf", r"result\.x\.y: inf is not JSON"),
            ("decimal", r"result\.total: Decimal has no JSON form"),
            ("object", r"result: object has no JSON form"),
            ("nul", r"result\[1\]: contains a NUL"),
            ("surrogate", r"result: contains a lone surrogate"),
            ("key", r"result: has the key 1, int"),
            ("large", r"result: is 300002 bytes of JSON; PAYLOAD_MAX_BYTES allows 262144"),
            ("spaced", r"result: is 360000 bytes of JSON"),
            ("wide", r"result: is beyond 64 bits"),
            ("bytes", r"result: contains bytes that are not UTF-8"),
            ("set", r"result: set has no JSON form"),
            ("endless", r"holds itself"),
        ],
    )
    def test_what_cannot_be_stored_ends_the_run_as_an_error(
        self, tasks: Any, what: str, reason: str, name: str
    ) -> None:
        """A value that is not JSON left the row running for ever, or was dropped without a word."""
        with a_worker():
            result = finished(getattr(tasks, name).enqueue(what))
        (error,) = result.errors
        assert (result.status, error.exception_class_path) == (FAILED, "django_jobs.exceptions.InvalidResult")
        row = row_of(result)
        assert row.error.startswith(f"InvalidResult: {PATH}.{name}: its return value cannot be stored: result")
        assert row.result is None
        assert re.search(reason, row.error)
        assert_consistent()

    def test_a_value_that_cannot_be_stored_is_no_reason_to_run_again(self) -> None:
        with portable_tasks(retry=3) as tasks, a_worker():
            result = finished(tasks.give.enqueue("nan"))
        assert (result.status, result.attempts) == (FAILED, 1)

    def test_an_atomic_task_whose_value_cannot_be_stored_has_no_effects(self) -> None:
        with portable_tasks(atomic=True) as tasks, a_worker():
            made = finished(tasks.make_thing.enqueue("kept", "fine"))
            undone = finished(tasks.make_thing.enqueue("undone", "nan"))
        assert (made.status, undone.status) == (SUCCESSFUL, FAILED)
        assert [thing.name for thing in Thing.objects.all()] == ["kept"]

    def test_what_has_a_json_form_is_stored_in_it(self, tasks: Any) -> None:
        with a_worker():
            value = finished(tasks.pairs.enqueue()).return_value
        assert value == {"tuple": [1, 2], "bytes": "text", "level": "acc.Thing", "flags": [True, None, 1.5]}

    def test_arguments_named_like_internals_arrive(self, tasks: Any) -> None:
        """An argument whose name equals an internal one is silently dropped or overwritten (coleifer/huey 3.0.2)."""
        names = ["task", "job", "key", "delay", "priority", "payload", "context", "args", "kwargs", "id", "logger"]
        names += ["result", "backend", "name", "func", "cls"]
        given = {name: number for number, name in enumerate(names)}
        with a_worker():
            assert finished(tasks.echo.enqueue(**given)).return_value == given
            # Task.enqueue() has a self of its own.
            result = backend().enqueue(tasks.echo, (), {"self": 1, **given})
            assert finished(result).return_value == {"self": 1, **given}

    def test_higher_priorities_run_first_as_those_of_a_push(self, tasks: Any) -> None:
        """Which end of the scale comes first is not the same in every place (taskcluster/taskcluster#9131)."""
        mark = registry.get(f"{PATH}.mark")
        results = [tasks.mark.using(priority=n).enqueue(["task", n]) for n in (0, -100, 100, 7)]
        pushed = [mark.using(priority=n).push(args=[["job", n]], kwargs={}) for n in (-7, 99, "high", "low")]
        with a_worker(concurrency=1):
            for result in results:
                finished(result)
            wait_for(lambda: len(tasks.ran) == len(results) + len(pushed), 15, "all ran")
        by = [("task", 100), ("job", 99), ("job", "high"), ("task", 7), ("task", 0), ("job", -7), ("job", "low")]
        assert [tuple(entry) for entry in tasks.ran] == [*by, ("task", -100)]

    def test_a_running_task_is_running_and_one_that_is_cancelled_then_has_failed(self, tasks: Any) -> None:
        result = tasks.hold.enqueue()
        with a_worker() as worker:
            assert tasks.began.wait(15)
            result.refresh()
            assert (result.status, result.attempts, result.is_finished) == (RUNNING, 1, False)
            row = row_of(result)
            assert (result.started_at, result.worker_ids) == (row.started_at, [str(row.worker_id)])
            row.cancel()
            worker.wake()
            finished(result)
        assert (result.status, result.attempts) == (FAILED, 1)
        assert [error.exception_class_path for error in result.errors] == ["django_jobs.exceptions.Cancelled"]

    def test_a_task_between_two_attempts_is_ready(self) -> None:
        with portable_tasks(retry=1) as tasks, a_worker():
            result = tasks.boom.enqueue()
            wait_for(lambda: row_of(result).status == Status.SCHEDULED, 15, "it waits for its second attempt")
            result.refresh()
        assert (result.status, result.attempts, len(result.errors)) == (READY, 1, 1)
        assert (result.finished_at, result.is_finished) == (None, False)

    def test_a_task_whose_worker_died_has_failed(self, tasks: Any) -> None:
        result = tasks.add.enqueue(1)
        entry = {"exception": "django_jobs.exceptions.WorkerLost", "message": "it died.", "traceback": "", "attempt": 1}
        now = clock.now("default")
        JobExecution.objects.filter(pk=result.id).update(
            status=Status.ERROR, attempt=1, worker_id=uuid.UUID(int=9), completed_at=now, errors=[entry]
        )
        result.refresh()
        assert (result.status, result.worker_ids) == (FAILED, [str(uuid.UUID(int=9))])
        assert result.errors[0].traceback == "django_jobs.exceptions.WorkerLost: it died.\n"


@contextlib.contextmanager
def story() -> Iterator[tuple[list[Any], list[Any], list[Any]]]:
    """Collect what Django's three signals bring."""
    with heard(task_enqueued) as enqueued, heard(task_started) as started, heard(task_finished) as ended:
        yield enqueued, started, ended


@pytest.mark.medium
@pytest.mark.django_db(transaction=True)
class TestSignals:
    def test_djangos_signals_tell_the_story(self, tasks: Any) -> None:
        with story() as (enqueued, started, ended), a_worker():
            results = [finished(made.enqueue()) for made in (tasks.pairs, tasks.see_later, tasks.boom)]
            wait_for(lambda: len(ended) == 3, 15, "all ends were told")
        for calls, status in ((enqueued, {READY}), (started, {RUNNING}), (ended, {SUCCESSFUL, FAILED})):
            assert [call["task_result"].id for call in calls] == [result.id for result in results]
            assert {call["task_result"].status for call in calls} == status
            assert {call["sender"] for call in calls} == {JobsBackend}
        assert [call["task_result"] for call in ended] == results
        assert ended[0]["task_result"].return_value["bytes"] == "text"
        assert ended[2]["task_result"].errors[0].exception_class is ValueError

    def test_djangos_signals_tell_nothing_of_jobs_that_are_not_tasks(self, tasks: Any) -> None:
        with story() as told, heard(job_finished) as ended, a_worker():

            @job(name="acc.portable")
            def no_task() -> None: ...

            row = no_task.push()
            wait_for(lambda: len(ended) == 1, 15, "its end was told")
        assert ended[0]["execution"].pk == row.pk
        assert told == ([], [], [])

    def test_an_attempt_that_is_retried_is_no_end(self) -> None:
        with (
            portable_tasks(retry=1) as tasks,
            heard(task_finished) as ended,
            heard(job_finished) as attempts,
            a_worker() as worker,
        ):
            result = tasks.boom.enqueue()
            wait_for(lambda: len(attempts) == 1, 15, "the first attempt was told")
            assert ended == []
            row_of(result).start_now()
            worker.wake()
            finished(result)
            wait_for(lambda: len(ended) == 1, 15, "its end was told")
        assert ended[0]["task_result"].attempts == 2
        assert len(ended[0]["task_result"].errors) == 2

    def test_a_receiver_that_raises_breaks_nothing(self, tasks: Any) -> None:
        def broken(**kwargs: Any) -> None:
            raise RuntimeError("a bad receiver")

        signals = (task_enqueued, task_started, task_finished)
        for signal in signals:
            signal.connect(broken)
        try:
            with a_worker():
                assert finished(tasks.add.enqueue(1)).return_value == 2
                assert finished(tasks.add_later.enqueue(1)).return_value == 2
        finally:
            for signal in signals:
                signal.disconnect(broken)

    def test_in_immediate_mode_they_come_in_order(self, tasks: Any, settings: Any) -> None:
        settings.DJANGO_JOBS = {**settings.DJANGO_JOBS, "DISPATCHER": "immediate"}
        order: list[str] = []
        with story() as told:
            for name, signal in (("e", task_enqueued), ("s", task_started), ("f", task_finished)):
                signal.connect(lambda name=name, **kwargs: order.append(name), weak=False, dispatch_uid=f"order {name}")
            try:
                result = tasks.add.enqueue(1)
            finally:
                for name, signal in (("e", task_enqueued), ("s", task_started), ("f", task_finished)):
                    signal.disconnect(dispatch_uid=f"order {name}")
        assert ([len(calls) for calls in told], order) == ([1, 1, 1], ["e", "s", "f"])
        result.refresh()
        assert (result.status, result.return_value) == (SUCCESSFUL, 2)


class TestRetention:
    def test_all_results_are_kept_for_a_week_whatever_jobs_keep(self, tasks: Any, settings: Any) -> None:
        settings.DJANGO_JOBS = {"KEEP": {"ok": 0, "error": 0, "cancelled": 0}, "RECORD": "none"}
        made = registry.get(f"{PATH}.add")
        assert [made.retention(status) for status in ("ok", "error", "cancelled")] == [None, None, None]
        assert made.effective_max_age == 7 * 24 * 3600

    def test_keep_of_the_backend_changes_it_field_by_field(self) -> None:
        with portable_tasks(keep={"ok": 5, "max_age": timedelta(hours=1)}):
            made = registry.get(f"{PATH}.add")
            assert [made.retention(status) for status in ("ok", "error", "cancelled")] == [5, None, None]
            assert made.effective_max_age == 3600

    @pytest.mark.django_db
    def test_a_result_that_is_not_kept_any_more_does_not_exist(self) -> None:
        with portable_tasks(keep={"ok": 1}) as tasks:
            now = clock.now("default")
            old, new = (
                JobExecutionFactory(job_name=f"{PATH}.add", ok=True, now=now - age, payload={"args": [1], "kwargs": {}})
                for age in (timedelta(hours=2), timedelta(hours=1))
            )
            made = registry.get(f"{PATH}.add")
            retention.trim(made.name, Status.OK, made.retention(Status.OK), None, now=now, using="default")
            assert tasks.add.get_result(str(new.pk)).status == SUCCESSFUL
            with pytest.raises(TaskResultDoesNotExist, match="may no longer be kept"):
                tasks.add.get_result(str(old.pk))


class TestOptions:
    def test_they_are_options_of_every_job(self) -> None:
        with portable_tasks(retry=2, timeout=3, interrupt=False, sensitive=True, concurrency=4, record="error"):
            made = registry.get(f"{PATH}.add")
            found = (made.retries, made.timeout, made.interrupt, made.sensitive, made.concurrency, made.record)
            assert found == (2, 3.0, False, True, 4, "error")

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"retries": 2}, r"TASKS\['default'\]\['OPTIONS'\]: has no option 'retries'; expected any of retry,"),
            ({"queue": "x"}, "has no option 'queue'"),
            ({"timeout": -1}, "timeout"),
            ({"retry": "often"}, "often"),
            ({"keep": 5}, r"keep=5; expected a dict with any of ok, error, cancelled, max_age"),
            ({"keep": {"good": 5}}, "expected a dict with any of"),
            ({"keep": {"ok": -1}}, "ok"),
        ],
        ids=repr,
    )
    def test_what_cannot_be_used_is_said(self, options: dict[str, Any], match: str) -> None:
        with pytest.raises(ImproperlyConfigured, match=match):
            JobsBackend("default", {"OPTIONS": options})

    def test_a_coroutine_is_no_atomic_task(self) -> None:
        with portable_tasks() as tasks:
            registry.unregister(f"{PATH}.add_later")
            atomic = JobsBackend("default", {"OPTIONS": {"atomic": True}})
            with pytest.raises(InvalidTask, match=rf"{PATH}\.add_later: atomic=True needs a plain function"):
                atomic.validate_task(tasks.add_later)


class TestChecks:
    def test_a_sound_project_has_nothing_to_hear(self, tasks: Any) -> None:
        assert backend().check() == []

    def test_queues_that_no_worker_serves_are_named_once(self, tasks: Any, settings: Any) -> None:
        settings.DJANGO_JOBS = {**settings.DJANGO_JOBS, "QUEUES": ["default"]}
        assert backend().check() == []
        (message,) = check_jobs(None)
        assert message.id == "django_jobs.W005"
        assert f"'mail' is not in DJANGO_JOBS['QUEUES']; these jobs are pushed to it: {PATH}.see." in message.msg
        # No task is declared for it, but one may be sent there by using(queue_name=…).
        registry.unregister(f"{PATH}.see")
        (message,) = backend().check()
        assert (message.id, check_jobs(None)) == ("django_jobs.W010", [])
        assert message.msg == "The queue 'mail' of TASKS['default'] is not in DJANGO_JOBS['QUEUES']."
        assert "runjobs --queues mail" in (message.hint or "")

    def test_queues_that_no_row_can_have_are_named(self) -> None:
        found = JobsBackend("work", {"QUEUES": ["default", "no good", "x" * 101]}).check()
        assert [message.id for message in found] == ["django_jobs.E007"] * 2
        assert "TASKS['work']['QUEUES']: queue='no good'; expected" in found[0].msg

    def test_wrong_settings_are_left_to_their_own_check(self, tasks: Any, settings: Any) -> None:
        settings.DJANGO_JOBS = {"QUEUE": ["default"]}
        assert backend().check() == []

    def test_the_app_has_to_be_installed(self, tasks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(apps, "is_installed", lambda name: False)
        (message,) = backend().check()
        assert message.id == "django_jobs.E006"

    @pytest.mark.subprocess
    @pytest.mark.sqlite
    def test_manage_check_asks_the_backend(self) -> None:
        """With the app of tasks installed and its tasks imported at the start, as in a project."""
        clean = check_in_a_process()
        assert clean.returncode == 0, clean.stderr
        assert "W010" not in clean.stderr
        warned = check_in_a_process(TASKS_QUEUES="default,mail,un served")
        assert warned.returncode == 1
        assert "django_jobs.E007" in warned.stderr


def check_in_a_process(**environment: str) -> subprocess.CompletedProcess[str]:
    return manage("check", DJANGO_SETTINGS_MODULE="tests.portable.settings", **environment)


class TestDiscovery:
    def test_tasks_are_imported_where_tasks_names_the_backend(self) -> None:
        assert conf.alias_of_tasks("django_jobs.backends.JobsBackend") is None
        with override_settings(TASKS={"a": {"BACKEND": "x.Y"}, "b": {"BACKEND": "django_jobs.backends.JobsBackend"}}):
            assert conf.alias_of_tasks("django_jobs.backends.JobsBackend") == "b"

    @pytest.mark.django_db
    def test_a_task_that_is_declared_for_another_backend_can_be_sent_here(
        self, tasks: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert registry.find(f"{PATH}.declared_elsewhere") is None
        monkeypatch.setattr(registry, "autodiscover", lambda name: [tasks])
        backends.autodiscover("default")
        assert registry.find(f"{PATH}.declared_elsewhere") is not None
        result = tasks.declared_elsewhere.using(backend="default").enqueue(1)
        assert backend().get_result(result.id).task.backend == "default"

    @pytest.mark.subprocess
    @pytest.mark.sqlite
    def test_models_may_import_tasks(self) -> None:
        """While the models are loaded: what needs those of django_jobs is imported later."""
        code = (
            "import sys, django; from django.conf import settings\n"
            "settings.configure(TASKS={'default': {'BACKEND': 'django_jobs.backends.JobsBackend'}})\n"
            "from django_jobs.backends import JobsBackend\n"
            "assert 'django_jobs.models' not in sys.modules"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr


@pytest.mark.subprocess
def test_a_real_process_runs_tasks_and_tells_what_they_returned(
    runjobs: Callable[..., Runjobs], tmp_path: Path, tasks: Any
) -> None:
    process = runjobs(DJANGO_SETTINGS_MODULE="tests.portable.settings").wait_ready()
    with transaction.atomic():
        written = tasks.write.enqueue(path=str(tmp_path / "written"))
    seen = tasks.see.enqueue(1, context_of="a process")
    later = tasks.see_later.enqueue()
    failed = tasks.boom.enqueue("in a process")
    nothing = tasks.give.enqueue("nan")
    assert finished(written).return_value == str(tmp_path / "written")
    assert (tmp_path / "written").read_text() == f"{process.pid}\n"
    assert finished(seen).return_value["pid"] == finished(later).return_value["pid"] == process.pid
    assert finished(failed).errors[0].exception_class is ValueError
    assert finished(nothing).status == FAILED
    worker = Worker.objects.get(pid=process.pid)
    assert {result.worker_ids[0] for result in (written, seen, later, failed, nothing)} == {str(worker.pk)}
    assert process.stop() == 0, process.output
    assert_consistent()
