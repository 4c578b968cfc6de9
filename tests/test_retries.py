from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_jobs import Backoff, DefinitionError, Retry, TimedOut

TEN_YEARS = 3650 * 86400
ERROR = ValueError("boom")


def raises(*args: Any) -> Any:
    raise RuntimeError("inside")


@pytest.mark.parametrize("attempt", [1, 29, 31, 40, 46, 47, 62, 1023, 1024, 1999, 10**9])
@pytest.mark.parametrize(
    "backoff",
    [
        Backoff(initial=1, factor=2, max=60, jitter=None),
        Backoff(initial=timedelta(days=1), factor=10, max=timedelta(days=3), jitter=None),
        Backoff(initial=1, factor=1.0001, max=1e8, jitter=None),
        Backoff(initial=5e-324, factor=1e300, max=60, jitter=None),
    ],
)
def test_no_attempt_makes_a_backoff_overflow(backoff: Backoff, attempt: int) -> None:
    """Computed before it was capped, the wait overflowed and the job vanished (procrastinate#1462, threadmill#47)."""
    wait = backoff.delay(attempt)
    assert 0 < wait <= float(backoff.max)  # type: ignore[arg-type]
    assert timedelta(seconds=wait) <= timedelta(seconds=float(backoff.max))  # type: ignore[arg-type]


def test_waits_grow_by_the_factor_up_to_the_maximum() -> None:
    backoff = Backoff(initial=1, factor=2, max=60, jitter=None)
    assert [backoff.delay(attempt) for attempt in range(1, 9)] == [1, 2, 4, 8, 16, 32, 60, 60]


@pytest.mark.medium
@given(
    initial=st.floats(0, 1e6),
    factor=st.floats(1, 1e300),
    maximum=st.floats(0, 1e7),
    attempt=st.integers(0, 10**6),
)
def test_waits_never_shrink_from_one_attempt_to_the_next(
    initial: float, factor: float, maximum: float, attempt: int
) -> None:
    backoff = Backoff(initial=initial, factor=factor, max=maximum, jitter=None)
    assert 0 <= backoff.delay(attempt) <= backoff.delay(attempt + 1) <= maximum


def test_full_jitter_spreads_the_wait_below_its_plain_value() -> None:
    waits = [Backoff(initial=100, max=1000).delay(2) for _ in range(200)]
    assert all(0 <= wait <= 200 for wait in waits)
    assert max(waits) - min(waits) > 50


def test_an_initial_wait_above_the_maximum_is_the_maximum() -> None:
    assert Backoff(initial=100, max=10, jitter=None).delay(1) == 10


@pytest.mark.parametrize(
    ("backoff", "waits"),
    [
        (7, [7, 7, 7]),
        (timedelta(minutes=1), [60, 60, 60]),
        ([1, timedelta(seconds=5)], [1, 5, 5]),
        (None, [0, 0, 0]),
        (lambda attempt, exception: attempt * 10, [10, 20, 30]),
        (lambda attempt, exception: timedelta(minutes=attempt), [60, 120, 180]),
    ],
)
def test_a_backoff_is_a_duration_a_sequence_nothing_or_a_callable(backoff: Any, waits: list[float]) -> None:
    retry = Retry(5, backoff=backoff)
    assert [retry.delay(attempt, ERROR) for attempt in (1, 2, 3)] == waits


@pytest.mark.parametrize("value", [-1, timedelta.max, timedelta.min, math.inf, -math.inf, 10**400, 2**62])
def test_a_wait_out_of_range_is_brought_into_it_and_logged(value: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A callable's odd answer raised inside the error handler (procrastinate-org/procrastinate#1462)."""
    wait = Retry(1, backoff=lambda attempt, exception: value).delay(1, ERROR)
    assert 0 <= wait <= TEN_YEARS
    assert "backoff callable" in caplog.text


@pytest.mark.parametrize("backoff", [lambda a, e: None, lambda a, e: math.nan, lambda a, e: "soon", raises])
def test_a_callable_without_an_answer_falls_back_to_the_default(backoff: Any, caplog: pytest.LogCaptureFixture) -> None:
    wait = Retry(1, backoff=backoff).delay(3, ERROR)
    assert 0 <= wait <= 20
    assert "backoff callable" in caplog.text


@pytest.mark.parametrize(
    ("when", "worth_it"),
    [
        (None, True),
        (ValueError, True),
        (KeyError, False),
        ((KeyError, ValueError), True),
        ((KeyError,), False),
        (lambda exception: "boom" in str(exception), True),
        (lambda exception: False, False),
    ],
)
def test_when_says_which_exceptions_are_worth_another_run(when: Any, worth_it: bool) -> None:
    assert Retry(1, when=when).allows(ERROR) is worth_it


@pytest.mark.parametrize("when", [Exception, (ValueError, TimeoutError), TimedOut])
def test_a_timeout_is_a_failure_like_any_other_to_classes(when: Any) -> None:
    assert Retry(1, when=when).allows(TimedOut("too slow")) is True
    assert Retry(1, when=ValueError).allows(TimedOut("too slow")) is False


def test_a_when_that_raises_counts_as_no_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert Retry(1, when=raises).allows(ERROR) is False
    assert "RuntimeError: inside" in caplog.text


def test_a_number_is_short_for_a_retry() -> None:
    assert Retry.of(5) == Retry(5)
    assert Retry.of(Retry(2, backoff=1)) == Retry(2, backoff=1)
    assert Retry.of(None) is None


@pytest.mark.parametrize("retries", [-1, "3", 1.0, True, None, 10**9])
def test_what_is_no_number_of_retries_is_refused(retries: Any) -> None:
    """Contradicting and mistyped numbers were accepted and led to endless runs (Koed00/django-q#509)."""
    with pytest.raises(DefinitionError, match="retries is"):
        Retry(retries)


@pytest.mark.parametrize("backoff", ["5", -1, True, [], [1, "2"], [True], Backoff, math.nan, math.inf, object()])
def test_what_is_no_backoff_is_refused(backoff: Any) -> None:
    with pytest.raises(DefinitionError, match="backoff"):
        Retry(1, backoff=backoff)


@pytest.mark.parametrize("when", ["ValueError", 5, (), (ValueError, "x"), int, (int,)])
def test_what_is_no_condition_is_refused(when: Any) -> None:
    with pytest.raises(DefinitionError, match="when is"):
        Retry(1, when=when)


@pytest.mark.parametrize(
    "wrong",
    [
        {"initial": -1},
        {"initial": "5"},
        {"max": math.inf},
        {"max": True},
        {"factor": 0.5},
        {"factor": math.nan},
        {"factor": math.inf},
        {"factor": "2"},
        {"jitter": "half"},
        {"jitter": True},
        {"jitter": ["full"]},
    ],
)
def test_a_wrong_backoff_is_refused_and_names_the_option(wrong: dict[str, Any]) -> None:
    with pytest.raises(DefinitionError, match=next(iter(wrong))):
        Backoff(**wrong)
