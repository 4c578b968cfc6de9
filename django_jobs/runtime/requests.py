"""What a running process is asked to do: by signals, by the end of a thread, by the code that started it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# A signal that comes between Python's last look for signals and the wait in C is seen only when that wait is over.
LOOK_EVERY = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Why the process is to end."""

    reason: str
    # Did something break?
    is_failure: bool = False
    # Is the process to begin anew instead of ending?
    is_recycle: bool = False


class StopNow(BaseException):
    """Raised by a signal before anything was started, wherever the process is waiting."""


class Requests:
    """Takes requests from any thread and from signal handlers; the first one counts."""

    def __init__(self) -> None:
        # Not an Event: its lock may be held by the very thread that a signal handler interrupts.
        self._queue: SimpleQueue[Request] = SimpleQueue()
        self._first: Request | None = None
        self._signals = 0
        # While nothing is under way a signal ends the process at once.
        self.is_starting = True
        # Were the signal handlers installed, so that this process is ours to end?
        self.has_signals = False

    def put(self, request: Request) -> None:
        """Ask for an end."""
        self._queue.put(request)

    def wait(self, timeout: float | None) -> Request | None:
        """Return the first request, waiting for it up to `timeout` seconds; None for ever."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._first is None:
            left = LOOK_EVERY if deadline is None else min(max(deadline - time.monotonic(), 0.0), LOOK_EVERY)
            with contextlib.suppress(Empty):
                self._first = self._queue.get(timeout=left)
            if deadline is not None and time.monotonic() >= deadline:
                break
        return self._first

    def overrides(self) -> Request | None:
        """Return a request to end that came after the first one, if there is one."""
        with contextlib.suppress(Empty):
            # Every handler that does not stop asks for a new beginning.
            while (later := self._queue.get_nowait()).is_recycle:
                pass
            return later
        return None

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Take SIGTERM and SIGINT as requests; in the main thread only, elsewhere Python does not let us."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        self.has_signals = True
        try:
            yield
        finally:
            self.has_signals = False
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: Any) -> None:
        self._signals += 1
        if self._signals > 1:
            # Whatever the first one began takes too long for somebody; the rows are rescued.
            os._exit(128 + number)
        self.put(Request(reason=signal.Signals(number).name))
        if self.is_starting:
            raise StopNow
