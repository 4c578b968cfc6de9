"""Delete rows of ended runs that their jobs do not keep: for the finisher, and for immediate mode."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from datetime import datetime, timedelta

from django.db import Error

from django_jobs import clock, retention
from django_jobs.clock import EPOCH
from django_jobs.contention import is_connection_loss
from django_jobs.execution.run import Run
from django_jobs.states import FINAL, Status

logger = logging.getLogger("django_jobs.finisher")

# Seconds between two trims of the same job and status, at least.
TRIM_EVERY = 1.0
# The next trim begins this far before the place where the last one ended: others write ends that are a little older.
LATE = timedelta(seconds=5)


class Keeping:
    """Knows how far each job and status has been trimmed; rows that are missed here are left to the hourly trim."""

    def __init__(self, *, using: str) -> None:
        self._using = using
        # By job and status: when it was last trimmed, in monotonic seconds, and how far that got.
        self._trimmed: dict[tuple[str, Status], tuple[float, datetime]] = {}

    def discard(self, ended: Iterable[tuple[Run, Status]]) -> None:
        """Delete the rows of runs whose jobs keep none with their status; raises when the connection is lost."""
        ids = [run.execution.pk for run, status in ended if status in FINAL and run.job.retention(status) == 0]
        if not ids:
            return
        try:
            retention.discard(ids, using=self._using)
        except Error as error:
            if is_connection_loss(error, self._using):
                raise
            logger.debug("%d executions were not deleted: %s", len(ids), error)

    def trim(self, ended: Iterable[tuple[Run, Status]]) -> None:
        """Delete the older surplus of the jobs of these runs."""
        moment = time.monotonic()
        for (name, status), run in {(run.job.name, status): run for run, status in ended if status in FINAL}.items():
            keep = run.job.retention(status)
            at, reached = self._trimmed.get((name, status), (-TRIM_EVERY, EPOCH))
            if not keep or moment - at < TRIM_EVERY:
                continue
            place = retention.Place(reached - LATE)
            try:
                now = clock.now(self._using)
                age, others = run.job.effective_max_age, run.job.names_besides(name)
                retention.trim(name, status, keep, age, now=now, using=self._using, place=place, other_names=others)
            except Error as error:
                logger.debug("old executions of %s were not trimmed: %s", name, error)
            self._trimmed[name, status] = (moment, max(reached, place.at))
