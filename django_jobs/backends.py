"""The backend for Django's own tasks: each @task function becomes a job, each enqueued task a row for the workers.

`TASKS = {"default": {"BACKEND": "django_jobs.backends.JobsBackend"}}`. A project's models.py may import its tasks, so
the models and services of django_jobs are imported only when they are needed.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import fields
from datetime import datetime, timedelta
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast
from uuid import UUID

import django
from django.apps import apps
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.dispatch import Signal
from django.utils import timezone

from django_jobs import fidelity, options, registry
from django_jobs.conf import get_settings, problems, raw_settings
from django_jobs.context import JobContext
from django_jobs.definition import Job, job
from django_jobs.exceptions import DefinitionError, InvalidPayload, InvalidResult
from django_jobs.options import Keep
from django_jobs.signals import job_finished, job_pushed, job_started
from django_jobs.states import Status

if TYPE_CHECKING or django.VERSION >= (6, 0):
    from django.tasks.backends.base import BaseTaskBackend
    from django.tasks.base import Task, TaskContext, TaskError, TaskResult, TaskResultStatus
    from django.tasks.exceptions import InvalidTask, TaskResultDoesNotExist
    from django.tasks.signals import task_enqueued, task_finished, task_started
else:
    try:
        from django_tasks.backends.base import BaseTaskBackend
        from django_tasks.base import Task, TaskContext, TaskError, TaskResult, TaskResultStatus
        from django_tasks.exceptions import InvalidTaskError as InvalidTask
        from django_tasks.exceptions import TaskResultDoesNotExist
        from django_tasks.signals import task_enqueued, task_finished, task_started
    except ImportError as error:
        hint = "Before Django 6.0 the tasks framework is a package: pip install 'django-outbox-jobs[tasks]'."
        raise ImportError(hint) from error

if TYPE_CHECKING:
    from django_jobs.models import JobExecution

    P = ParamSpec("P")
    R = TypeVar("R")
    AnyTask = Task[..., Any]
    AnyResult = TaskResult[..., Any]

# The options of @job that OPTIONS may give to all tasks of a backend.
OPTIONS = ("retry", "timeout", "interrupt", "concurrency", "record", "keep", "atomic", "use", "sensitive")
# Results are meant to be fetched: all are kept for a week, whatever KEEP and RECORD say about jobs.
KEPT = {"ok": None, "error": None, "cancelled": None, "max_age": timedelta(days=7)}

_STATUSES: dict[str, TaskResultStatus] = {
    Status.RUNNING: TaskResultStatus.RUNNING,
    Status.OK: TaskResultStatus.SUCCESSFUL,
    Status.ERROR: TaskResultStatus.FAILED,
    Status.CANCELLED: TaskResultStatus.FAILED,
}
_CANCELLED = TaskError(
    exception_class_path="django_jobs.exceptions.Cancelled",
    traceback="django_jobs.exceptions.Cancelled: the execution was cancelled\n",
)
_SIGNALS = {job_pushed: task_enqueued, job_started: task_started, job_finished: task_finished}
# Tasks by the handlers of their jobs.
_tasks: dict[Callable[..., Any], AnyTask] = {}
_registering = threading.RLock()


class JobsBackend(BaseTaskBackend):
    """Stores tasks as executions, in the caller's transaction; `OPTIONS` are options of @job for all of them."""

    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        self.job_options = _job_options(alias, self.options)

    def validate_task(self, task: AnyTask) -> None:
        """See BaseTaskBackend; registers a valid task as a job, so that this process can run it."""
        super().validate_task(task)
        try:
            options.queue(task.queue_name)
            options.scheduled_at(task.run_after)
        except DefinitionError as error:
            raise InvalidTask(f"{task.module_path}: {error}") from error
        with _registering:
            known = registry.find(task.module_path)
            if known is None or known.func not in _tasks or _tasks[known.func].func is not task.func:
                self._register(task)

    def enqueue(self, task: Task[P, R], args: Any, kwargs: Any) -> TaskResult[P, R]:
        """Store an execution of the task; inside a transaction, it exists and runs only if that commits.

        Raises InvalidPayload, before anything is written, for arguments that are not JSON.
        """
        self.validate_task(task)
        made = registry.get(task.module_path)
        try:
            payload = fidelity.plain({"args": list(args), "kwargs": dict(kwargs)}, "payload")
        except ValueError as error:
            raise InvalidPayload(f"{made.name}: {error}.") from error
        pushed = made.using(priority=int(task.priority), queue=task.queue_name, scheduled_at=task.run_after)
        return self.result_of(task, pushed.push(**payload))

    def get_result(self, result_id: str) -> AnyResult:
        """Return the result as the row has it now; raise TaskResultDoesNotExist, also when it is no longer kept."""
        from django_jobs.models import JobExecution, jobs_alias

        row = None
        with contextlib.suppress(ValueError):
            rows = JobExecution.objects.using(jobs_alias()).defer("logs", "progress")
            row = rows.filter(pk=UUID(str(result_id))).first()
        if row is None:
            raise TaskResultDoesNotExist(f"No task result has the id {result_id!r}; it may no longer be kept.")
        made = registry.find(row.job_name)
        if made is None or made.func not in _tasks:
            raise TaskResultDoesNotExist(f"{row.job_name} {row.pk} belongs to no task that this process knows.")
        return self.result_of(self.as_stored(_tasks[made.func], row), row)

    def check(self, **kwargs: Any) -> list[checks.CheckMessage]:
        """E006, E007, W010: the entry of this backend in TASKS does not fit the rest of the project."""
        found: list[checks.CheckMessage] = []
        place = f"TASKS[{self.alias!r}]"
        if not apps.is_installed("django_jobs"):
            text = f"{place} is a backend of django_jobs, which is not in INSTALLED_APPS."
            hint = "Add 'django_jobs' to INSTALLED_APPS and run manage.py migrate."
            found.append(checks.Error(text, hint=hint, id="django_jobs.E006"))
        served = None if problems(raw_settings()) else get_settings().queues
        # W005 covers queues that are declared by jobs, and so by tasks.
        told = registry.queues()
        for queue in sorted(self.queues, key=str):
            try:
                options.queue(queue)
            except DefinitionError as error:
                text = f"{place}['QUEUES']: {error}"
                found.append(checks.Error(text, hint="Give the queue another name.", id="django_jobs.E007"))
                continue
            if served is not None and queue not in {*served, *told}:
                text = f"The queue {queue!r} of {place} is not in DJANGO_JOBS['QUEUES']."
                hint = f"Add it there, or run a process for it, manage.py runjobs --queues {queue}: its tasks wait."
                found.append(checks.Warning(text, hint=hint, id="django_jobs.W010"))
        return found

    def result_of(self, task: Task[P, R], row: JobExecution) -> TaskResult[P, R]:
        """Return the result of an execution of the task, from its row as it is in memory."""
        starts = [entry["started_at"] for entry in row.errors if entry.get("started_at")]
        attempts = [datetime.fromisoformat(start) for start in starts] + ([row.started_at] if row.started_at else [])
        result: TaskResult[P, R] = TaskResult(
            task=task,
            id=str(row.pk),
            status=_STATUSES.get(row.status, TaskResultStatus.READY),
            enqueued_at=_instant(row.created_at),
            started_at=_instant(attempts[0] if attempts else None),
            finished_at=_instant(row.completed_at),
            last_attempted_at=_instant(attempts[-1] if attempts else None),
            args=row.payload["args"],
            kwargs=row.payload["kwargs"],
            backend=self.alias,
            errors=_errors(row),
            worker_ids=_worker_ids(row),
        )
        if row.status == Status.OK:
            # Not a parameter of __init__(); Django's own backends set it like this.
            object.__setattr__(result, "_return_value", row.result)
        return result

    def _register(self, task: AnyTask) -> None:
        handler = _handler(task)
        own: dict[str, Any] = {"queue": task.queue_name, "priority": int(task.priority)}
        try:
            job(name=task.module_path, **own, **self.job_options)(handler)
        except DefinitionError as error:
            raise InvalidTask(str(error)) from error
        _tasks[handler] = task
        for signal in _SIGNALS:
            # Of all jobs: Django knows a sender by its address, which is another job's once it is gone.
            signal.connect(_relay)

    def as_stored(self, task: AnyTask, row: JobExecution) -> AnyTask:
        """Return the task with the priority, queue and time of its row."""
        due = row.scheduled_at if row.scheduled_at > row.created_at else None
        changed = {"priority": row.priority, "queue_name": row.queue, "run_after": _instant(due), "backend": self.alias}
        # Not by using(), which would check an old row against the current QUEUES.
        stored = object.__new__(type(task))
        for field in fields(task):
            object.__setattr__(stored, field.name, changed.get(field.name, getattr(task, field.name)))
        return stored


def autodiscover(alias: str) -> None:
    """Import the tasks.py of every installed app, so that this process can run tasks that others enqueue.

    A task that is declared for another backend is registered with this one as well: using(backend=…) may send it here.
    """
    for module in registry.autodiscover("tasks"):
        for task in list(vars(module).values()):
            if isinstance(task, Task) and not isinstance(task.get_backend(), JobsBackend):
                # Its queue is not one of this backend, so it cannot be sent here as it is.
                with contextlib.suppress(InvalidTask):
                    task.using(backend=alias)


def _job_options(alias: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of @job for each task of a backend; raise ImproperlyConfigured for wrong ones."""
    try:
        for name in given:
            if name not in OPTIONS:
                raise DefinitionError(f"has no option {name!r}; expected any of {', '.join(OPTIONS)}.")
        keep = given.get("keep", {})
        if not isinstance(keep, Keep):
            if not isinstance(keep, Mapping) or not keep.keys() <= KEPT.keys():
                raise DefinitionError(f"keep={keep!r}; expected a dict with any of {', '.join(KEPT)}.")
            keep = Keep(**{**KEPT, **keep})
        wanted = {"record": "all", **given, "keep": keep}
        options.job_options(wanted, is_async=False)
    except DefinitionError as error:
        raise ImproperlyConfigured(f"TASKS[{alias!r}]['OPTIONS']: {error}") from error
    return wanted


def _handler(task: AnyTask) -> Callable[..., Any]:
    """Return the handler of the job that a task becomes."""

    def handle(context: JobContext, args: list[Any], kwargs: dict[str, Any]) -> Any:
        row = context.execution
        first = (TaskContext(task_result=_result_of(task, row)),) if task.takes_context and row is not None else ()
        value = task.func(*first, *args, **kwargs)
        return _awaited(task, value) if inspect.isawaitable(value) else _storable(task, value)

    signature = inspect.signature(handle, eval_str=True)
    update_wrapper(handle, task.func)
    # Otherwise inspect would return the signature of the wrapped function.
    handle.__dict__["__signature__"] = signature
    return handle


async def _awaited(task: AnyTask, value: Awaitable[Any]) -> Any:
    return _storable(task, await value)


def _storable(task: AnyTask, value: Any) -> Any:
    """Return a task's value as it is stored; raise InvalidResult, which fails the run like any exception."""
    reason: str | None
    try:
        tree = fidelity.plain(value, "result")
        reason = fidelity.flaw(tree, "result")
    except ValueError as error:
        tree, reason = None, str(error)
    # ASCII, and with spaces: at least as long as the text in any database.
    if reason is None and (size := len(json.dumps(tree))) > (limit := get_settings().payload_max_bytes):
        reason = f"result: is {size} bytes of JSON; PAYLOAD_MAX_BYTES allows {limit}"
    if reason is not None:
        raise InvalidResult(f"{task.module_path}: its return value cannot be stored: {reason}. Return plain JSON data.")
    return tree


def _relay(signal: Signal, job: Job[...], execution: JobExecution, **kwargs: Any) -> None:
    """Send Django's signal for one of ours; attempts that will be retried have none."""
    task = _tasks.get(job.func)
    if task is None or (signal is job_finished and not execution.is_final):
        return
    _SIGNALS[signal].send_robust(type(task.get_backend()), task_result=_result_of(task, execution))


def _result_of(task: AnyTask, row: JobExecution) -> AnyResult:
    # Only a JobsBackend registers tasks.
    backend = cast("JobsBackend", task.get_backend())
    return backend.result_of(backend.as_stored(task, row), row)


def _errors(row: JobExecution) -> list[TaskError]:
    errors = [_error(**entry) for entry in row.errors]
    return [*errors, _CANCELLED] if row.status == Status.CANCELLED else errors


def _error(*, exception: str = "", message: str = "", traceback: str = "", **rest: Any) -> TaskError:
    path = exception if "." in exception else f"builtins.{exception}"
    # A lost worker leaves no traceback.
    return TaskError(exception_class_path=path, traceback=traceback or f"{path}: {message}\n")


def _worker_ids(row: JobExecution) -> list[str]:
    """Return one per attempt: the worker's id for the last, the entry in the history for those before."""
    known = {entry.get("attempt"): entry.get("worker", "") for entry in row.errors}
    before = [known.get(number, "") for number in range(1, row.attempt)]
    return [*before, str(row.worker_id)] if row.attempt else []


def _instant(value: datetime | None) -> datetime | None:
    """Return an instant as the project represents them: naive if USE_TZ is off."""
    return value if value is None or get_settings().use_tz else timezone.make_naive(value)
