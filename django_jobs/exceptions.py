"""Every exception a user of django_jobs can meet.

JobsError
├── DefinitionError      a wrong option of @job or using()
├── InvalidPayload       arguments that the handler's signature does not accept
├── InvalidResult        a task returned a value that is not JSON
├── UnknownJob           a name that is not registered
├── Conflict             the row is not in a state that allows this
│   ├── AlreadyRunning
│   ├── KeyTaken
│   └── WrongStatus
└── WorkerLost           recorded on rows whose worker died

Reschedule is raised by handlers. Cancelled and TimedOut reach into handlers; they derive from BaseException so that a
handler's `except Exception` does not swallow them.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from django_jobs.conf import seconds

if TYPE_CHECKING:
    from django_jobs.models import JobExecution


class JobsError(Exception):
    """Base of all errors of django_jobs."""


class DefinitionError(JobsError, ValueError):
    """An option of a job, or of a push, is wrong; the text names the job, the value and the remedy."""


class InvalidPayload(JobsError, ValueError):
    """The arguments do not fit the handler's signature, or would not survive storage as JSON; nothing was written."""


class InvalidResult(JobsError, ValueError):
    """A task's return value would not survive storage as JSON; its run fails with this, and is not retried."""


class UnknownJob(JobsError, LookupError):
    """No job is registered under this name."""


class Conflict(JobsError):
    """The execution is in a state that does not allow this; `execution` is the row in the way, if it is known."""

    def __init__(self, message: str, execution: JobExecution | None = None) -> None:
        super().__init__(message)
        self.execution = execution


class AlreadyRunning(Conflict):
    """A cron job with overlap="skip" already has a live execution."""


class KeyTaken(Conflict):
    """Another live execution of the job holds the key."""


class WrongStatus(Conflict):
    """The status of the execution does not allow this."""


class WorkerLost(JobsError):
    """The process that ran the job died or lost its database for too long."""


class Reschedule(Exception):
    """Raise it in a handler to run the same row again after `delay` (a timedelta or seconds); it costs no attempt."""

    def __init__(self, delay: timedelta | float) -> None:
        self.delay = seconds(delay, what="Reschedule(delay=…)")
        super().__init__(f"run again in {self.delay:g} s")


class Cancelled(BaseException):
    """Raised inside a handler whose execution was cancelled."""


class TimedOut(BaseException):
    """Raised inside a handler that ran past its timeout."""
