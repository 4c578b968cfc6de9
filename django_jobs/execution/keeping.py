"""Delete what jobs do not keep of their ended runs: for the finisher, and for runs in the thread that pushed them."""

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

# Each job and status is trimmed once in so many seconds at most.
TRIM_EVERY = 1.0
# So far behind the place where a trim ended the next one begins: others write ends that are a little older.
LATE = timedelta(seconds=5)


class Keeping:
    """Knows how far the surplus of each job and status has gone; what does not go here goes with the hourly trim."""

    def __init__(self, *, using: str) -> None:
        self._using = using
        # By job and status: when it was trimmed last, by the monotonic clock, and how far that came.
        self._trimmed: dict[tuple[str, Status], tuple[float, datetime]] = {}

    def discard(self, ended: Iterable[tuple[Run, Status]]) -> None:
        """Delete the rows of those whose jobs keep none of their status; raises when the connection is lost."""
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
                max_age = run.job.effective_keep.max_age
                retention.trim(name, status, keep, max_age, now=now, using=self._using, place=place)
            except Error as error:
                logger.debug("old executions of %s were not trimmed: %s", name, error)
            self._trimmed[name, status] = (moment, max(reached, place.at))
