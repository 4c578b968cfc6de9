"""The line between a supervisor and a child: each notices when the other is gone, the supervisor also when it hangs.

It also carries the reports of the child's health, which therefore need neither a file nor a port.
"""

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
# Bytes that are read at a time.
AT_ONCE = 65536
# Extra seconds for the first sign of life of a process, which has to import the project before.
START = 300.0


class Lifeline:
    """The supervisor's end of the line to one process; it needs no database, so an outage ends no child."""

    def __init__(self) -> None:
        self._own, self._child_end = socket.socketpair()
        self._own.settimeout(0.0)
        self._listened_at = time.monotonic()
        self._silence = -START
        # The beginning of a report whose end has not come yet.
        self._begun = b""
        # The last report that came; empty before the first one.
        self.report = b""

    @property
    def child_end(self) -> int:
        """The file that becomes the child's standard input."""
        return self._child_end.fileno()

    def silence(self, now: float) -> float:
        """Return for how many seconds of looking the line has been silent, at the monotonic time `now`.

        Before the first sign of life it is below 0 for START seconds.
        """
        if self.hear():
            self._silence = 0.0
        else:
            self._silence += min(now - self._listened_at, MOST_AT_ONCE)
        self._listened_at = now
        return self._silence

    def close(self) -> None:
        """Close both ends."""
        self._own.close()
        self._child_end.close()

    def hear(self) -> bool:
        """Take note of what has come; return whether anything has."""
        heard = b""
        # Never the end of the line, as the child's end stays open here: a process that ends is noticed elsewhere.
        with contextlib.suppress(BlockingIOError):
            while part := self._own.recv(AT_ONCE):
                heard += part
        *reports, self._begun = (self._begun + heard).split(b"\n")
        self.report = next(filter(None, reversed(reports)), self.report)
        return bool(heard)


def hold_lifeline(report: Callable[[], bytes], when_supervisor_is_gone: Callable[[], None]) -> None:
    """Send signs of life from a thread, and call `when_supervisor_is_gone` once when it has died in whatever way.

    Each sign is what `report` returns, at once: a line of its own, or nothing. It shows only that this process is not
    stopped and that its threads get to run: its loops are judged by its beats. Standard input becomes /dev/null, so
    that neither handlers nor the processes they start touch the line.
    """
    line = socket.socket(fileno=os.dup(STANDARD_INPUT))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, STANDARD_INPUT)
    os.close(nothing)
    line.settimeout(EVERY)

    def turn() -> None:
        unsent = b""
        # The supervisor's end is closed, or reset if there were unread signs.
        with line, contextlib.suppress(ConnectionError):
            while True:
                unsent = unsent or report() + b"\n"
                # A frozen supervisor reads nothing, so the line may be full, and take a part only.
                with contextlib.suppress(TimeoutError):
                    unsent = unsent[line.send(unsent) :]
                with contextlib.suppress(TimeoutError):
                    if not line.recv(1):
                        break
        when_supervisor_is_gone()

    start_thread(turn, name="lifeline")
