from __future__ import annotations

import asyncio
import decimal
import gc
import sys
import threading
from contextvars import ContextVar
from typing import Any

import pytest
from django.utils import timezone, translation

from django_jobs import retries
from django_jobs.context import JobContext, current_context
from django_jobs.exceptions import Cancelled, InvalidPayload, Reschedule, TimedOut
from django_jobs.execution.executor import execute
from django_jobs.execution.outcomes import Aborted, Failed, Ok, Released, Rescheduled
from django_jobs.execution.run import Run
from tests.execution.runs import STARTED, outcome_of, run_of

AT_ONCE = retries.Retry(3, backoff=None)


def raiser(exception: BaseException) -> Any:
    def handler() -> None:
        raise exception

    return handler


class OwnBase(BaseException):
    pass


def test_a_handler_gets_its_arguments_and_its_value_is_the_result() -> None:
    def handler(a: int, b: str = "x") -> dict[str, Any]:
        return {"a": a, "b": b}

    assert outcome_of(handler, {"a": 1}) == Ok(result={"a": 1, "b": "x"})


def test_a_context_tells_the_handler_about_its_run() -> None:
    seen: list[JobContext] = []

    def handler(ctx: JobContext, n: int) -> None:
        seen.append(ctx)

    run = run_of(handler, {"n": 5}, attempt=2, max_attempts=4)
    run.execution.key = "k"
    run.execution.organization_id = "org"
    assert execute(run) == Ok()
    (ctx,) = seen
    assert (ctx.execution_id, ctx.job_name, ctx.payload) == (run.execution.pk, "tests.sample", {"n": 5})
    assert (ctx.attempt, ctx.max_attempts, ctx.now) == (2, 4, STARTED)
    assert (ctx.key, ctx.organization_id) == ("k", "org")
    assert ctx.signal is run.signal


def test_the_current_context_is_found_without_asking_for_one_and_ends_with_the_run() -> None:
    seen: list[JobContext | None] = []

    def handler() -> None:
        seen.append(current_context())

    run = run_of(handler)
    execute(run)
    assert seen[0] is not None and seen[0].execution_id == run.execution.pk
    assert current_context() is None


@pytest.mark.parametrize(
    "exception",
    [
        SystemExit(0),
        SystemExit("msg"),
        KeyboardInterrupt(),
        GeneratorExit(),
        asyncio.CancelledError(),
        OwnBase("own"),
        RecursionError("deep"),
        MemoryError(),
        ExceptionGroup("many", [ValueError(n) for n in range(1000)]),
    ],
    ids=lambda exception: type(exception).__name__,
)
def test_every_exception_is_a_failure_that_names_its_class(exception: BaseException) -> None:
    """An exception outside Exception ended the worker's thread: Bogdanp/dramatiq#445, #211."""
    outcome = outcome_of(raiser(exception))
    assert isinstance(outcome, Failed)
    assert outcome.message.startswith(type(exception).__name__)
    assert outcome.exception is exception
    assert outcome.delay is None


def test_sys_exit_is_not_a_success() -> None:
    def handler() -> None:
        sys.exit(0)

    assert outcome_of(handler).message == "SystemExit: 0"


def test_a_recursion_without_end_is_a_failure() -> None:
    def handler() -> None:
        handler()

    outcome = outcome_of(handler)
    assert outcome.message.startswith("RecursionError")
    assert len(outcome.error["traceback"]) < 20_000


def test_a_failure_with_tries_left_comes_with_the_delay_of_the_policy() -> None:
    policy = retries.Retry(3, backoff=(1, 20, 300))
    outcome = outcome_of(raiser(ValueError("no")), retry=policy, attempt=2, max_attempts=4)
    assert outcome.delay == 20


def test_the_last_attempt_is_final() -> None:
    assert outcome_of(raiser(ValueError("no")), retry=AT_ONCE, attempt=4, max_attempts=4).delay is None


def test_a_row_with_tries_left_of_a_job_without_retry_is_final() -> None:
    assert outcome_of(raiser(ValueError("no")), retry=0, attempt=1, max_attempts=4).delay is None


def test_a_condition_that_says_no_is_final_and_one_that_says_yes_is_not() -> None:
    policy = retries.Retry(3, backoff=None, when=lambda error: "again" in str(error))
    assert outcome_of(raiser(ValueError("stop")), retry=policy, max_attempts=4).delay is None
    assert outcome_of(raiser(ValueError("again")), retry=policy, max_attempts=4).delay == 0


def test_a_condition_that_raises_counts_as_no() -> None:
    def when(error: BaseException) -> bool:
        raise SystemExit

    outcome = outcome_of(raiser(ValueError("no")), retry=retries.Retry(3, when=when), max_attempts=4)
    assert (outcome.message, outcome.delay) == ("ValueError: no", None)


def test_a_backoff_that_raises_still_retries() -> None:
    def backoff(attempt: int, error: BaseException) -> float:
        raise SystemExit

    outcome = outcome_of(raiser(ValueError("no")), retry=retries.Retry(3, backoff=backoff), max_attempts=4)
    assert outcome.delay is not None and outcome.delay >= 0


def test_a_payload_that_does_not_fit_fails_like_any_run_and_the_handler_is_not_called() -> None:
    """During a deploy the next attempt may be made by the code for which it was pushed."""
    called: list[int] = []

    def handler(n: int) -> None:
        called.append(n)

    outcome = outcome_of(handler, {"n": "many"}, retry=AT_ONCE, max_attempts=4)
    assert isinstance(outcome.exception, InvalidPayload)
    assert outcome.delay == 0
    assert called == []
    assert outcome_of(handler, {"n": "many"}, retry=AT_ONCE, max_attempts=1).delay is None


def test_a_payload_that_is_refused_to_a_handler_is_a_failure_of_that_run_like_any() -> None:
    """`retries: n` means n + 1 runs, also when what a handler pushes is refused."""
    outcome = outcome_of(raiser(InvalidPayload("of another job")), retry=AT_ONCE, max_attempts=4)
    assert outcome.delay == 0


def test_reschedule_parks_the_run_for_its_delay() -> None:
    assert outcome_of(raiser(Reschedule(delay=90))) == Rescheduled(delay=90)


def test_a_handler_that_calls_its_run_off_is_aborted_with_its_reason() -> None:
    outcome = outcome_of(raiser(Cancelled("order is gone")))
    assert isinstance(outcome, Aborted)
    assert (outcome.error["exception"], outcome.error["message"]) == (
        "django_jobs.exceptions.Cancelled",
        "order is gone",
    )


def test_a_timeout_of_its_own_is_an_ordinary_failure() -> None:
    assert outcome_of(raiser(TimedOut("too slow")), retry=AT_ONCE, max_attempts=4).delay == 0


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "result"),
    [
        (None, None),
        ([1, {"a": "é"}], [1, {"a": "é"}]),
        ((1, 2), [1, 2]),
        ("\\u0000", "\\u0000"),
        ("a\0b", None),
        ({"a\0": 1}, None),
        ("\ud800", None),
        (float("nan"), None),
        (object(), None),
        ("x" * 300_000, None),
        (2**64 - 1, 2**64 - 1),
        ([2**64], None),
        (nested(31), nested(31)),
        (nested(32), None),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_a_value_is_kept_where_every_database_can_store_it(value: object, result: object) -> None:
    assert outcome_of(lambda: value) == Ok(result=result)


def test_the_result_is_a_copy() -> None:
    shared = [1]
    outcome = outcome_of(lambda: shared)
    shared.append(2)
    assert outcome == Ok(result=[1])


def test_nothing_of_one_run_reaches_the_next() -> None:
    """Language, time zone, decimal and context variables leaked along the thread: celery/django-celery#21, PR#565."""
    variable: ContextVar[str] = ContextVar("variable", default="fresh")
    found: list[Any] = []

    def first() -> None:
        translation.activate("de")
        timezone.activate("Asia/Tokyo")
        decimal.getcontext().prec = 3
        variable.set("stale")
        raise ValueError

    def second() -> None:
        found.extend(
            (
                translation.get_language(),
                timezone.get_current_timezone_name(),
                decimal.getcontext().prec,
                variable.get(),
            )
        )

    def both() -> None:
        assert isinstance(outcome_of(first), Failed)
        assert outcome_of(second) == Ok()

    thread = threading.Thread(target=both)
    thread.start()
    thread.join()
    assert found == ["en", "UTC", 28, "fresh"]


def test_the_callers_own_context_is_as_before() -> None:
    def handler() -> None:
        translation.activate("de")

    with translation.override("fr"):
        outcome_of(handler)
        assert translation.get_language() == "fr"


def test_middleware_wraps_the_handler_outermost_first(settings: Any) -> None:
    seen: list[str] = []

    def named(name: str) -> Any:
        def middleware(call: Any) -> Any:
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                seen.append(name)
                return call(*args, **kwargs) + name

            return wrapped

        return middleware

    def handler(ctx: JobContext, n: int) -> str:
        seen.append("handler")
        return str(n)

    settings.DJANGO_JOBS = {**settings.DJANGO_JOBS, "MIDDLEWARE": [named("global")]}
    assert outcome_of(handler, {"n": 1}, use=[named("outer"), named("inner")]) == Ok(result="1innerouterglobal")
    assert seen == ["global", "outer", "inner", "handler"]


def test_middleware_is_made_once_for_many_runs() -> None:
    made: list[Any] = []

    def middleware(call: Any) -> Any:
        made.append(call)
        return call

    def handler() -> None: ...

    run = run_of(handler, use=[middleware])
    for _ in range(3):
        assert execute(type(run)(run.execution, run.job, manage_connections=False)) == Ok()
    assert len(made) == 1


def test_middleware_that_cannot_be_made_fails_the_run() -> None:
    def middleware(call: Any) -> Any:
        raise LookupError("nothing to wrap with")

    assert outcome_of(lambda: None, use=[middleware]).message == "LookupError: nothing to wrap with"


def test_progress_is_kept_on_the_run() -> None:
    def handler(ctx: JobContext) -> None:
        ctx.progress(3, total=10, note="three\0")

    run = run_of(handler)
    execute(run)
    assert run.progress == {"done": 3, "total": 10, "note": "three\ufffd"}


@pytest.mark.medium
def test_a_run_leaves_nothing_to_the_garbage_collector() -> None:
    """A long-lived worker grew run by run: procrastinate-org/procrastinate#1316."""

    def handler(ctx: JobContext) -> None:
        ctx.progress(1)

    run = run_of(handler)
    execute(run)
    again = Run(run.execution, run.job, manage_connections=False)
    gc.collect()
    gc.disable()
    try:
        execute(again)
        del again
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_an_awaitable_from_a_plain_function_is_awaited() -> None:
    async def work() -> str:
        await asyncio.sleep(0)
        context = current_context()
        assert context is not None
        return context.job_name

    assert outcome_of(lambda: work()) == Ok(result="tests.sample")
    assert outcome_of(lambda: work(), manage_connections=True) == Ok(result="tests.sample")


def test_a_failure_of_that_awaitable_is_one_of_the_run() -> None:
    async def work() -> None:
        raise SystemExit("inside")

    assert outcome_of(lambda: work()).message == "SystemExit: inside"
    assert outcome_of(lambda: work(), manage_connections=True).message == "SystemExit: inside"


def test_a_run_past_its_deadline_failed_though_it_returned() -> None:
    run = run_of(lambda: None, timeout=30)
    run.deadline = run.started - 1
    run.started = run.deadline - 30
    outcome = execute(run)
    assert outcome.message == "TimedOut: timed out after 30 s"
    assert outcome.error["exception"] == "django_jobs.exceptions.TimedOut"


def test_a_run_that_was_cancelled_before_its_handler_began_never_begins() -> None:
    """A job that the worker had already reserved started in spite of its cancel: celery/celery#1007, PR#968."""
    called: list[bool] = []
    run = run_of(lambda: called.append(True))
    run.signal.set("cancelled")
    assert execute(run) == Aborted()
    assert called == []


def test_a_shutdown_before_the_handler_began_hands_the_row_back_even_without_retry() -> None:
    run = run_of(lambda: None, retry=0)
    run.signal.set("shutdown")
    assert execute(run) == Released()


@pytest.mark.parametrize(
    ("reason", "looked", "expected"),
    [
        ("cancelled", True, Aborted),
        ("cancelled", False, Ok),
        ("timeout", True, Failed),
        ("timeout", False, Ok),
        ("shutdown", True, Released),
        ("shutdown", False, Ok),
    ],
)
def test_a_normal_return_is_judged_by_whether_the_handler_saw_the_signal(
    reason: Any, looked: bool, expected: type
) -> None:
    def handler(ctx: JobContext) -> None:
        ctx.signal.set(reason)
        if looked:
            ctx.signal.is_set()

    assert type(outcome_of(handler, retry=AT_ONCE, max_attempts=4)) is expected


def test_a_shutdown_ends_a_run_without_retry_with_an_error() -> None:
    def handler(ctx: JobContext) -> None:
        ctx.signal.set("shutdown")
        ctx.signal.raise_if_set()

    outcome = outcome_of(handler, retry=0)
    assert outcome.message.endswith("interrupted by shutdown")
    assert outcome.delay is None


def test_a_cancelled_handler_that_raises_stays_cancelled_and_keeps_the_error() -> None:
    def handler(ctx: JobContext) -> None:
        ctx.signal.set("cancelled")
        if ctx.signal.is_set():
            raise ValueError("half done")

    outcome = outcome_of(handler, retry=AT_ONCE, max_attempts=4)
    assert isinstance(outcome, Aborted)
    assert (outcome.error["exception"], outcome.error["message"]) == ("ValueError", "half done")
