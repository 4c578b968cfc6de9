"""How often and how soon a failed job runs again: Retry and Backoff, which have no state and read no settings."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta
from typing import Any

from django_jobs.conf import MAX_SECONDS, seconds
from django_jobs.exceptions import DefinitionError, TimedOut

logger = logging.getLogger(__name__)

MAX_RETRIES = 30_000
WHEN = "a callable (exception) -> bool, an exception class or a tuple of them"


def duration(value: Any, what: str) -> float:
    """Return a timedelta or number as seconds."""
    try:
        return seconds(value, what=what)
    except ValueError as error:
        raise DefinitionError(str(error)) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Exponential backoff: `initial` times `factor` per attempt, at most `max`; durations are timedeltas or seconds.

    With jitter="full" the wait is random between 0 and that, so that failures with one cause do not come back together.
    """

    initial: timedelta | float = 5
    factor: float = 2
    max: timedelta | float = 1800
    jitter: str | None = "full"

    def __post_init__(self) -> None:
        """Refuse invalid durations, factors and jitters."""
        object.__setattr__(self, "initial", duration(self.initial, "Backoff(initial=…)"))
        object.__setattr__(self, "max", duration(self.max, "Backoff(max=…)"))
        factor: Any = self.factor
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 <= factor < math.inf:
            raise DefinitionError(f"Backoff(factor={factor!r}); expected a number from 1 up.")
        # By ==: what has no hash is refused like the rest.
        if self.jitter not in (None, "full"):
            raise DefinitionError(f'Backoff(jitter={self.jitter!r}); expected "full" or None.')

    def delay(self, attempt: int) -> float:
        """Return the seconds to wait after attempt number `attempt`, counted from 1; any number is safe."""
        initial, ceiling = float(self.initial), float(self.max)  # type: ignore[arg-type]  # __post_init__ made floats
        steps = max(attempt, 1) - 1
        try:
            # As a float, which overflows: a power of ints would fill the memory.
            wait = min(initial * float(self.factor) ** steps, ceiling)
        except OverflowError:
            wait = ceiling if initial else 0.0
        return random.uniform(0, wait) if self.jitter else wait


BackoffLike = Backoff | timedelta | float | Sequence[timedelta | float] | Callable[[int, BaseException], Any] | None
WhenLike = Callable[[Any], bool] | type[BaseException] | tuple[type[BaseException], ...]


@dataclass(frozen=True, slots=True)
class Retry:
    """Run a failed job up to `retries` more times.

    `backoff` is a Backoff, one duration, a sequence of them (the last one repeats), None for at once, or a callable
    `(attempt, exception)` that returns a duration. `when` says which exceptions are worth another run: a callable,
    an exception class or a tuple of classes (to which a timeout is a TimeoutError); None means all.
    """

    retries: int
    _: KW_ONLY
    backoff: BackoffLike = field(default_factory=Backoff)
    when: WhenLike | None = None

    def __post_init__(self) -> None:
        """Refuse values that could not be used when the job fails."""
        count: Any = self.retries
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MAX_RETRIES:
            raise DefinitionError(f"retries is {count!r}; expected a whole number from 0 to {MAX_RETRIES}.")
        object.__setattr__(self, "backoff", _backoff(self.backoff))
        when = self.when
        classes = when if isinstance(when, tuple) else (when,)
        if isinstance(when, tuple | type):
            if not classes or not all(isinstance(item, type) and issubclass(item, BaseException) for item in classes):
                raise DefinitionError(f"when is {when!r}; expected {WHEN}.")
        elif when is not None and not callable(when):
            raise DefinitionError(f"when is {when!r}; expected {WHEN}.")

    @classmethod
    def of(cls, value: Any) -> Retry | None:
        """Return a Retry for a value of `retry=`: None, a number of retries, or a Retry."""
        return value if value is None or isinstance(value, cls) else cls(value)

    def allows(self, exception: BaseException) -> bool:
        """Return whether this exception is worth another run; if `when` raises, that is logged and means no."""
        when = self.when
        try:
            if when is None:
                return True
            if not isinstance(when, tuple | type):
                return bool(when(exception))
            # TimedOut is no Exception only so that a handler does not catch it: a timeout is a failure like any other.
            is_timeout = isinstance(exception, TimedOut) and issubclass(TimeoutError, when)
            return is_timeout or isinstance(exception, when)
        except BaseException:
            logger.exception("the `when` of a retry raised; the job is not retried")
            return False

    def delay(self, attempt: int, exception: BaseException) -> float:
        """Return the seconds to wait after attempt number `attempt` (from 1) failed with `exception`; never raises."""
        backoff = self.backoff
        if backoff is None:
            return 0.0
        if isinstance(backoff, Backoff):
            return backoff.delay(attempt)
        if isinstance(backoff, tuple):
            return float(backoff[min(max(attempt, 1), len(backoff)) - 1])
        return _called(backoff, attempt, exception)  # type: ignore[arg-type]  # _backoff() left nothing else


def _backoff(value: Any) -> Backoff | tuple[float, ...] | Callable[[int, BaseException], Any] | None:
    if value is None or isinstance(value, Backoff):
        return value
    if isinstance(value, Sequence) and not isinstance(value, str | bytes) and value:
        return tuple(duration(item, f"backoff[{index}]") for index, item in enumerate(value))
    if callable(value) and not isinstance(value, type):
        return value  # type: ignore[no-any-return]
    if isinstance(value, bool) or not isinstance(value, timedelta | int | float):
        raise DefinitionError(
            f"backoff is {value!r}; expected Backoff(…), a duration, a sequence of durations, None or a callable."
        )
    return (duration(value, "backoff"),)


def _called(backoff: Callable[[int, BaseException], Any], attempt: int, exception: BaseException) -> float:
    try:
        value = backoff(attempt, exception)
        wait = value.total_seconds() if isinstance(value, timedelta) else float(value)
    except BaseException:
        logger.exception("a backoff callable raised or did not return a duration; using the default backoff")
        return Backoff().delay(attempt)
    if math.isnan(wait):
        logger.warning("a backoff callable returned NaN; using the default backoff")
        return Backoff().delay(attempt)
    if not 0 <= wait <= MAX_SECONDS:
        logger.warning("a backoff callable returned %r seconds; limiting that to between 0 and ten years", wait)
    return min(max(wait, 0.0), MAX_SECONDS)
