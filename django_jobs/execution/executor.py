"""Run one claimed execution and return its outcome: the only place where a handler is called; called by the pool.

Nothing that a handler does escapes: every exception becomes an outcome, and its changes to its context (language,
time zone, decimal precision, context variables) end with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import sys
import traceback
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import TYPE_CHECKING, Any

from asgiref.sync import SyncToAsync, ThreadSensitiveContext, async_to_sync

from django_jobs.context import JobContext, enter_context
from django_jobs.execution import judgement, logs
from django_jobs.execution.atomic import execute_atomic
from django_jobs.execution.connections import close_all, freshen, tidy
from django_jobs.execution.outcomes import Lost, Outcome

if TYPE_CHECKING:
    from django_jobs.execution.run import Run

logger = logging.getLogger("django_jobs")

_NOTHING = object()
Call = Callable[..., Any]
# Handlers wrapped in their middleware, made once per function and list of middleware.
_wrapped: dict[Call, tuple[tuple[Any, ...], Call]] = {}


def execute(run: Run) -> Outcome:
    """Run the handler in this thread and return the outcome; never raises.

    If an exception was sent into the handler (`run.gate.sent`), the thread must not be used again. If the run was given
    up (`run.gate.abandoned`), the row was ended without it and the outcome is Lost.
    """
    manage = run.manage_connections
    if manage:
        freshen()
    run.context = Context()
    job = run.job
    try:
        if job.is_async:
            # Not on a loop that waits for this thread: the handler's calls into threads would wait for it as well.
            outcome = async_to_sync(aexecute, force_new_loop=True)(run)
        else:
            outcome = run.context.run(execute_atomic, run, _execute) if job.atomic else run.context.run(_execute, run)
    except BaseException as error:
        logger.exception("running %s failed outside of its handler", job.name)
        outcome = judgement.failed(run, error)
    if manage:
        tidy(job.name, close_all=run.gate.sent)
    return _ended(run, outcome)


async def aexecute(run: Run) -> Outcome:
    """See execute(); for coroutine handlers, on the loop they run on. Raises only when it is cancelled itself."""
    run.context = Context()
    # Synchronous code of the run, above all the ORM, gets a thread of its own, so that a blocked run holds up no other.
    own_thread = ThreadSensitiveContext()
    if run.manage_connections:
        run.context.run(SyncToAsync.thread_sensitive_context.set, own_thread)
    task = asyncio.get_running_loop().create_task(_handle_async(run), context=run.context)
    try:
        await asyncio.wait((task,))
        outcome = task.result()
    except asyncio.CancelledError:
        if not task.done():
            task.cancel()
            raise
        # An interrupt came in the handler's last step: the task counts as cancelled, although the handler had ended.
        outcome = run.outcome or judgement.raised(run, asyncio.CancelledError())
    except BaseException as error:  # noqa: BLE001 - as above
        outcome = judgement.failed(run, error)
    finally:
        _dismiss(own_thread)
    return _ended(run, outcome)


def _dismiss(own_thread: ThreadSensitiveContext) -> None:
    executor = SyncToAsync.context_to_thread_executor.pop(own_thread, None)
    if executor is not None:
        # Not waited for: the thread may still be in a call that outlives its handler.
        executor.submit(close_all)
        executor.shutdown(wait=False)


def _ended(run: Run, outcome: Outcome) -> Outcome:
    run.capture.close()
    # The ladder gave the run up and set its outcome.
    if run.gate.abandoned:
        return Lost()
    run.outcome = outcome
    return outcome


def _execute(run: Run) -> Outcome:
    prepared = _prepare(run)
    if not isinstance(prepared, tuple):
        return prepared
    call, args, kwargs = prepared
    gate = run.gate
    value = error = _NOTHING
    late = False
    pid = os.getpid()
    try:
        try:
            gate.open()
            value = call(*args, **kwargs)
            if value is not None and inspect.isawaitable(value):
                awaitable, value = value, _NOTHING
                value = _run_awaitable(run, awaitable)
        except BaseException as raised:  # noqa: BLE001 - a handler's SystemExit or KeyboardInterrupt is a failure too
            error = raised
        gate.close()
    except BaseException as interrupt:  # noqa: BLE001 - sent while the handler was leaving, it lands here, once
        gate.close()
        late = value is not _NOTHING
        if not late and error is _NOTHING:
            error = interrupt
    if os.getpid() != pid:
        _end_fork(error)
    try:
        if isinstance(error, BaseException):
            return judgement.raised(run, error)
        return judgement.returned(run, value, late=late)
    finally:
        # The traceback of the exception holds this frame, which would hold the exception.
        del error


def _end_fork(error: object) -> None:
    """End a process that a handler forked and that left the handler, by whatever way, as Python ends one.

    It would go on as a second worker: end the row, commit, run what waits for a slot.
    """
    code: Any = 0
    if isinstance(error, SystemExit):
        code = error.code or 0
    elif isinstance(error, BaseException):
        traceback.print_exception(error)
        code = 1
    if not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code & 0xFF)


async def _handle_async(run: Run) -> Outcome:
    prepared = _prepare(run)
    if not isinstance(prepared, tuple):
        return prepared
    call, args, kwargs = prepared
    run.gate.open_task()
    pid = os.getpid()
    try:
        value = call(*args, **kwargs)
        if inspect.isawaitable(value):
            value = await value
        if os.getpid() != pid:
            _end_fork(_NOTHING)
    except BaseException as error:  # noqa: BLE001 - as above; SystemExit would end the loop
        if os.getpid() != pid:
            _end_fork(error)
        run.gate.close()
        run.outcome = judgement.raised(run, error)
    else:
        run.gate.close()
        run.outcome = judgement.returned(run, value)
    return run.outcome


def _prepare(run: Run) -> tuple[Call, tuple[Any, ...], dict[str, Any]] | Outcome:
    """Return the call of the handler, and enter its context; or an outcome, if it is not to be called."""
    if run.signal.peek() is not None and (outcome := judgement.before_start(run)) is not None:
        return outcome
    job = run.job
    execution = run.execution
    try:
        kwargs = job.schema.rebuild(execution.payload_json)
        call = _with_middleware(job.func, job.middleware) if job.middleware else job.func
    except BaseException as error:  # noqa: BLE001 - validators and middleware are the project's
        return judgement.failed(run, error)
    context = JobContext(
        execution_id=execution.pk,
        job_name=job.name,
        payload=kwargs,
        attempt=execution.attempt,
        max_attempts=execution.max_attempts,
        now=execution.started_at,
        key=execution.key,
        organization_id=execution.organization_id,
        signal=run.signal,
        shield=run.gate,
        execution=execution,
    )
    run.job_context = context
    enter_context(context)
    logs.direct_to(run.capture)
    return call, (context,) if job.takes_context else (), kwargs


def _with_middleware(func: Call, middleware: tuple[Any, ...]) -> Call:
    known = _wrapped.get(func)
    if known is not None and known[0] == middleware:
        return known[1]
    call = func
    for wrap in reversed(middleware):
        call = wrap(call)
    _wrapped[func] = (middleware, call)
    return call


def _run_awaitable(run: Run, awaitable: Awaitable[Any]) -> Any:
    """Await what a synchronous handler returned."""
    if not run.manage_connections:
        # Its queries are the caller's, and so is the thread they run in.
        return async_to_sync(_wait, force_new_loop=True)(awaitable)

    async def wait() -> Any:
        own_thread = ThreadSensitiveContext()
        SyncToAsync.thread_sensitive_context.set(own_thread)
        run.gate.open_task()
        try:
            return await awaitable
        finally:
            run.gate.close()
            _dismiss(own_thread)

    return asyncio.run(wait())


async def _wait(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
