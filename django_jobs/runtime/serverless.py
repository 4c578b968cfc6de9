"""Do what is due and end within a number of seconds; for the view, whose process may be frozen afterwards."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

from django.core.exceptions import ImproperlyConfigured

from django_jobs.conf import get_settings
from django_jobs.execution.engine import AFTER_DRAIN
from django_jobs.loop import start_thread
from django_jobs.models import jobs_alias
from django_jobs.runtime.exits import DONE
from django_jobs.runtime.options import Options, UsageError
from django_jobs.runtime.runner import Runner
from django_jobs.runtime.startup import DatabaseNotReady, refuse_transaction

logger = logging.getLogger("django_jobs")

# The part of the time that is reserved for the drain and for what follows it.
SHARE = 0.2
# Seconds; less is not enough to interrupt handlers and to write how they ended.
LEAST_AFTER_DRAIN = 4.0


class Failure(Exception):
    """The call could not do its work; the text is one line without secrets, and the log has the details."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one call did."""

    # Is nothing due any more?
    done: bool
    # How many executions were started.
    started: int
    # How many ended in which status; "scheduled" and "pending" ones run again.
    ended: Mapping[str, int]
    seconds: float


def run_within(seconds: float, *, max_jobs: int | None = None) -> Report:
    """Do what `runjobs --once` does, in a thread of its own, and return within this many seconds.

    Executions that still run when the time is nearly over are stopped as at any shutdown: with `retry` they are handed
    back. Raises Failure.
    """
    drain, rest = divided(seconds)
    results: list[Report | Exception] = []

    def work() -> None:
        try:
            options = Options.of(once=True, max_time=seconds - drain - rest, max_jobs=max_jobs)
            results.append(_run(Runner(options, drain=drain, after_drain=rest)))
        except Exception as error:  # noqa: BLE001 - raised again in the calling thread
            results.append(error)

    try:
        refuse_transaction(jobs_alias())
        # Not in this thread: a server's main one would lose its signal handlers, and a hang would delay the answer.
        start_thread(work, name="once").join(seconds)
    except (UsageError, RuntimeError) as error:
        raise Failure(str(error)) from error
    match results:
        case [Report() as report]:
            return report
        case [DatabaseNotReady() as fault]:
            logger.error("runjobs over HTTP: %s", fault)
            raise Failure(f"{fault.summary.rstrip('.')}; the log says more.") from fault
        case [UsageError() | ImproperlyConfigured() as fault]:
            # The text may show values of settings.
            logger.error("runjobs over HTTP: %s", fault)
            raise Failure("A setting is wrong; the log says which.") from fault
        case [Exception() as fault]:
            raise fault
        case _:
            raise Failure(f"It did not end within {seconds:g} s; executions that it is running will be rescued.")


def divided(seconds: float) -> tuple[float, float]:
    """Return the seconds for the drain, and those for what follows it."""
    drain = min(get_settings().drain_timeout, SHARE * seconds)
    return drain, min(AFTER_DRAIN, max(SHARE * seconds, LEAST_AFTER_DRAIN))


def _run(runner: Runner) -> Report:
    began = time.monotonic()
    if runner.run() != DONE:
        raise Failure("Something broke; the log says what.")
    started, ended = runner.counts()
    return Report(
        done=runner.came_to_the_end, started=started, ended=dict(ended), seconds=round(time.monotonic() - began, 3)
    )
