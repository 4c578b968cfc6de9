"""Turn any exception into storable text: an entry of a row's error history, a one-line message, a fingerprint."""

from __future__ import annotations

import hashlib
import os
import sysconfig
import traceback
from functools import lru_cache
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from django_jobs.text import clean_middle, clean_text

if TYPE_CHECKING:
    from django_jobs.execution.run import Run

CLASS_LENGTH = 200
MESSAGE_LENGTH = 2_000
TRACEBACK_LENGTH = 16_000

_HERE = str(Path(__file__).parent) + os.sep
_LIBRARIES = tuple(
    {path + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib") if (path := sysconfig.get_path(name))}
)


def error_entry(run: Run, exception: BaseException, message: str, trace: str | None = None) -> dict[str, Any]:
    """Return the history entry of one failed attempt; `trace` stands in for the exception's own traceback."""
    return {
        "exception": class_name(exception),
        "message": message,
        "traceback": clean_middle(_trace(exception) if trace is None else trace, TRACEBACK_LENGTH),
        "worker": run.worker,
        "attempt": run.execution.attempt,
        "started_at": run.started_at().isoformat(),
        "failed_at": run.ended_at().isoformat(),
    }


def message_of(exception: BaseException) -> str:
    """Return the text of an exception; "<str() failed>" when str() raises."""
    return clean_text(exception, MESSAGE_LENGTH)


def summary(exception: BaseException, message: str) -> str:
    """Return the class and the text of an exception, as the list of executions shows it."""
    name = clean_text(type(exception).__qualname__.rpartition(".")[2], CLASS_LENGTH)
    return f"{name}: {message}" if message else name


def class_name(exception: BaseException) -> str:
    """Return the class with its module, as one would import it."""
    kind = type(exception)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return clean_text(name, CLASS_LENGTH)


def fingerprint(job_name: str, exception: BaseException) -> str:
    """Return a digest that is the same for the same fault: of job, class and the innermost function of user code.

    Neither the text nor line numbers are part of it: they differ from run to run and from release to release.
    """
    innermost: FrameType | None = None
    user: FrameType | None = None
    for innermost, _ in traceback.walk_tb(_own_dropped(exception.__traceback__)):
        if _is_user_code(innermost.f_code.co_filename):
            user = innermost
    frame = user or innermost
    place = "" if frame is None else f"{frame.f_globals.get('__name__')}:{frame.f_code.co_qualname}"
    text = "\n".join((job_name, class_name(exception), place))
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]


def stack_text(frame: FrameType | None) -> str:
    """Return the stack of a thread as text, without our own frames at its bottom."""
    if frame is None:
        return ""
    try:
        stack = traceback.extract_stack(frame)
    except Exception:  # noqa: BLE001 - the thread goes on while its stack is read
        return ""
    ours = [place for place, summary in enumerate(stack) if summary.filename.startswith(_HERE)]
    return "Where the handler was:\n" + "".join(traceback.format_list(stack[ours[-1] + 1 if ours else 0 :]))


def _trace(exception: BaseException) -> str:
    try:
        shown = traceback.TracebackException(
            type(exception), exception, _own_dropped(exception.__traceback__), compact=True
        )
        return "".join(shown.format())
    except BaseException:  # noqa: BLE001 - the exception's own methods, or memory, may fail
        return f"{class_name(exception)} <its traceback cannot be shown>"


def _own_dropped(trace: TracebackType | None) -> TracebackType | None:
    inner = trace
    while inner is not None and inner.tb_frame.f_code.co_filename.startswith(_HERE):
        inner = inner.tb_next
    # Unless nothing would be left, as in an exception of our own.
    return inner or trace


@lru_cache(maxsize=1024)
def _is_user_code(filename: str) -> bool:
    return not filename.startswith(("<", _HERE, *_LIBRARIES))
