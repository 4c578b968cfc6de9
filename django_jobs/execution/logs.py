"""Capture what a handler logs, per run, without touching the project's levels, handlers or propagation.

Lines are taken in `Logger.callHandlers`, where every logger passes them on. A handler on the root logger would miss
loggers with `propagate=False`, disappear at the project's next `dictConfig`, and disable `logging.lastResort` and
`basicConfig`. A line belongs to the run in whose context it is logged: awaited code, and code that asyncio or asgiref
runs in threads, is captured; a bare `threading.Thread` is not.
"""

from __future__ import annotations

import json
import logging
import threading
import traceback
from collections import deque
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from django_jobs.conf import get_settings
from django_jobs.execution.gate import Gate
from django_jobs.text import clean_middle, clean_text

LINE_LENGTH = 2_000
TRACEBACK_LENGTH = 4_000
NAME_LENGTH = 100
# For all lines of a run, as JSON.
TOTAL_BYTES = 256 * 1024
# Characters in memory for the head and the tail each; if escaping makes their JSON longer, it is cut at the end.
_HALF = TOTAL_BYTES // 2
_EXCLUDED = ("django_jobs.", "django.db.backends")

_making = threading.Lock()
_installed = False
_pass_on = logging.Logger.callHandlers


class Capture:
    """Collects the lines of one run, in a buffer that the first line creates."""

    __slots__ = ("buffer", "gate")

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.buffer: LogBuffer | None = None

    def add(self, record: logging.LogRecord) -> None:
        """Take one line, shielded from interrupts: one that waits is raised afterwards."""
        with self.gate:
            self._opened().add(record)

    def _opened(self) -> LogBuffer:
        if self.buffer is not None:
            return self.buffer
        # Threads of one run may log their first lines at the same time.
        with _making:
            buffer = self.buffer
            if buffer is None:
                buffer = self.buffer = LogBuffer(get_settings().log_max_entries)
            return buffer

    def close(self) -> None:
        """Take no more lines."""
        if self.buffer is not None:
            self.buffer.close()


_target: ContextVar[Capture | None] = ContextVar("django_jobs_log_target", default=None)


def install() -> None:
    """Begin to take lines in this process; safe to repeat, never undone."""
    global _installed, _pass_on
    with _making:
        if not _installed:
            _pass_on = logging.Logger.callHandlers
            logging.Logger.callHandlers = _call_handlers  # type: ignore[method-assign]
            _installed = True


def direct_to(capture: Capture) -> None:
    """Send lines that are logged in this context to the capture."""
    if not _installed:
        install()
    _target.set(capture)


def _call_handlers(self: logging.Logger, record: logging.LogRecord) -> None:
    capture = _target.get()
    if capture is None or record.name == "django_jobs" or record.name.startswith(_EXCLUDED):
        _pass_on(self, record)
        return
    try:
        capture.add(record)
    finally:
        # Even if an interrupt was raised, the line is passed on.
        _pass_on(self, record)


class LogBuffer:
    """The first and the last lines of one run, within the limit whatever is logged."""

    __slots__ = (
        "_chars",
        "_closed",
        "_dropped",
        "_head",
        "_head_chars",
        "_head_limit",
        "_lock",
        "_tail",
        "_tail_limit",
    )

    def __init__(self, limit: int) -> None:
        self._head: list[tuple[float, str, str, str]] = []
        self._tail: deque[tuple[float, str, str, str]] = deque()
        self._head_limit = limit - limit // 2
        self._tail_limit = limit // 2
        # Characters in the part that is being filled: the head, then the tail.
        self._chars = 0
        self._head_chars = 0
        self._dropped = 0
        self._closed = False
        self._lock = threading.Lock()

    def add(self, record: logging.LogRecord) -> None:
        """Take one line; never raises."""
        line = (record.created, record.levelname, record.name, _text(record))
        size = len(line[3])
        with self._lock:
            if self._closed:
                return
            if not self._tail and not self._dropped:
                if len(self._head) < self._head_limit and self._chars + size <= _HALF:
                    self._head.append(line)
                    self._chars += size
                    return
                self._head_chars, self._chars = self._chars, 0
            self._tail.append(line)
            self._chars += size
            while len(self._tail) > self._tail_limit or self._chars > _HALF:
                self._chars -= len(self._tail.popleft()[3])
                self._dropped += 1

    @property
    def size(self) -> int:
        """How many characters it holds."""
        return self._head_chars + self._chars

    def close(self) -> None:
        """Take no more lines: the run has ended, even if something still logs in its context."""
        with self._lock:
            self._closed = True

    def entries(self) -> list[dict[str, Any]]:
        """Return the lines as they are stored, oldest first, with a marker where lines are missing."""
        with self._lock:
            head = [_entry(line) for line in self._head]
            tail = deque(_entry(line) for line in self._tail)
            dropped = self._dropped
        sizes = {id(entry): len(json.dumps(entry)) + 2 for entry in (*head, *tail)}
        total = sum(sizes.values())
        while total > TOTAL_BYTES - LINE_LENGTH:
            total -= sizes[id(tail.popleft() if len(tail) >= len(head) else head.pop())]
            dropped += 1
        return [*head, *([_marker(dropped, head)] if dropped else []), *tail]


def _marker(dropped: int, head: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "time": head[-1]["time"] if head else "",
        "level": "",
        "logger": "django_jobs",
        "message": f"… {dropped} {'line' if dropped == 1 else 'lines'} dropped …",
        "dropped": dropped,
    }


def _entry(line: tuple[float, str, str, str]) -> dict[str, Any]:
    created, level, name, message = line
    return {
        "time": datetime.fromtimestamp(created, UTC).isoformat(timespec="milliseconds"),
        "level": clean_text(level, NAME_LENGTH),
        "logger": clean_text(name, NAME_LENGTH),
        "message": message,
    }


def _text(record: logging.LogRecord) -> str:
    try:
        message: object = record.getMessage()
    except BaseException:  # noqa: BLE001 - arguments that do not fit are the project's fault, and no reason to fail the job
        message = f"{clean_text(record.msg, LINE_LENGTH // 2)} <its arguments do not fit>"
    text = clean_text(message, LINE_LENGTH)
    if record.exc_info and record.exc_info[0] is not None:
        try:
            formatted = "".join(traceback.format_exception(*record.exc_info))
        except BaseException:  # noqa: BLE001 - as above
            formatted = f"{record.exc_info[0].__qualname__} <its traceback cannot be shown>"
        text = f"{text}\n{clean_middle(formatted.rstrip(), TRACEBACK_LENGTH)}"
    if record.stack_info:
        text = f"{text}\n{clean_middle(record.stack_info, TRACEBACK_LENGTH)}"
    return text
