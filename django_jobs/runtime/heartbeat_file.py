"""Keep a file fresh while the process is alive, for `runjobs --heartbeat-file` and probes that look at its age."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from django_jobs.conf import get_settings
from django_jobs.loop import Loop
from django_jobs.runtime.health import Probes
from django_jobs.runtime.options import UsageError


@contextlib.contextmanager
def heartbeat_file(probes: Probes, path: Path | None) -> Iterator[None]:
    """Touch the file at each HEARTBEAT_INTERVAL while the process is alive, remove it at the end; with None do nothing.

    Its text is the time at which it was written. Raises UsageError when it cannot be written.
    """
    if path is None:
        yield
        return
    try:
        if path.exists() and not path.is_file():
            raise FileExistsError(0, "it exists and is not a file")
        _write(path)
    except OSError as error:
        raise UsageError(f"--heartbeat-file {path} cannot be written: {error.strerror or error}.") from error

    def tick(now: datetime | None = None) -> float:
        if probes.alive().is_good:
            _touch(path)
        return get_settings().heartbeat_interval

    loop = Loop(tick, name="heartbeat file")
    loop.start()
    try:
        yield
    finally:
        loop.stop()
        loop.join(1)
        # Its folder may be gone or read-only by now, which does not make the end a failure.
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _touch(path: Path) -> None:
    """Renew the time of the file; that takes no space, so a full disk does not make the process look dead."""
    try:
        os.utime(path)
    except FileNotFoundError:
        _write(path)


def _write(path: Path) -> None:
    """Replace the file in one step, so that nobody reads half of it."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        # The host's clock, since readers compare it with the age of files there.
        draft.write_text(f"{datetime.now(UTC).isoformat(timespec='seconds')}\n")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
