"""Decides which hints also trim a queue's set, renew its expiry and list the queue, as not every hint has to."""

from __future__ import annotations

import time

# After this many seconds, or this many ids of this process, whichever comes first.
INTERVAL = 1.0
PORTION = 100
# The most queues that are remembered; with more, upkeep is done more often than necessary.
QUEUES = 1000


class Upkeep:
    """Remembers by queue when upkeep was done last; a race of threads may do it once more."""

    def __init__(self) -> None:
        # By queue: the monotonic time until which, and the number of ids for which, it need not be done.
        self._good: dict[str, tuple[float, int]] = {}

    def is_due(self, queue: str, added: int) -> bool:
        """Return whether a hint with this many ids is to do the upkeep, which then counts as done."""
        now = time.monotonic()
        until, left = self._good.get(queue, (now, 0))
        is_due = now >= until or added > left
        if len(self._good) > QUEUES:
            self._good.clear()
        self._good[queue] = (now + INTERVAL, PORTION) if is_due else (until, left - added)
        return is_due
