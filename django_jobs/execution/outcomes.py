"""How a run can end, as one value; made by the executor and the interrupter, acted on by the finisher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Ok:
    """The handler returned; `result` is its value where that is JSON."""

    result: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The handler raised, ran past its timeout, or its payload does not fit it any more."""

    exception: BaseException
    # The entry for the row's history.
    error: dict[str, Any]
    # One line for the row's `error`: class and text.
    message: str
    fingerprint: str
    # Seconds until the next try; None: no further try.
    delay: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescheduled:
    """The handler asked to run the same row again in `delay` seconds; costs no attempt."""

    delay: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Aborted:
    """The handler obeyed a cancel, or was given up after one; `error` tells what it raised, if that was its own."""

    error: dict[str, Any] | None = None
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """Shutdown came first: the row goes back, the attempt is not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The row is not this run's any more: there is nothing to write."""


Outcome = Ok | Failed | Rescheduled | Aborted | Released | Lost
