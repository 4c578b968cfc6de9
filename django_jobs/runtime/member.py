"""One of the processes of `runjobs --processes`, as its supervisor sees it."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field

from django_jobs.runtime.child import Child
from django_jobs.runtime.lifeline import Lifeline

# Seconds before a child that ended by itself is replaced; doubles with each failure.
FIRST_PAUSE, MAX_PAUSE = 0.5, 30.0


@dataclass(slots=True)
class Member:
    """A child's place, and the process that fills it now."""

    child: Child
    process: subprocess.Popen[bytes] | None = None
    line: Lifeline | None = None
    started_at: float = 0.0
    # When the next process is to be started.
    due_at: float = 0.0
    # How many processes in a row have failed.
    failures: int = 0
    # Exit codes that were logged since a process was last well: each is logged once.
    logged: set[int] = field(default_factory=set)
    # The exit code of a process that could not start working, for want of a database or a valid setting.
    refusal: int | None = None

    def __str__(self) -> str:
        return f"{self.child}, pid {self.process.pid}" if self.process is not None else str(self.child)

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def fail(self) -> float:
        """Count an unexpected end; return the seconds before the next start, which double each time."""
        pause = min(FIRST_PAUSE * 2.0 ** min(self.failures, 8), MAX_PAUSE)
        self.failures += 1
        return pause

    def hang_up(self) -> None:
        """Stop listening to the process."""
        if self.line is not None:
            self.line.close()
            self.line = None

    def forgive(self) -> None:
        """Forget the failures of earlier processes."""
        self.failures = 0
        self.logged.clear()
