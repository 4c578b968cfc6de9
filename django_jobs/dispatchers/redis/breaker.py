"""A circuit breaker: keeps pushes from waiting again and again for a server that does not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from django_jobs.dispatchers.base import Unavailable

T = TypeVar("T")

# After a failure nobody tries for SHORTEST seconds, or for PATIENCE times as long as the failure took, so that waiting
# for the server never takes more than one part in PATIENCE of one thread's time.
SHORTEST = 0.5
PATIENCE = 20


class Breaker:
    """Open for a while after a failure, when it calls nothing; then one caller tries. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reason = ""
        # None while it is closed; else the monotonic time until which nobody may try.
        self._open_until: float | None = None

    def call(self, do: Callable[[], T]) -> T:
        """Return the result of `do`, which may raise Unavailable; raise that at once while a failure is recent."""
        began = time.monotonic()
        self._admit(began)
        try:
            result = do()
        except Unavailable as error:
            self.trip(str(error), max(SHORTEST, PATIENCE * (time.monotonic() - began)))
            raise
        self.reset()
        return result

    def trip(self, reason: str, seconds: float = SHORTEST) -> None:
        """Stay open for this long, even if a try was due sooner."""
        with self._lock:
            self._reason = reason
            self._open_until = max(self._open_until or 0.0, time.monotonic() + seconds)

    def reset(self) -> None:
        """Close again: the server works."""
        with self._lock:
            self._open_until = None

    def _admit(self, now: float) -> None:
        with self._lock:
            if self._open_until is None:
                return
            if now < self._open_until:
                raise Unavailable(f"{self._reason} (not tried again yet)")
            # This caller tries; the others wait for the outcome.
            self._open_until = now + SHORTEST * PATIENCE
