"""The settings, `DJANGO_JOBS`, as one frozen typed view; the only module that reads django.conf.settings."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import Any

from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed

MAX_SECONDS = 3650 * 86400.0
# The largest number of an integer column; a larger one overflows as a LIMIT or OFFSET.
MOST = 2**31 - 1
DISPATCHERS = {
    "database": "django_jobs.dispatchers.database.DatabaseDispatcher",
    "redis": "django_jobs.dispatchers.redis.RedisDispatcher",
    "direct": "django_jobs.dispatchers.direct.DirectDispatcher",
    "immediate": "django_jobs.dispatchers.immediate.ImmediateDispatcher",
    "dummy": "django_jobs.dispatchers.dummy.DummyDispatcher",
}
RECORDS = ("all", "error", "none")


def seconds(value: Any, *, what: str) -> float:
    """Return a timedelta or a number of seconds as a float; raise ValueError for anything that is not a duration.

    Refuses bool, text, negative numbers, NaN, infinity and more than ten years (which overflows on some databases).
    """
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{what} is {value!r}; expected a timedelta or a number of seconds.")
    # NaN is in no range; math.isnan() would overflow on a huge int.
    if not 0 <= value <= MAX_SECONDS:
        raise ValueError(f"{what} is {value!r}; expected between 0 seconds and ten years.")
    return float(value)


def whole(value: Any, *, what: str, least: int) -> int:
    """Return a whole number from `least` to MOST; raise ValueError for anything else, bool included."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
        raise ValueError(f"{what} is {value!r}; expected a whole number from {least} to {MOST}.")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatcherSpec:
    """The dispatcher of this project: the dotted path of its class, and the options for its constructor."""

    backend: str
    options: Mapping[str, Any] = field(default_factory=dict)


def _duration(key: str, value: Any, *, zero: bool = False) -> float:
    number = seconds(value, what=key)
    if number == 0 and not zero:
        raise ValueError(f"{key} is 0; expected more than 0 seconds.")
    return number


def _positive(key: str, value: Any) -> int:
    return whole(value, what=key, least=1)


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{key} is {value!r}; expected a non-empty string.")
    return value


def _dispatcher(key: str, value: Any) -> DispatcherSpec:
    spec = {"BACKEND": value} if isinstance(value, str) else value
    if not isinstance(spec, Mapping) or "BACKEND" not in spec or set(spec) - {"BACKEND", "OPTIONS"}:
        raise ValueError(f'{key} is {value!r}; expected a name, a dotted path, or {{"BACKEND": …, "OPTIONS": {{…}}}}.')
    name, options = _text(key, spec["BACKEND"]), spec.get("OPTIONS", {})
    if not isinstance(options, Mapping):
        raise ValueError(f'{key}["OPTIONS"] is {options!r}; expected a dict.')
    if "." not in name and name not in DISPATCHERS:
        near = difflib.get_close_matches(name, DISPATCHERS, n=1)
        mend = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(DISPATCHERS)}, or a dotted path."
        raise ValueError(f"{key} is {name!r}; {mend}")
    return DispatcherSpec(backend=DISPATCHERS.get(name, name), options=dict(options))


def _queues(key: str, value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, list | tuple | set | frozenset) or not value:
        raise ValueError(f"{key} is {value!r}; expected None for any queue, or a list of queue names.")
    return tuple(_text(key, name) for name in value)


def _record(key: str, value: Any) -> str:
    if value not in RECORDS:
        raise ValueError(f'{key} is {value!r}; expected "all", "error" or "none".')
    return str(value)


def _keep(key: str, value: Any) -> tuple[int | None, int | None, int | None, float | None]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{key} is {value!r}; expected a dict with any of ok, error, cancelled, max_age.")
    given = {**DEFAULTS["KEEP"], **value}
    if unknown := set(given) - {"ok", "error", "cancelled", "max_age"}:
        raise ValueError(f"{key} has {', '.join(sorted(map(repr, unknown)))}; expected ok, error, cancelled, max_age.")
    ok, error, cancelled = (
        None if given[name] is None else whole(given[name], what=f"{key}[{name!r}]", least=0)
        for name in ("ok", "error", "cancelled")
    )
    age = given["max_age"]
    return ok, error, cancelled, None if age is None else _duration(f"{key}['max_age']", age)


def _retry(key: str, value: Any) -> Any:
    # None, a number of retries, or a Retry, whose class is in a higher layer and checks itself.
    if value is None or not isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{key} is {value!r}; expected None, a number of retries, or Retry(…).")
    return value


def _optional_duration(key: str, value: Any) -> float | None:
    # 0 is "no limit", as it is on a job.
    return None if value is None else (_duration(key, value, zero=True) or None)


def _secret(key: str, value: Any) -> str | None:
    # Not shown: a wrong value may still be most of the secret.
    if value is not None and (not isinstance(value, str) or not value.strip()):
        found = "blank" if isinstance(value, str) else f"of type {type(value).__name__}"
        raise ValueError(f"{key} is {found}; expected None or a non-empty string.")
    return value


def _middleware(key: str, value: Any) -> tuple[str | Callable[..., Any], ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) or callable(item) for item in value):
        raise ValueError(f"{key} is {value!r}; expected a list of callables or dotted paths.")
    return tuple(value)


DEFAULTS: dict[str, Any] = {
    "DISPATCHER": "database",
    "QUEUES": None,
    "CONCURRENCY": 10,
    "POLL_INTERVAL": 1,
    "HEARTBEAT_INTERVAL": 10,
    "WORKER_LOST_AFTER": 45,
    "SWEEP_CRON": "* * * * *",
    "TRIM_CRON": "0 * * * *",
    "STALE_THRESHOLD": 300,
    "DIRECT_CONCURRENCY": 4,
    "RECORD": "all",
    "KEEP": {"ok": 10, "error": 1000, "cancelled": 1000, "max_age": None},
    "DEFAULT_RETRY": None,
    "TIMEOUT": None,
    "INTERRUPT_GRACE": 5,
    "DRAIN_TIMEOUT": 20,
    "LOG_MAX_ENTRIES": 100,
    "MIDDLEWARE": [],
    "PAYLOAD_MAX_BYTES": 256 * 1024,
    "CRON_SECRET": None,
}

_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "DISPATCHER": _dispatcher,
    "QUEUES": _queues,
    "CONCURRENCY": _positive,
    "POLL_INTERVAL": _duration,
    "HEARTBEAT_INTERVAL": _duration,
    "WORKER_LOST_AFTER": _duration,
    "SWEEP_CRON": _text,
    "TRIM_CRON": _text,
    "STALE_THRESHOLD": _duration,
    "DIRECT_CONCURRENCY": _positive,
    "RECORD": _record,
    "KEEP": _keep,
    "DEFAULT_RETRY": _retry,
    "TIMEOUT": _optional_duration,
    "INTERRUPT_GRACE": lambda key, value: _duration(key, value, zero=True),
    "DRAIN_TIMEOUT": lambda key, value: _duration(key, value, zero=True),
    "LOG_MAX_ENTRIES": _positive,
    "MIDDLEWARE": _middleware,
    "PAYLOAD_MAX_BYTES": _positive,
    "CRON_SECRET": _secret,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The values of `DJANGO_JOBS`, with defaults filled in; durations are seconds, a count of None means all."""

    dispatcher: DispatcherSpec
    queues: tuple[str, ...] | None
    concurrency: int
    poll_interval: float
    heartbeat_interval: float
    worker_lost_after: float
    sweep_cron: str
    trim_cron: str
    stale_threshold: float
    direct_concurrency: int
    record: str
    keep_ok: int | None
    keep_error: int | None
    keep_cancelled: int | None
    keep_max_age: float | None
    default_retry: Any
    timeout: float | None
    interrupt_grace: float
    drain_timeout: float
    log_max_entries: int
    middleware: tuple[str | Callable[..., Any], ...]
    payload_max_bytes: int
    cron_secret: str | None = field(repr=False)
    time_zone: str
    use_tz: bool
    debug: bool


def problems(raw: Any) -> list[str]:
    """Return what is wrong with a `DJANGO_JOBS` value, one sentence each; an empty list if nothing is."""
    if not isinstance(raw, Mapping):
        return [f"DJANGO_JOBS is {raw!r}; expected a dict."]
    found = []
    for key in raw:
        if key not in DEFAULTS:
            near = difflib.get_close_matches(str(key).upper(), DEFAULTS, n=1)
            mend = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(DEFAULTS)}."
            found.append(f"DJANGO_JOBS has an unknown key {key!r}; {mend}")
    values = {**DEFAULTS, **{key: raw[key] for key in raw if key in DEFAULTS}}
    for key, value in values.items():
        try:
            _CHECKS[key](key, value)
        except ValueError as error:
            found.append(f"DJANGO_JOBS: {error}")
    if not found and seconds(values["WORKER_LOST_AFTER"], what="") < 2 * seconds(values["HEARTBEAT_INTERVAL"], what=""):
        found.append(
            f"DJANGO_JOBS: WORKER_LOST_AFTER is {values['WORKER_LOST_AFTER']!r}; expected at least twice "
            f"HEARTBEAT_INTERVAL ({values['HEARTBEAT_INTERVAL']!r}), or one late beat makes a healthy worker look dead."
        )
    return found


def raw_settings() -> Any:
    """Return `settings.DJANGO_JOBS` as it is, {} if it is absent."""
    return getattr(django_settings, "DJANGO_JOBS", {})


def alias_of_tasks(backend: str) -> str | None:
    """Return the first alias in `settings.TASKS` with this backend; None if there is none."""
    tasks = getattr(django_settings, "TASKS", None) or {}
    return next((alias for alias, params in tasks.items() if params.get("BACKEND") == backend), None)


def misspelt() -> str | None:
    """Return the name of a setting that was probably meant to be `DJANGO_JOBS`, if that is missing."""
    names = [name for name in dir(django_settings) if name.isupper()]
    near = [] if "DJANGO_JOBS" in names else difflib.get_close_matches("DJANGO_JOBS", names, n=1, cutoff=0.9)
    return near[0] if near else None


@cache
def get_settings() -> Settings:
    """Return the current settings; raise ImproperlyConfigured, naming every wrong key."""
    raw = raw_settings()
    if found := problems(raw):
        raise ImproperlyConfigured("\n".join(found))
    values = {key: _CHECKS[key](key, value) for key, value in {**DEFAULTS, **raw}.items()}
    keep = values.pop("KEEP")
    return Settings(
        **{key.lower(): value for key, value in values.items()},
        keep_ok=keep[0],
        keep_error=keep[1],
        keep_cancelled=keep[2],
        keep_max_age=keep[3],
        time_zone=django_settings.TIME_ZONE,
        use_tz=django_settings.USE_TZ,
        debug=django_settings.DEBUG,
    )


def _forget(*, setting: str, **kwargs: Any) -> None:
    if setting in {"DJANGO_JOBS", "TIME_ZONE", "USE_TZ", "DEBUG"}:
        get_settings.cache_clear()


setting_changed.connect(_forget, dispatch_uid="django_jobs.conf")
