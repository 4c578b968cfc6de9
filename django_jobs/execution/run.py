"""One attempt of one execution, from claim to outcome; made by the pool, filled by the executor."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from time import monotonic
from typing import TYPE_CHECKING, Any

from django_jobs.context import JobContext, RunSignal
from django_jobs.execution.gate import Gate
from django_jobs.execution.logs import Capture
from django_jobs.execution.outcomes import Ok, Outcome

if TYPE_CHECKING:
    from django_jobs.definition import Job
    from django_jobs.models import JobExecution


class Run:
    """A run, as this process knows it.

    To be made when the run starts: its deadline counts from there.
    """

    __slots__ = (
        "capture",
        "context",
        "deadline",
        "execution",
        "finish_inside",
        "gate",
        "job",
        "job_context",
        "manage_connections",
        "outcome",
        "recorded",
        "settle",
        "signal",
        "started",
        "worker",
    )

    def __init__(
        self,
        execution: JobExecution,
        job: Job[...],
        *,
        worker: str = "",
        manage_connections: bool = True,
    ) -> None:
        self.execution = execution
        self.job = job
        # Its host and process id, for the error entry.
        self.worker = worker
        # Off inside a caller's transaction (immediate mode): the connections belong to the caller.
        self.manage_connections = manage_connections
        # For atomic jobs, see atomic.write_inside().
        self.finish_inside: Callable[[Ok], bool] | None = None
        self.settle: Callable[[], bool] | None = None
        self.gate = Gate()
        self.signal = RunSignal(self.gate)
        self.capture = Capture(self.gate)
        # The handler's view; without a reference to the run, which would make a cycle of each run.
        self.job_context: JobContext | None = None
        # The handler's context variables; listeners get a copy.
        self.context: contextvars.Context | None = None
        self.outcome: Outcome | None = None
        # Has the end of the row been written already?
        self.recorded = False
        timeout = job.effective_timeout
        # Monotonic seconds.
        self.started = monotonic()
        self.deadline = None if timeout is None else self.started + timeout

    def started_at(self) -> datetime:
        """Return when the run started, by the database's clock if the row has it."""
        return self.execution.started_at or datetime.now(UTC)

    def ended_at(self) -> datetime:
        """Return the current instant, on the clock of started_at()."""
        return self.started_at() + timedelta(seconds=monotonic() - self.started)

    @property
    def progress(self) -> dict[str, Any] | None:
        """The progress that the handler last reported (done, total, note); a new object after each report."""
        return None if self.job_context is None else self.job_context.reported

    @progress.setter
    def progress(self, value: dict[str, Any] | None) -> None:
        if self.job_context is not None:
            self.job_context.reported = value

    @property
    def size(self) -> int:
        """The approximate number of characters in its payload and log lines."""
        return len(self.execution.payload_json) + (0 if self.capture.buffer is None else self.capture.buffer.size)

    def log_entries(self) -> list[dict[str, Any]]:
        """Return the captured log lines as they are stored."""
        return [] if self.capture.buffer is None else self.capture.buffer.entries()

    def __repr__(self) -> str:
        return f"<Run {self.job.name} {self.execution.pk} attempt {self.execution.attempt}>"
