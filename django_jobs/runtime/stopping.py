"""Requests to end a process: by signals, by the death of a thread, by the code that started it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Seconds. A signal that comes between Python's last check and the wait in C is noticed only when that wait is over.
LOOK_EVERY = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequest:
    """Why the process is to end."""

    reason: str
    # Did something break?
    is_failure: bool = False
    # Is the process to restart instead of ending?
    is_recycle: bool = False
    # Are running executions to finish first, however long that takes?
    is_patient: bool = False


class StopNow(BaseException):
    """Raised by a signal before anything was started, wherever the process is."""


def end_at_once(number: int) -> None:
    """End this process at once, for a second signal; its running rows are rescued."""
    os._exit(128 + number)


# The objects that have taken signals in this process.
_takers: weakref.WeakSet[StopRequests] = weakref.WeakSet()


class StopRequests:
    """Takes requests from any thread and from signal handlers; the first one counts.

    `insisted` is called with the number of each signal after the first.
    """

    def __init__(self, *, insisted: Callable[[int], None] = end_at_once) -> None:
        self._insisted = insisted
        # Not an Event, whose lock may be held by the very thread that a signal handler interrupts.
        self._queue: SimpleQueue[StopRequest] = SimpleQueue()
        self._first: StopRequest | None = None
        self._signals = 0
        # The previous handlers, by signal.
        self._previous: dict[signal.Signals, Any] = {}
        # Until something was started, a signal ends the process at once.
        self.is_starting = True
        # Were signal handlers installed, so that this process is ours to end?
        self.has_signals = False

    def put(self, request: StopRequest) -> None:
        """Ask for an end."""
        self._queue.put(request)

    def wait(self, timeout: float | None) -> StopRequest | None:
        """Return the first request, waiting for it up to `timeout` seconds; None for ever."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._first is None:
            left = LOOK_EVERY if deadline is None else min(max(deadline - time.monotonic(), 0.0), LOOK_EVERY)
            with contextlib.suppress(Empty):
                self._first = self._queue.get(timeout=left)
            if deadline is not None and time.monotonic() >= deadline:
                break
        return self._first

    def overrides(self, timeout: float = 0.0) -> StopRequest | None:
        """Return a later, less patient request, if there is one or it comes within `timeout` seconds."""
        with contextlib.suppress(Empty):
            # Every handler that does not stop asks for a restart, and so does every limit that is reached.
            while (later := self._queue.get(timeout=timeout)).is_recycle or later.is_patient:
                pass
            return later
        return None

    def give_back(self) -> None:
        """Restore the previous signal handlers."""
        self.has_signals = False
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Take signals as requests; only in the main thread, as Python does not allow it elsewhere."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # An ignored hangup stays ignored: nohup wants that.
        is_detached = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        taken = [number for number in SIGNALS if not (is_detached and number == signal.SIGHUP)]
        self._previous = {number: signal.signal(number, self._on_signal) for number in taken}
        _takers.add(self)
        self.has_signals = True
        try:
            yield
        finally:
            self.give_back()

    def let_in(self) -> None:
        """Unblock signals that the parent process blocked; may raise StopNow at once."""
        if self.has_signals:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def _on_signal(self, number: int, frame: Any) -> None:
        self._signals += 1
        if self._signals > 1:
            # When a terminal is closed, both the kernel and the shell send one.
            if number != signal.SIGHUP:
                self._insisted(number)
            return
        self.put(StopRequest(reason=signal.Signals(number).name))
        if self.is_starting:
            raise StopNow


def give_back_signals() -> None:
    """Restore the signal handlers from before any StopRequests, for a forked process."""
    for taker in list(_takers):
        taker.give_back()
