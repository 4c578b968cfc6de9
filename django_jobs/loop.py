"""Call a tick again and again in a thread of its own; used for every periodic task of the runtime."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from datetime import datetime
from typing import Protocol

from django.db import connections

from django_jobs.pooling import bypass_pool

logger = logging.getLogger("django_jobs.loop")

# Seconds; long enough to spare a database that is down, short enough to be back soon after it.
MAX_BACKOFF = 5.0
# Seconds after which an unused connection is closed: something on the way to the server might drop it silently.
IDLE_CONNECTION = 30.0
# Seconds between log lines about a fault that comes and goes.
LOG_INTERVAL = 30.0


class Tick(Protocol):
    """One pass of periodic work; takes `now` or asks the clock, and returns the seconds until the next pass."""

    def __call__(self, now: datetime | None = None) -> float: ...


OnDeath = Callable[[BaseException], None]


def start_thread(
    run: Callable[[], None], *, name: str, on_death: OnDeath | None = None, for_handlers: bool = False
) -> threading.Thread:
    """Start a daemon thread of ours, which closes its connections at its end, and whose death is reported.

    If a database has a pool, only threads for handlers use it. Raises RuntimeError when the system cannot start a
    thread.
    """

    def watched() -> None:
        try:
            if not for_handlers:
                bypass_pool()
            run()
        except BaseException as error:
            logger.critical("%s stopped working", name, exc_info=True)
            if on_death is not None:
                on_death(error)
        finally:
            connections.close_all()

    thread = threading.Thread(target=watched, name=f"django_jobs {name}", daemon=True)
    thread.start()
    return thread


class FaultLog:
    """Remembers which faults were logged: each is logged once until all is well, and not again within LOG_INTERVAL."""

    def __init__(self) -> None:
        # When each kind was last logged, and which of them are not over yet.
        self._at: dict[str, float] = {}
        self._open: set[str] = set()

    def is_news(self, kind: str) -> bool:
        """Return whether to log a fault of this kind, which then counts as logged."""
        now = time.monotonic()
        if kind in self._open or now - self._at.get(kind, float("-inf")) < LOG_INTERVAL:
            return False
        self._open.add(kind)
        self._at[kind] = now
        return True

    def end(self) -> bool:
        """Note that all is well; return whether to log that, because a fault was logged before."""
        was_logged, now = bool(self._open), time.monotonic()
        self._open.clear()
        self._at = {kind: at for kind, at in self._at.items() if now - at < LOG_INTERVAL}
        return was_logged


class Loop:
    """Calls `tick` again and again in a daemon thread, each time after the delay it returned, or at once on wake().

    When a tick raises, its database connections are closed, and it is tried again after a pause that grows to
    `max_backoff` seconds. Each kind of error is logged once until the tick succeeds again, and not again within
    LOG_INTERVAL, so that no outage ends the thread or floods the log.
    """

    def __init__(
        self,
        tick: Tick,
        *,
        name: str,
        max_backoff: float = MAX_BACKOFF,
        on_death: OnDeath | None = None,
    ) -> None:
        self.name = name
        self._tick = tick
        self._max_backoff = max_backoff
        self._on_death = on_death
        self._wake = threading.Event()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._failures = 0
        self._faults = FaultLog()
        # When the next tick is due, or when the current one began.
        self._due_at = time.monotonic()

    def start(self) -> None:
        """Start the thread."""
        self._thread = start_thread(self._run, name=self.name, on_death=self._on_death)

    def wake(self) -> None:
        """Tick now instead of after the delay; safe from any thread and from signal handlers."""
        self._wake.set()

    def stop(self) -> None:
        """Stop ticking; a tick that is under way ends first."""
        self._stopped.set()
        self._wake.set()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the thread; return whether it ended."""
        if self._thread is None:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def turn(self) -> float:
        """Tick in this thread; return the seconds until the next time, also when the tick raised."""
        try:
            delay = self._tick()
        except Exception as error:  # noqa: BLE001 - logged, and tried again
            return self._failed(error)
        if self._failures:
            if self._faults.end():
                logger.warning("%s works again after %d failures", self.name, self._failures)
            self._failures = 0
        return max(delay, 0.0)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_stopped(self) -> bool:
        """Whether it was told to stop."""
        return self._stopped.is_set()

    @property
    def overdue(self) -> float:
        """For how many seconds a tick has been running or overdue; 0.0 while it waits for the next one."""
        return max(time.monotonic() - self._due_at, 0.0)

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._wake.clear()
            self._due_at = time.monotonic()
            delay = self.turn()
            self._due_at = time.monotonic() + delay
            if self._stopped.is_set():
                return
            if delay > IDLE_CONNECTION:
                connections.close_all()
            self._wake.wait(delay)

    def _failed(self, error: Exception) -> float:
        self._failures += 1
        # In one line: drivers explain at length, and all threads fail at the same time.
        kind = " ".join(f"{type(error).__name__}: {error}".split())
        if self._faults.is_news(kind):
            logger.warning(
                "%s failed and will try again: %s", self.name, kind, exc_info=logger.isEnabledFor(logging.DEBUG)
            )
        connections.close_all()
        return random.uniform(0.5, 1.0) * min(self._max_backoff, 0.25 * 2.0 ** min(self._failures, 8))
