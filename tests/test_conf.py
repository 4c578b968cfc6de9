"""The settings: what holds when nothing is said, and what is refused, with which words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from datetime import timedelta
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings

from django_jobs import conf
from django_jobs.conf import DEFAULTS, DispatcherSpec, Settings, get_settings, problems, seconds
from django_jobs.retries import Retry

PLAIN: dict[str, Any] = {
    "dispatcher": DispatcherSpec(backend="django_jobs.dispatchers.database.DatabaseDispatcher"),
    "queues": None,
    "concurrency": 10,
    "poll_interval": 1.0,
    "heartbeat_interval": 10.0,
    "worker_lost_after": 45.0,
    "sweep_cron": "* * * * *",
    "trim_cron": "0 * * * *",
    "stale_threshold": 300.0,
    "direct_concurrency": 4,
    "record": "all",
    "keep_ok": 10,
    "keep_error": 1000,
    "keep_cancelled": 1000,
    "keep_max_age": None,
    "default_retry": None,
    "timeout": None,
    "interrupt_grace": 5.0,
    "drain_timeout": 20.0,
    "log_max_entries": 100,
    "middleware": (),
    "payload_max_bytes": 262144,
    "cron_secret": None,
}

DURATIONS = ["POLL_INTERVAL", "HEARTBEAT_INTERVAL", "WORKER_LOST_AFTER", "STALE_THRESHOLD"]
DURATIONS_OR_ZERO = ["INTERRUPT_GRACE", "DRAIN_TIMEOUT", "TIMEOUT"]
COUNTS = ["CONCURRENCY", "DIRECT_CONCURRENCY", "LOG_MAX_ENTRIES", "PAYLOAD_MAX_BYTES"]
TEXTS = ["SWEEP_CRON", "TRIM_CRON"]


def read(**raw: Any) -> Settings:
    with override_settings(DJANGO_JOBS=raw):
        return get_settings()


def test_every_setting_has_the_documented_default() -> None:
    found = read()
    assert {name: getattr(found, name) for name in PLAIN} == PLAIN
    names = {field.name for field in fields(Settings)}
    assert names == set(PLAIN) | {"time_zone", "use_tz", "debug"}


def test_the_settings_may_be_absent(settings: Any) -> None:
    del settings.DJANGO_JOBS
    assert get_settings().concurrency == 10


@pytest.mark.parametrize("key", DEFAULTS)
def test_each_default_may_be_written_out(key: str) -> None:
    assert problems({key: DEFAULTS[key]}) == []
    assert read(**{key: DEFAULTS[key]}) == read()


GOOD: list[tuple[dict[str, Any], str, Any]] = [
    ({"DISPATCHER": "shop.jobs.Own"}, "dispatcher", DispatcherSpec(backend="shop.jobs.Own")),
    (
        {"DISPATCHER": {"BACKEND": "shop.jobs.Own", "OPTIONS": {"a": 1}}},
        "dispatcher",
        DispatcherSpec(backend="shop.jobs.Own", options={"a": 1}),
    ),
    ({"DISPATCHER": {"BACKEND": "database"}}, "dispatcher", PLAIN["dispatcher"]),
    ({"QUEUES": ["mail", "default"]}, "queues", ("mail", "default")),
    ({"CONCURRENCY": 1}, "concurrency", 1),
    ({"POLL_INTERVAL": 0.25}, "poll_interval", 0.25),
    ({"POLL_INTERVAL": timedelta(milliseconds=250)}, "poll_interval", 0.25),
    ({"TIMEOUT": 60}, "timeout", 60.0),
    ({"TIMEOUT": 0}, "timeout", None),
    ({"INTERRUPT_GRACE": 0}, "interrupt_grace", 0.0),
    ({"DRAIN_TIMEOUT": 0}, "drain_timeout", 0.0),
    ({"RECORD": "error"}, "record", "error"),
    ({"KEEP": {"ok": None}}, "keep_ok", None),
    ({"KEEP": {"ok": 3}}, "keep_error", 1000),
    ({"KEEP": {"error": 0}}, "keep_error", 0),
    ({"KEEP": {"max_age": timedelta(days=7)}}, "keep_max_age", 604800.0),
    ({"DEFAULT_RETRY": 3}, "default_retry", 3),
    ({"DEFAULT_RETRY": 0}, "default_retry", 0),
    ({"MIDDLEWARE": ["shop.jobs.traced", len]}, "middleware", ("shop.jobs.traced", len)),
    ({"CRON_SECRET": "s3cret"}, "cron_secret", "s3cret"),
]


@pytest.mark.parametrize(("raw", "name", "value"), GOOD, ids=lambda part: repr(part) if isinstance(part, dict) else "")
def test_a_good_value_is_read(raw: dict[str, Any], name: str, value: Any) -> None:
    assert getattr(read(**raw), name) == value


def test_a_retry_is_taken_as_it_is() -> None:
    retry = Retry(5)
    assert read(DEFAULT_RETRY=retry).default_retry is retry


BAD: list[tuple[dict[str, Any], str]] = [
    *(
        ({key: value}, f"{key} is {value!r}; expected a timedelta or a number of seconds")
        for key in [*DURATIONS, *DURATIONS_OR_ZERO]
        for value in ("60", True, [1])
    ),
    *(
        ({key: value}, f"{key} is {value!r}; expected between 0 seconds and ten years")
        for key in [*DURATIONS, *DURATIONS_OR_ZERO]
        for value in (-1, float("nan"), float("inf"), 10**9, 10**400)
    ),
    *(({key: 0}, f"{key} is 0; expected more than 0 seconds") for key in DURATIONS),
    *(({"CRON_SECRET": value}, "CRON_SECRET is blank; expected None or a non-empty string") for value in ("", " ")),
    ({"CRON_SECRET": 5}, "CRON_SECRET is of type int; expected None or a non-empty string"),
    *(({key: None}, f"{key} is None; expected a timedelta") for key in [*DURATIONS, "INTERRUPT_GRACE"]),
    *(
        ({key: value}, f"{key} is {value!r}; expected a whole number from 1 to 2147483647")
        for key in COUNTS
        for value in (0, -1, 1.5, "10", True, None, 2**31)
    ),
    *(({key: value}, f"{key} is {value!r}; expected a non-empty string") for key in TEXTS for value in ("", " ", 5)),
    ({"SWEEP_CRON": None}, "SWEEP_CRON is None; expected a non-empty string"),
    ({"DISPATCHER": "redsi"}, "DISPATCHER is 'redsi'; did you mean 'redis'?"),
    ({"DISPATCHER": "rabbit"}, "DISPATCHER is 'rabbit'; expected one of database"),
    ({"DISPATCHER": 5}, "DISPATCHER is 5; expected a name, a dotted path"),
    ({"DISPATCHER": None}, "DISPATCHER is None; expected a name, a dotted path"),
    ({"DISPATCHER": {"OPTIONS": {}}}, "expected a name, a dotted path"),
    ({"DISPATCHER": {"BACKEND": "database", "OPTION": {}}}, "expected a name, a dotted path"),
    ({"DISPATCHER": {"BACKEND": "database", "OPTIONS": 5}}, 'DISPATCHER["OPTIONS"] is 5; expected a dict'),
    ({"DISPATCHER": {"BACKEND": 5}}, "DISPATCHER is 5; expected a non-empty string"),
    ({"QUEUES": "mail"}, "QUEUES is 'mail'; expected None for any queue, or a list"),
    ({"QUEUES": []}, "QUEUES is []; expected None for any queue, or a list"),
    ({"QUEUES": [5]}, "QUEUES is 5; expected a non-empty string"),
    ({"RECORD": "errors"}, 'RECORD is \'errors\'; expected "all", "error" or "none"'),
    ({"RECORD": []}, "RECORD is []; expected"),
    ({"KEEP": 5}, "KEEP is 5; expected a dict"),
    ({"KEEP": {"okay": 5}}, "KEEP has 'okay'; expected ok, error, cancelled, max_age"),
    ({"KEEP": {"ok": -1}}, "KEEP['ok'] is -1; expected a whole number from 0 to 2147483647"),
    ({"KEEP": {"ok": 10**30}}, "expected a whole number from 0 to 2147483647"),
    ({"KEEP": {"error": True}}, "KEEP['error'] is True; expected"),
    ({"KEEP": {"cancelled": "5"}}, "KEEP['cancelled'] is '5'; expected"),
    ({"KEEP": {"max_age": 0}}, "KEEP['max_age'] is 0; expected more than 0 seconds"),
    ({"KEEP": {"max_age": "week"}}, "KEEP['max_age'] is 'week'; expected a timedelta"),
    *(
        ({"DEFAULT_RETRY": value}, f"DEFAULT_RETRY is {value!r}; expected None, a number of retries, or Retry(")
        for value in (-1, "3", True, 1.5)
    ),
    ({"MIDDLEWARE": "shop.jobs.traced"}, "MIDDLEWARE is 'shop.jobs.traced'; expected a list"),
    ({"MIDDLEWARE": [5]}, "MIDDLEWARE is [5]; expected a list of callables or dotted paths"),
]


@pytest.mark.parametrize(("raw", "words"), BAD, ids=lambda part: repr(part)[:60] if isinstance(part, dict) else "")
def test_a_bad_value_is_refused_with_the_key_what_was_found_and_what_was_expected(
    raw: dict[str, Any], words: str
) -> None:
    """Wrong durations and names are accepted, and lead to endless duplicate runs. (Koed00/django-q PR#509)"""
    with pytest.raises(ImproperlyConfigured) as caught:
        read(**raw)
    assert words in str(caught.value)
    assert problems(raw) == [str(caught.value)]


def test_every_key_has_a_bad_value_here() -> None:
    assert {key for raw, _ in BAD for key in raw} == set(DEFAULTS)


def test_every_problem_is_told_at_once() -> None:
    with pytest.raises(ImproperlyConfigured) as caught:
        read(CONCURRENCY=0, POLL_INTERVAL=0, RECORD="some")
    assert [line.split(" is ")[0] for line in str(caught.value).splitlines()] == [
        "DJANGO_JOBS: CONCURRENCY",
        "DJANGO_JOBS: POLL_INTERVAL",
        "DJANGO_JOBS: RECORD",
    ]


@pytest.mark.parametrize(
    ("key", "mend"),
    [
        ("CONCURENCY", "did you mean CONCURRENCY?"),
        ("queue", "did you mean QUEUES?"),
        ("heartbeat_interval", "did you mean HEARTBEAT_INTERVAL?"),
        ("XYZ", "expected one of DISPATCHER, QUEUES, "),
        (5, "expected one of DISPATCHER, QUEUES, "),
    ],
)
def test_an_unknown_key_is_refused_with_a_suggestion(key: Any, mend: str) -> None:
    (problem,) = problems({key: 1})
    assert problem.startswith(f"DJANGO_JOBS has an unknown key {key!r}; {mend}")


@pytest.mark.parametrize("raw", [None, [], "database", 5])
def test_settings_that_are_no_dict_are_refused(raw: Any) -> None:
    assert problems(raw) == [f"DJANGO_JOBS is {raw!r}; expected a dict."]
    with override_settings(DJANGO_JOBS=raw), pytest.raises(ImproperlyConfigured, match="expected a dict"):
        get_settings()


@pytest.mark.parametrize(("beat", "lost", "wrong"), [(10, 20, False), (10, 19.9, True), (60, 45, True)])
def test_a_worker_may_miss_a_beat_before_it_is_lost(beat: float, lost: float, wrong: bool) -> None:
    found = problems({"HEARTBEAT_INTERVAL": beat, "WORKER_LOST_AFTER": lost})
    assert [
        text.startswith(f"DJANGO_JOBS: WORKER_LOST_AFTER is {lost!r}; expected at least twice") for text in found
    ] == ([True] if wrong else [])


def test_the_view_follows_the_settings_in_force() -> None:
    before = get_settings()
    with override_settings(DJANGO_JOBS={"CONCURRENCY": 3}):
        assert get_settings().concurrency == 3
        with override_settings(TIME_ZONE="Europe/Paris", USE_TZ=False, DEBUG=True):
            found = get_settings()
            assert (found.time_zone, found.use_tz, found.debug, found.concurrency) == ("Europe/Paris", False, True, 3)
        assert get_settings().time_zone != "Europe/Paris"
    assert get_settings() == before


def test_the_view_is_made_once_and_cannot_be_changed() -> None:
    found = get_settings()
    assert get_settings() is found
    with pytest.raises(FrozenInstanceError):
        found.concurrency = 5  # type: ignore[misc]


def test_a_wrong_setting_is_told_again_until_it_is_mended() -> None:
    for _ in range(2):
        with pytest.raises(ImproperlyConfigured):
            read(CONCURRENCY=0)
    assert read(CONCURRENCY=1).concurrency == 1


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, 0.0), (1, 1.0), (0.5, 0.5), (timedelta(minutes=2), 120.0), (conf.MAX_SECONDS, conf.MAX_SECONDS)],
)
def test_a_duration_is_a_timedelta_or_seconds(value: Any, expected: float) -> None:
    found = seconds(value, what="delay")
    assert (found, type(found)) == (expected, float)


@pytest.mark.parametrize(
    "value",
    [
        True,
        None,
        "5",
        b"5",
        [5],
        1j,
        -1,
        -0.001,
        float("nan"),
        float("inf"),
        float("-inf"),
        10**400,
        conf.MAX_SECONDS + 1,
        timedelta(seconds=-1),
        timedelta.max,
    ],
    ids=lambda value: repr(value)[:20],
)
def test_what_is_no_duration_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^delay is .*; expected "):
        seconds(value, what="delay")


CHECKED: dict[str, Callable[[str, Any], Any]] = conf._CHECKS


def test_every_default_has_its_check() -> None:
    assert set(CHECKED) == set(DEFAULTS)
