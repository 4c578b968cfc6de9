"""Decide the outcome of a run, from how its handler ended and what it had been told."""

from __future__ import annotations

import asyncio
import json
from time import monotonic
from typing import TYPE_CHECKING, Any

from django_jobs.conf import get_settings
from django_jobs.exceptions import Cancelled, InvalidResult, Reschedule, TimedOut
from django_jobs.execution.errors import error_entry, fingerprint, message_of, stack_text, summary
from django_jobs.execution.outcomes import Aborted, Failed, Lost, Ok, Outcome, Released, Rescheduled
from django_jobs.fidelity import flaw

if TYPE_CHECKING:
    from django_jobs.execution.run import Run

_OK = Ok()


def returned(run: Run, value: object, *, late: bool = False) -> Outcome:
    """Judge a normal return; `late` says that an exception was sent, but the handler had already returned."""
    reason = run.signal.peek()
    overdue = run.deadline is not None and monotonic() > run.deadline
    if reason is None and not overdue:
        return _OK if value is None else Ok(result=_storable(value))
    swallowed = run.gate.sent and not late
    obeyed = run.signal.observed or swallowed
    if reason == "lost":
        return Lost()
    if reason == "cancelled" and obeyed:
        return Aborted()
    if reason == "shutdown" and obeyed:
        return _released(run)
    if overdue or (reason == "timeout" and obeyed):
        return failed(run, TimedOut(_timeout_text(run)))
    return Ok(result=_storable(value))


def raised(run: Run, exception: BaseException) -> Outcome:
    """Judge an exception that left the handler."""
    reason = run.signal.peek()
    obeyed = run.signal.observed or run.gate.sent
    if reason == "lost":
        return Lost()
    if isinstance(exception, Reschedule) and not run.gate.sent:
        return Rescheduled(delay=exception.delay)
    told = isinstance(exception, Cancelled | TimedOut) or (
        isinstance(exception, asyncio.CancelledError) and run.gate.sent
    )
    if reason == "timeout" and (told or isinstance(exception, Reschedule)):
        text = _timeout_text(run)
        late = exception if isinstance(exception, TimedOut) else TimedOut()
        # A thread can be sent a class only; the text is for its traceback, the log and error trackers.
        late.args = late.args or (text,)
        return failed(run, late, message=text)
    if reason == "cancelled" and obeyed:
        return Aborted() if told else _aborted_by(run, exception)
    if reason == "shutdown" and obeyed:
        return _released(run, None if told else exception)
    if isinstance(exception, Cancelled):
        # Nobody asked for it: the handler cancels its own run.
        return _aborted_by(run, exception)
    return failed(run, exception)


def given_up(run: Run) -> Outcome:
    """Judge a run whose handler was told to stop and has not."""
    reason = run.signal.peek()
    if reason == "cancelled":
        return Aborted()
    if reason == "timeout":
        text = f"{_timeout_text(run)}, and its handler did not stop"
        return failed(run, TimedOut(text), trace=stack_text(run.gate.stack()))
    return Lost() if reason == "lost" else _released(run)


def before_start(run: Run) -> Outcome | None:
    """Return the outcome of a run that was told to stop before its handler began; None if it may begin."""
    match run.signal.peek():
        case None | "timeout":
            return None
        case "cancelled":
            return Aborted()
        case "lost":
            return Lost()
        case "shutdown":
            return Released()


def failed(run: Run, exception: BaseException, *, message: str | None = None, trace: str | None = None) -> Failed:
    """Return the failure with its texts and, if attempts are left and the policy agrees, the delay of the next."""
    text = message_of(exception) if message is None else message
    return Failed(
        exception=exception,
        error=error_entry(run, exception, text, trace),
        message=summary(exception, text),
        fingerprint=fingerprint(run.job.name, exception),
        delay=_delay(run, exception),
    )


def _delay(run: Run, exception: BaseException) -> float | None:
    execution = run.execution
    if execution.attempt >= execution.max_attempts or isinstance(exception, InvalidResult):
        return None
    retry = run.job.effective_retry
    if retry is None or not run.job.has_retry:
        return None
    return retry.delay(execution.attempt, exception) if retry.allows(exception) else None


def _released(run: Run, exception: BaseException | None = None) -> Outcome:
    """Hand the row back; or, without retry, end it: its handler has begun, and must not start twice."""
    if run.job.has_retry:
        return Released()
    return failed(run, exception or Cancelled("interrupted by shutdown"))


def _aborted_by(run: Run, exception: BaseException) -> Aborted:
    return Aborted(error=error_entry(run, exception, message_of(exception)))


def _timeout_text(run: Run) -> str:
    limit = 0.0 if run.deadline is None else run.deadline - run.started
    return f"timed out after {limit:g} s"


def _storable(value: object) -> Any:
    """Return the handler's value as plain JSON data; None if it is not JSON, or some database cannot store it."""
    if value is None:
        return None
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
        # Lone surrogates fail here.
        if len(text.encode()) > get_settings().payload_max_bytes:
            return None
        tree = json.loads(text)
    except Exception:  # noqa: BLE001 - any object may be returned
        return None
    return None if flaw(tree, "result") else tree
