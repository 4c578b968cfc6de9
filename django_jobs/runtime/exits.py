"""How a `runjobs` process ends: its exit codes, how to tell them, and a forced end when it lingers."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

# Exit codes. A second signal ends with 128 + its number.
DONE, FAILED, USAGE, NO_DATABASE, RECYCLED = 0, 1, 2, 3, 4

# Seconds for what Python waits for when a process ends: non-daemon threads and exit hooks of the project.
LINGER = 2.0
# Seconds for the last words of a process; what holds up its end may be that nobody reads them.
LAST_WORDS = 0.5


def end_soon(code: int) -> None:
    """End this process within LINGER seconds, even if threads that handlers left behind would keep it alive.

    These are threads that they started, and those in which coroutines run synchronous code.
    """
    timer = threading.Timer(LINGER, end_now, (code, flush_streams))
    timer.daemon = True
    timer.start()


def end_now(code: int, last_words: Callable[[], None]) -> None:
    """End this process, whatever holds it up."""
    thread = threading.Thread(target=last_words, daemon=True)
    # Raised when the system, or Python at its own end, starts no thread any more.
    with contextlib.suppress(RuntimeError):
        thread.start()
        thread.join(LAST_WORDS)
    os._exit(code)


@contextlib.contextmanager
def ended_by(deadline: float, last_words: Callable[[], None], *, is_ours: bool) -> Iterator[None]:
    """End this process, if it is ours, when the block takes too long: the database or a reader of logs may hang."""
    if not is_ours:
        yield
        return
    timer = threading.Timer(max(deadline - time.monotonic(), 0.0), end_now, (FAILED, last_words))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def flush_streams() -> None:
    """Flush the standard streams, for an end that Python does not notice; the reader may be gone, or the disk full."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def ended(code: int) -> str:
    """Return in words how a process ended."""
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
