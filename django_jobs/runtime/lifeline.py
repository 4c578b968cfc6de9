"""The line between a supervisor and a child: each notices when the other is gone, the supervisor also when it hangs."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable

from django_jobs.loop import start_thread

# File descriptor of the child's end.
STANDARD_INPUT = 0
# Seconds between two signs of life.
EVERY = 1.0
# The most seconds between two looks that count as silence: while the machine sleeps, or the supervisor is frozen
# together with its children, nobody listens.
MOST_AT_ONCE = 1.0
# Seconds that a process has for its first sign of life, in which it imports the project, beyond those of any other.
START = 300.0


class Lifeline:
    """The supervisor's end of the line to one process; it needs no database, so an outage ends no child."""

    def __init__(self) -> None:
        self._own, self._child_end = socket.socketpair()
        self._own.settimeout(0.0)
        self._listened_at = time.monotonic()
        self._silence = -START

    @property
    def child_end(self) -> int:
        """The file that becomes the child's standard input."""
        return self._child_end.fileno()

    def silence(self, now: float) -> float:
        """Return for how many seconds of looking the line has been silent, at the monotonic time `now`.

        Before the first sign of life it is below 0 for START seconds.
        """
        if self._hears():
            self._silence = 0.0
        else:
            self._silence += min(now - self._listened_at, MOST_AT_ONCE)
        self._listened_at = now
        return self._silence

    def close(self) -> None:
        """Close both ends."""
        self._own.close()
        self._child_end.close()

    def _hears(self) -> bool:
        # Never the end of the line, as the child's end stays open here: a process that ends is noticed elsewhere.
        with contextlib.suppress(BlockingIOError):
            return bool(self._own.recv(4096))
        return False


def hold_lifeline(when_supervisor_is_gone: Callable[[], None]) -> None:
    """Send signs of life from a thread, and call `when_supervisor_is_gone` once when it has died in whatever way.

    The thread shows only that this process is not stopped and that its threads get to run: its loops are judged by its
    beats. Standard input becomes /dev/null, so that neither handlers nor the processes they start touch the line.
    """
    line = socket.socket(fileno=os.dup(STANDARD_INPUT))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, STANDARD_INPUT)
    os.close(nothing)
    line.settimeout(EVERY)

    def turn() -> None:
        # The supervisor's end is closed, or reset if there were unread signs.
        with line, contextlib.suppress(ConnectionError):
            while True:
                # A frozen supervisor reads nothing, so the line may be full.
                with contextlib.suppress(TimeoutError):
                    line.send(b".")
                with contextlib.suppress(TimeoutError):
                    if not line.recv(1):
                        break
        when_supervisor_is_gone()

    start_thread(turn, name="lifeline")
