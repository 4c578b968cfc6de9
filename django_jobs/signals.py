"""The signals of a job's life, how they are sent, and the receivers that log each ended run.

All are sent with `send_robust`, sender = the `Job`, arguments `execution` and `job`; `job_failed` adds `exception` and
`will_retry`. `job_pushed` is sent right after the INSERT, inside the caller's transaction, which may still roll back;
the others are sent after the write that they report, and never for a run that was lost.
"""

from __future__ import annotations

import logging
import threading
from datetime import datetime
from typing import TYPE_CHECKING, Any

from django.dispatch import Signal

from django_jobs.text import clean_text, printable

if TYPE_CHECKING:
    from django_jobs.definition import Job
    from django_jobs.models import JobExecution

job_pushed = Signal()
job_started = Signal()
job_succeeded = Signal()
job_failed = Signal()
job_cancelled = Signal()
job_finished = Signal()

_NAMES = {
    job_pushed: "job_pushed",
    job_started: "job_started",
    job_succeeded: "job_succeeded",
    job_failed: "job_failed",
    job_cancelled: "job_cancelled",
    job_finished: "job_finished",
}

logger = logging.getLogger("django_jobs.signals")
runs = logging.getLogger("django_jobs.runs")

MESSAGE_LENGTH = 500


def emit(signal: Signal, job: Job[...], execution: JobExecution, **extra: Any) -> None:
    """Send one of the signals above; never raises, whatever receivers do. Costs next to nothing without receivers."""
    if not signal.receivers:
        return
    # Receivers connect to the job itself and are found by identity, but using() makes copies.
    sender = job.base
    try:
        answers: list[tuple[Any, Any]] = signal.send_robust(sender=sender, execution=execution, job=sender, **extra)
    except BaseException as error:  # SystemExit and its like get through send_robust(), and would end the thread
        # Only the main thread has it from a person at the keyboard.
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        answers = [("one of them", error)]
    for receiver, answer in answers:
        if isinstance(answer, BaseException):
            logger.error(
                "a receiver of %s failed for %s %s: %s raised %s: %s",
                _NAMES.get(signal, "a signal"),
                execution.job_name,
                execution.pk,
                getattr(receiver, "__qualname__", receiver),
                type(answer).__name__,
                clean_text(answer, MESSAGE_LENGTH),
            )


def is_heard(signal: Signal, job: Job[...]) -> bool:
    """Whether one of the signals above has a receiver for this job."""
    return bool(signal.receivers) and signal.has_listeners(job.base)


def connect_logging() -> None:
    """Log one line per ended run on the logger `django_jobs.runs`; called once, when the app is ready."""
    job_succeeded.connect(log_success, dispatch_uid="django_jobs.log_success")
    job_failed.connect(log_failure, dispatch_uid="django_jobs.log_failure")
    job_cancelled.connect(log_cancel, dispatch_uid="django_jobs.log_cancel")


def log_success(execution: JobExecution, **kwargs: Any) -> None:
    """Log a successful run at INFO."""
    if runs.isEnabledFor(logging.INFO):
        runs.info("ok %s", _run(execution))


def log_cancel(execution: JobExecution, **kwargs: Any) -> None:
    """Log a cancelled run, or a cancelled row that never ran, at INFO."""
    if runs.isEnabledFor(logging.INFO):
        runs.info("cancelled %s", _run(execution))


def log_failure(
    execution: JobExecution, job: Job[...], exception: BaseException, will_retry: bool, **kwargs: Any
) -> None:
    """Log a failed run: one line at WARNING if it will be retried, else at ERROR with the traceback.

    Without message and traceback for sensitive jobs, as both quote the handler's data.
    """
    level = logging.WARNING if will_retry else logging.ERROR
    if not runs.isEnabledFor(level):
        return
    what = f"{_run(execution)}, will retry" if will_retry else _run(execution)
    if job.sensitive:
        runs.log(level, "failed %s: %s", what, type(exception).__name__)
    else:
        # A lost worker has no traceback, and a failure that will be retried does not need one.
        trace = exception if exception.__traceback__ is not None and not will_retry else None
        message = printable(clean_text(exception, MESSAGE_LENGTH))
        why = ": ".join(filter(None, [type(exception).__name__, message]))
        runs.log(level, "failed %s: %s", what, why, exc_info=trace)


def _run(execution: JobExecution) -> str:
    text = f"{execution.job_name} {execution.pk}"
    if not execution.attempt:
        return f"{text} before its first attempt"
    if execution.started_at is None:
        # It was cancelled while it waited for the next attempt.
        return f"{text} after attempt {execution.attempt}/{execution.max_attempts}"
    text += f" attempt {execution.attempt}/{execution.max_attempts}"
    # A run that will be retried has no completed_at.
    ended: datetime | None = execution.completed_at or execution.updated_at
    if ended is None or ended < execution.started_at:
        return text
    return f"{text} in {(ended - execution.started_at).total_seconds():.3f} s"
