"""Standard streams that a command can count on, however its process was started; for the commands that are ours."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

MODES = {"stdin": "r", "stdout": "w", "stderr": "w"}


def open_closed() -> None:
    """Have the standard streams that were closed by whoever started this process lead nowhere."""
    missing = [name for name in MODES if getattr(sys, name) is None]
    if not missing:
        return
    # Their numbers are taken first: a connection that got one of them would be what libraries print into.
    while (spare := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(spare, True)  # noqa: FBT003 - Python has no name for it
    os.close(spare)
    for name in missing:
        # For as long as the process is there.
        setattr(sys, name, Path(os.devnull).open(MODES[name]))  # noqa: SIM115


def spell_out() -> None:
    r"""Have standard output write what its encoding lacks as \uXXXX, as standard error does, instead of failing."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
