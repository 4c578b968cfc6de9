"""A handler's view of its own run: JobContext, the signal that tells it to stop, and current_context()."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar, Token
from datetime import UTC, datetime
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal
from uuid import UUID

from django_jobs.exceptions import Cancelled, TimedOut
from django_jobs.text import clean_text

if TYPE_CHECKING:
    from django_jobs.models import JobExecution

Reason = Literal["cancelled", "timeout", "shutdown", "lost"]
Shield = AbstractContextManager[object]

NOTE_LENGTH = 200
_OPEN: Shield = nullcontext()
# Guards the creation of a signal's event, which only handlers that wait need.
_making_event = threading.Lock()


class RunSignal:
    """Tells a handler to stop, and remembers whether the handler looked at it once it was set."""

    __slots__ = ("_event", "_observed", "_reason", "_shield", "_wakers")

    def __init__(self, shield: Shield = _OPEN) -> None:
        self._shield = shield
        self._reason: Reason | None = None
        self._observed = False
        self._event: threading.Event | None = None
        self._wakers: list[Callable[[], object]] = []

    def is_set(self) -> bool:
        """Whether the handler should stop; cheap enough for every iteration of a loop."""
        if self._reason is None:
            return False
        self._observed = True
        return True

    @property
    def reason(self) -> Reason | None:
        """Why the handler should stop: "cancelled", "timeout", "shutdown" or "lost"; None while it should not."""
        if self._reason is not None:
            self._observed = True
        return self._reason

    def wait(self, seconds: float | None = None) -> bool:
        """Sleep until the signal is set, at most for this many seconds (None: no limit); return whether it is set."""
        with self._shield:
            if self._reason is None:
                self._ensure_event().wait(seconds)
            return self.is_set()

    async def await_set(self, seconds: float | None = None) -> bool:
        """See wait()."""
        loop = asyncio.get_running_loop()
        told = asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(told.set)

        self._wakers.append(wake)
        try:
            if self._reason is None:
                async with asyncio.timeout(seconds):
                    await told.wait()
        except TimeoutError:
            pass
        finally:
            self._wakers.remove(wake)
        return self.is_set()

    def raise_if_set(self) -> None:
        """Raise TimedOut past the deadline, Cancelled for any other reason; do nothing while the signal is not set."""
        if self.is_set():
            raise self.exception()

    def set(self, reason: Reason) -> bool:
        """Tell the handler to stop; the first reason stays, only "lost" replaces it. Return whether this one was taken.

        Not for handlers.
        """
        first = self._reason is None
        if not first and (reason != "lost" or self._reason == "lost"):
            return False
        self._reason = reason
        if self._event is not None:
            self._event.set()
        for wake in tuple(self._wakers):
            try:
                wake()
            except RuntimeError:
                # The waiting loop is closed: there is nobody left to wake.
                continue
        return True

    def exception(self) -> BaseException:
        """Return the exception for the reason."""
        if self._reason == "timeout":
            return TimedOut("the job ran past its timeout")
        return Cancelled(f"the run was told to stop: {self._reason}")

    def peek(self) -> Reason | None:
        """Return the reason without counting as a look by the handler."""
        return self._reason

    @property
    def observed(self) -> bool:
        """Whether the handler looked at the signal while it was set."""
        return self._observed

    def _ensure_event(self) -> threading.Event:
        with _making_event:
            if self._event is None:
                self._event = threading.Event()
        # The signal may have been set before there was an event to set.
        if self._reason is not None:
            self._event.set()
        return self._event

    def __repr__(self) -> str:
        return f"<RunSignal {self._reason or 'not set'}>"


class JobContext:
    """One run, as its handler sees it."""

    __slots__ = (
        "_now",
        "_shield",
        "attempt",
        "execution",
        "execution_id",
        "job_name",
        "key",
        "max_attempts",
        "organization_id",
        "payload",
        "reported",
        "signal",
    )

    def __init__(
        self,
        *,
        execution_id: UUID | None,
        job_name: str,
        payload: Mapping[str, Any],
        attempt: int,
        max_attempts: int,
        now: datetime | None,
        key: str,
        organization_id: str | None,
        signal: RunSignal,
        shield: Shield = _OPEN,
        execution: JobExecution | None = None,
    ) -> None:
        # None for a direct call of the job, without a row.
        self.execution_id = execution_id
        self.job_name = job_name
        self.payload = payload
        # The number of this attempt, from 1.
        self.attempt = attempt
        self.max_attempts = max_attempts
        self.key = key
        self.organization_id = organization_id
        self.signal = signal
        self._now = now
        self._shield = shield
        # The row as it was claimed; not for handlers.
        self.execution = execution
        # What progress() last reported; not for handlers.
        self.reported: dict[str, Any] | None = None

    @classmethod
    def detached(cls, job_name: str, payload: Mapping[str, Any]) -> JobContext:
        """Return a context for a direct call of a job: no row, the only attempt, a signal that is never set."""
        return cls(
            execution_id=None,
            job_name=job_name,
            payload=payload,
            attempt=1,
            max_attempts=1,
            now=datetime.now(UTC),
            key="",
            organization_id=None,
            signal=RunSignal(),
        )

    @property
    def now(self) -> datetime:
        """The instant at which this run started, aware and in UTC, by the database's clock; it does not change."""
        if self._now is None:
            self._now = datetime.now(UTC)
        return self._now

    def progress(self, done: float, total: float | None = None, note: str = "") -> None:
        """Report how far the run is; kept in memory and written to the row at most once a second.

        Takes any real number, even a Decimal. Raises ValueError for NaN and infinity.
        """
        self.reported = {
            "done": _plain(done),
            "total": None if total is None else _plain(total),
            "note": clean_text(note, NOTE_LENGTH),
        }

    def shield(self) -> Shield:
        """Return a context manager that holds back the exception of a cancel or timeout until its block has ended.

        The signal is set nevertheless. A shielded run is still given up after its timeout and at a shutdown.
        """
        return self._shield

    def __repr__(self) -> str:
        return f"<JobContext {self.job_name} {self.execution_id} attempt {self.attempt}>"


def _plain(number: float) -> float:
    """Return a number as an int or float, for JSON."""
    if not isfinite(number):
        raise ValueError(f"progress() takes finite numbers, not {number!r}")
    return number if type(number) in {int, float} else float(number)


_current: ContextVar[JobContext | None] = ContextVar("django_jobs_context", default=None)


def current_context() -> JobContext | None:
    """Return the context of the current run, however deep below the handler; None outside a run."""
    return _current.get()


def shielded() -> Shield:
    """Return the shield of the current run, in which our own code works when a handler calls it.

    Does nothing outside a run.
    """
    context = _current.get()
    return _OPEN if context is None else context.shield()


def enter_context(context: JobContext) -> Token[JobContext | None]:
    """Make this the current context, for direct calls; the token is for leave_context()."""
    return _current.set(context)


def leave_context(token: Token[JobContext | None]) -> None:
    """Restore the context from before enter_context()."""
    _current.reset(token)
