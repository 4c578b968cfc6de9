"""What can be done with jobs and executions, by application code, the admin and the runtime alike."""

from __future__ import annotations

from django_jobs.services.bulk import Report, cancel_many, retry_many
from django_jobs.services.keys import overlap_key
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
from django_jobs.services.push import apush, apush_many, push, push_many

__all__ = [
    "Report",
    "acancel",
    "acopy",
    "apush",
    "apush_many",
    "aretry",
    "astart_now",
    "atrigger",
    "cancel",
    "cancel_many",
    "copy",
    "mode",
    "overlap_key",
    "push",
    "push_many",
    "retry",
    "retry_many",
    "start_now",
    "trigger",
]
