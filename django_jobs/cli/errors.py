"""Why a command could not do its work; `manage.py jobs` turns each of these into an exit code and one line."""

from __future__ import annotations

from django_jobs.runtime.options import UsageError
from django_jobs.runtime.startup import DatabaseNotReady

__all__ = ["DatabaseNotReady", "NothingDone", "UsageError"]


class NothingDone(Exception):
    """What was asked for was not done, or not to all that were named; the text says why."""
