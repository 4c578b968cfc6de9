"""Decide which hints also bound a queue's set, renew its lifetime and list the queue: not each of them has to."""

from __future__ import annotations

import time

# After so many seconds, or so many ids of this process, whichever comes first.
INTERVAL = 1.0
PORTION = 100
# Queues that are remembered; with more of them it is done more often than it needs to.
QUEUES = 1000


class Upkeep:
    """Remembers by queue when that was done last; in a race of threads it is done once more."""

    def __init__(self) -> None:
        # By queue: until when, by the monotonic clock, and for how many ids it need not be done.
        self._good: dict[str, tuple[float, int]] = {}

    def is_due(self, queue: str, added: int) -> bool:
        """Return whether the hint of so many ids is to do it; if so, it counts as done."""
        now = time.monotonic()
        until, left = self._good.get(queue, (now, 0))
        is_due = now >= until or added > left
        if len(self._good) > QUEUES:
            self._good.clear()
        self._good[queue] = (now + INTERVAL, PORTION) if is_due else (until, left - added)
        return is_due
