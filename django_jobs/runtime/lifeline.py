"""The line between a supervisor and a child: each learns when the other is gone, the supervisor also when it hangs."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable

from django_jobs.loop import start_thread

# The child's end is its standard input.
STANDARD_INPUT = 0
# The seconds between two signs of life.
EVERY = 1.0
# So much of the time between two looks counts as silence: when the machine sleeps, or the supervisor is frozen together
# with its children, nobody was there to hear them.
MOST_AT_ONCE = 1.0


class Lifeline:
    """The supervisor's end of the line to one process; it asks no database, so that an outage ends nobody."""

    def __init__(self) -> None:
        self._own, self._child_end = socket.socketpair()
        self._own.settimeout(0.0)
        self._listened_at: float | None = None
        self._silence = 0.0

    @property
    def child_end(self) -> int:
        """The file that becomes the child's standard input."""
        return self._child_end.fileno()

    def hand_over(self) -> None:
        """Let go of the child's end, which is the child's alone from now on."""
        self._child_end.close()

    def silence(self, now: float) -> float:
        """Return for how many seconds nothing was heard in looks at the line, by the monotonic time of `now`.

        It begins with the first sign: how long a start takes is another story.
        """
        if self._hears():
            self._silence, self._listened_at = 0.0, now
        elif self._listened_at is not None:
            self._silence += min(now - self._listened_at, MOST_AT_ONCE)
            self._listened_at = now
        return self._silence

    def close(self) -> None:
        """Let go of both ends."""
        self._own.close()
        self._child_end.close()

    def _hears(self) -> bool:
        # A child that has ended closes the line; that it has is seen elsewhere.
        with contextlib.suppress(BlockingIOError, ConnectionError):
            return bool(self._own.recv(4096))
        return False


def hold_lifeline(when_supervisor_is_gone: Callable[[], None]) -> None:
    """Show life from a thread of its own, and call once when the supervisor has died in whatever way.

    The thread shows that this process is not stopped and that its threads get to run, and no more: what its loops wait
    for is judged by its beats. Standard input becomes /dev/null: neither handlers nor the processes they start have to
    do with the line.
    """
    line = socket.socket(fileno=os.dup(STANDARD_INPUT))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, STANDARD_INPUT)
    os.close(nothing)
    line.settimeout(EVERY)

    def turn() -> None:
        # It is closed, or with unread signs in it reset.
        with line, contextlib.suppress(ConnectionError):
            while True:
                # A supervisor that is frozen itself reads none of them.
                with contextlib.suppress(TimeoutError):
                    line.send(b".")
                with contextlib.suppress(TimeoutError):
                    if not line.recv(1):
                        break
        when_supervisor_is_gone()

    start_thread(turn, name="lifeline")
