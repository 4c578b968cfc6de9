"""Standard streams that our commands can rely on, however their process was started."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path

MODES = {"stdin": "r", "stdout": "w", "stderr": "w"}


def open_missing() -> None:
    """Open /dev/null for each standard stream that the parent process has closed."""
    missing = [name for name in MODES if getattr(sys, name) is None]
    if not missing:
        return
    # Their descriptors first: if a connection got one of them, libraries would print into it.
    while (spare := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(spare, True)  # noqa: FBT003 - Python has no name for it
    os.close(spare)
    for name in missing:
        # Open as long as the process lives.
        setattr(sys, name, Path(os.devnull).open(MODES[name]))  # noqa: SIM115


def escape_unencodable() -> None:
    r"""Have standard output write characters that its encoding lacks as \uXXXX, as standard error does."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def flush_or_discard() -> None:
    """Flush standard output and error, and discard what nobody takes.

    Otherwise Python would flush them at the very end, and turn a failure into a message and exit code 120.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
