"""Ended runs whose rows another transaction holds, until they are tried again; kept by the finisher."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from uuid import UUID

from django_jobs.execution.run import Run

logger = logging.getLogger("django_jobs.finisher")

PAUSE = 0.05
MAX_PAUSE = 1.0


class Held:
    """Keeps such runs out of the batches that they would hold up; all are tried again together, after a pause.

    Changed only by the finisher's thread; may be read from any.
    """

    def __init__(self) -> None:
        self.runs: tuple[Run, ...] = ()
        self._tried: set[UUID] = set()
        self._pause = PAUSE
        self._due_at = 0.0

    @property
    def size(self) -> int:
        """The bytes that they keep."""
        return sum(run.size for run in self.runs)

    def put(self, runs: Sequence[Run]) -> None:
        """Add runs whose rows were held; those that come back wait longer."""
        if not runs:
            return
        again = sum(run.execution.pk in self._tried for run in runs)
        # Not the first time: our own writes hold a row for a moment as well.
        if again and self._pause == PAUSE:
            logger.warning("the outcomes of %d runs wait for another transaction that holds their rows", again)
        self._pause = min(self._pause * 2, MAX_PAUSE) if again else PAUSE
        self._due_at = time.monotonic() + self._pause
        self.runs += tuple(runs)

    def seconds_left(self) -> float | None:
        """Return the seconds until they are due; None when there are none."""
        return max(self._due_at - time.monotonic(), 0.0) if self.runs else None

    def clear(self) -> None:
        """Forget the runs, which the finisher has taken over."""
        self._tried = {run.execution.pk for run in self.runs}
        self.runs = ()
