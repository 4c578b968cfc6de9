"""The operations on jobs and executions; application code, the admin and the runtime call them."""

from __future__ import annotations

from django_jobs.services.bulk import Report, cancel_many, retry_many
from django_jobs.services.operations import (
    acancel,
    acopy,
    aretry,
    astart_now,
    atrigger,
    cancel,
    copy,
    mode,
    retry,
    start_now,
    trigger,
)
from django_jobs.services.pauses import (
    apause_job,
    apause_queue,
    aresume_job,
    aresume_queue,
    pause_job,
    pause_queue,
    resume_job,
    resume_queue,
)
from django_jobs.services.push import apush, apush_many, push, push_many

__all__ = [
    "Report",
    "acancel",
    "acopy",
    "apause_job",
    "apause_queue",
    "apush",
    "apush_many",
    "aresume_job",
    "aresume_queue",
    "aretry",
    "astart_now",
    "atrigger",
    "cancel",
    "cancel_many",
    "copy",
    "mode",
    "pause_job",
    "pause_queue",
    "push",
    "push_many",
    "resume_job",
    "resume_queue",
    "retry",
    "retry_many",
    "start_now",
    "trigger",
]
