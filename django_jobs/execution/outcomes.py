"""The ways in which a run can end, as values; made by the executor and the ladder, acted on by the finisher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Ok:
    """The handler returned; `result` is its value if that is JSON."""

    result: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The handler raised or ran past its timeout, or the payload no longer fits it."""

    exception: BaseException
    # The entry for the row's history.
    error: dict[str, Any]
    # One line for the row's `error`: class and text.
    message: str
    fingerprint: str
    # Seconds until the next attempt; None for no further one.
    delay: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescheduled:
    """The handler asked to run the same row again in `delay` seconds; this costs no attempt."""

    delay: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Aborted:
    """The handler obeyed a cancel, or was given up after one; `error` is set if it raised an exception of its own."""

    error: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """A shutdown came first: the row is handed back, and the attempt does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The row no longer belongs to this run: there is nothing to write."""


Outcome = Ok | Failed | Rescheduled | Aborted | Released | Lost
