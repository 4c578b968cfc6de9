"""Send the signals of how runs ended: after the write, from one thread, in a copy of each run's context."""

from __future__ import annotations

import contextvars
import logging
import threading
from collections.abc import Sequence
from datetime import datetime
from queue import SimpleQueue

from django_jobs import signals
from django_jobs.execution.connections import tidy
from django_jobs.execution.outcomes import Failed, Ok
from django_jobs.execution.run import Run
from django_jobs.loop import OnDeath, start_thread
from django_jobs.states import FINAL, Status
from django_jobs.transitions import with_entry

logger = logging.getLogger("django_jobs.announcer")

Ended = tuple[Run, Status, datetime]

# Above this many unannounced runs the worker claims nothing more: each holds its payload and logs.
BACKLOG_MAX = 1000


class Announcer:
    """Sends the end signals of runs; a slow or failing receiver delays other receivers, never a write.

    Receivers that are slower than the jobs hold up new claims once BACKLOG_MAX runs wait for them.
    """

    def __init__(self, *, on_death: OnDeath | None = None) -> None:
        self._on_death = on_death
        self._told: SimpleQueue[Sequence[Ended] | None] = SimpleQueue()
        # Each is written by one thread only: the finisher's, and this one's.
        self._taken = 0
        self._announced = 0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread = start_thread(self._run, name="signals", on_death=self._on_death)

    def tell(self, ended: Sequence[Ended]) -> None:
        """Announce runs whose rows were written, with the status of each and the time."""
        self._taken += len(ended)
        self._told.put(ended)

    @property
    def is_congested(self) -> bool:
        """Whether so many runs wait for receivers that no more should be claimed."""
        return self._taken - self._announced >= BACKLOG_MAX

    def stop(self, timeout: float) -> None:
        """Send what is left and end the thread."""
        self._told.put(None)
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        while (ended := self._told.get()) is not None:
            tidy()
            _announce(ended)
            tidy()
            self._announced += len(ended)
            # So that this thread holds no payload while it waits.
            del ended


def _announce(ended: Sequence[Ended]) -> None:
    for run, status, now in ended:
        try:
            announce(run, status, now)
        except Exception:
            logger.exception("the end of %s could not be announced", run.execution)


def announce(run: Run, status: Status, now: datetime) -> None:
    """Bring the execution up to date and send the signals of its end."""
    execution, job, outcome = run.execution, run.job, run.outcome
    execution.status, execution.updated_at = status, now
    if status in FINAL:
        execution.completed_at, execution.active_key = now, None
    if isinstance(outcome, Ok):
        # Not by a query: the row may be gone.
        execution.error, execution.result = "", outcome.result
    context = contextvars.Context() if run.context is None else run.context.copy()
    if status is Status.OK:
        context.run(signals.emit, signals.job_succeeded, job, execution)
    elif status is Status.CANCELLED:
        context.run(signals.emit, signals.job_cancelled, job, execution)
    elif isinstance(outcome, Failed):
        execution.error = outcome.message
        execution.errors = with_entry(execution.errors, outcome.error)
        will_retry = status is Status.SCHEDULED
        context.run(
            signals.emit, signals.job_failed, job, execution, exception=outcome.exception, will_retry=will_retry
        )
    else:
        # Handed back or rescheduled: the execution goes on later.
        return
    context.run(signals.emit, signals.job_finished, job, execution)
