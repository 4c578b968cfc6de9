"""Background jobs for Django: an outbox table, cron, typed payloads and an admin; everything public is named here.

Importing it touches no settings, no models and no database: it is safe in a project's models.py.
"""

from __future__ import annotations

from django_jobs.context import JobContext, current_context
from django_jobs.definition import Job, job
from django_jobs.exceptions import (
    AlreadyRunning,
    Cancelled,
    Conflict,
    DefinitionError,
    InvalidPayload,
    InvalidResult,
    JobsError,
    KeyTaken,
    Reschedule,
    TimedOut,
    UnknownJob,
    WorkerLost,
    WrongStatus,
)
from django_jobs.options import Keep
from django_jobs.retries import Backoff, Retry
from django_jobs.signals import job_cancelled, job_failed, job_finished, job_pushed, job_started, job_succeeded
from django_jobs.states import Status

__all__ = [
    "AlreadyRunning",
    "Backoff",
    "Cancelled",
    "Conflict",
    "DefinitionError",
    "InvalidPayload",
    "InvalidResult",
    "Job",
    "JobContext",
    "JobsError",
    "Keep",
    "KeyTaken",
    "Reschedule",
    "Retry",
    "Status",
    "TimedOut",
    "UnknownJob",
    "WorkerLost",
    "WrongStatus",
    "current_context",
    "job",
    "job_cancelled",
    "job_failed",
    "job_finished",
    "job_pushed",
    "job_started",
    "job_succeeded",
]
