"""From a run's outcome to its row's new state; for all who write how runs ended."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from django_jobs import transitions
from django_jobs.execution.outcomes import Aborted, Failed, Lost, Ok, Released, Rescheduled
from django_jobs.execution.run import Run
from django_jobs.states import Status
from django_jobs.transitions import Ending

UNSTORABLE = "The outcome could not be stored; see the log of the worker."


def ending_of(run: Run, now: datetime, *, surplus: bool = False) -> Ending | None:
    """Return the row's new state for a run's outcome; None when the row no longer belongs to this run.

    `surplus` says that there are enough newer successes of the job that this one would not be kept.
    """
    row, job, outcome = run.execution, run.job, run.outcome
    if isinstance(outcome, Ok) and (surplus or job.retention(Status.OK) == 0):
        return transitions.succeed(row, drop=True)
    detail: dict[str, Any] = {"logs": run.log_entries(), "progress": run.progress}
    match outcome:
        case Ok(result=result):
            return transitions.succeed(row, result=result, **detail)
        case Failed(message=message, error=entry, fingerprint=fingerprint, delay=None):
            drop = job.retention(Status.ERROR) == 0
            return transitions.fail(row, error=message, entry=entry, fingerprint=fingerprint, drop=drop, **detail)
        case Failed(message=message, error=entry, fingerprint=fingerprint, delay=delay):
            at = now + timedelta(seconds=delay or 0)
            return transitions.reschedule(row, at=at, error=message, entry=entry, fingerprint=fingerprint, **detail)
        case Rescheduled(delay=delay):
            return transitions.reschedule(row, at=now + timedelta(seconds=delay), refund=True, **detail)
        case Aborted(error=entry):
            return transitions.abort(row, entry=entry, drop=job.retention(Status.CANCELLED) == 0, **detail)
        case Released():
            return transitions.release(row, **detail)
        case Lost() | None:
            return None


def surplus_of(batch: Sequence[Run]) -> set[Run]:
    """Return the successes of a batch that newer ones in it replace at once: deleting them is cheaper than updating."""
    successes: dict[str, list[Run]] = {}
    for run in batch:
        if isinstance(run.outcome, Ok) and not run.recorded:
            successes.setdefault(run.job.name, []).append(run)
    surplus: set[Run] = set()
    for runs in successes.values():
        keep = runs[0].job.retention(Status.OK)
        if keep is not None and len(runs) > keep:
            surplus.update(runs[: len(runs) - keep])
    return surplus
