"""The errors of the commands; `manage.py jobs` turns each of them into an exit code and one line."""

from __future__ import annotations

from django_jobs.runtime.options import UsageError
from django_jobs.runtime.startup import DatabaseNotReady

__all__ = ["DatabaseNotReady", "NothingDone", "UsageError"]


class NothingDone(Exception):
    """Nothing was done, or not to every execution that was named; the text says why."""
