"""Validation of the options of @job and using(): each function returns the value to keep or raises DefinitionError."""

from __future__ import annotations

import contextlib
import difflib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any, Literal, TypedDict
from uuid import UUID

from django.utils import timezone

from django_jobs import conf
from django_jobs.conf import RECORDS
from django_jobs.exceptions import DefinitionError
from django_jobs.retries import Retry, duration
from django_jobs.schedules import Cron
from django_jobs.text import storable as replaced

PRIORITIES = {"low": -50, "normal": 0, "high": 50, "critical": 100}
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]*")
NAME_LENGTH, QUEUE_LENGTH, KEY_LENGTH, BY_LENGTH, ORGANIZATION_LENGTH = 200, 100, 255, 255, 64
CRON_ONLY = ("timezone", "misfire", "misfire_grace", "overlap")
# The last instant that converts to and from every zone on every database.
LAST = datetime(9999, 1, 1, tzinfo=UTC)
FIRST = datetime(1971, 1, 1, tzinfo=UTC)

Middleware = Callable[[Callable[..., Any]], Callable[..., Any]]


class _Inherit:
    """The value of a Keep field that was not given: KEEP applies."""

    def __repr__(self) -> str:
        return "INHERIT"


class _Unset:
    """The value of an option of using() that was not given: the previous value stays."""

    def __repr__(self) -> str:
        return "UNSET"


INHERIT: Any = _Inherit()
UNSET: Any = _Unset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """How many finished rows of a job are kept, by status; None keeps all, 0 none, and an omitted field inherits KEEP.

    Rows older than `max_age` (a timedelta or seconds) are deleted whatever their number.
    """

    ok: int | None = INHERIT
    error: int | None = INHERIT
    cancelled: int | None = INHERIT
    max_age: timedelta | float | None = INHERIT

    def __post_init__(self) -> None:
        """Refuse values that are not counts or durations."""
        for name in ("ok", "error", "cancelled"):
            value = getattr(self, name)
            if value is not INHERIT and value is not None:
                whole(value, f"Keep({name}=…)", least=0)
        if self.max_age is not INHERIT and self.max_age is not None:
            object.__setattr__(self, "max_age", duration(self.max_age, "Keep(max_age=…)"))


class JobOptions(TypedDict, total=False):
    """The options of @job, which are checked when the decorator runs."""

    name: str | None
    aliases: Sequence[str]
    description: str | None
    cron: str | None
    timezone: str | tzinfo | None
    misfire: Literal["latest", "skip", "all"]
    misfire_grace: timedelta | float | None
    overlap: Literal["skip", "allow"]
    priority: int | str
    queue: str
    retry: Retry | int | None
    timeout: timedelta | float | None
    interrupt: bool
    concurrency: int | None
    record: Literal["all", "error", "none"] | None
    keep: Keep
    atomic: bool
    use: Sequence[Middleware | str]
    sensitive: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PushOptions:
    """The options that using() set for pushes of one copy of a job; None means the job's own."""

    key: str | None = None
    # Seconds; 0 or less is at once.
    delay: float | None = None
    # Aware, in UTC; takes precedence over delay.
    scheduled_at: datetime | None = None
    priority: int | None = None
    queue: str | None = None
    organization_id: str | None = None
    by: Any = None

    def due(self, now: datetime) -> datetime | None:
        """Return the instant at which the row is due; None for at once, also when the instant has passed."""
        due = self.scheduled_at
        if due is None and self.delay is not None:
            due = now + timedelta(seconds=self.delay)
        return due if due is not None and due > now else None


PUSH = tuple(PushOptions.__annotations__)


@contextlib.contextmanager
def naming(job_name: str) -> Iterator[None]:
    """Prefix the errors of checks inside the block with the job's name."""
    try:
        yield
    except DefinitionError as error:
        raise DefinitionError(f"{job_name}: {error}") from error


def check_known(options: dict[str, Any]) -> None:
    """Refuse options that @job does not have."""
    for name in options:
        if name == "lock":
            raise DefinitionError('lock= is not an option; write overlap="skip" (one at a time) or overlap="allow".')
        if name not in JobOptions.__annotations__:
            near = difflib.get_close_matches(name, JobOptions.__annotations__, n=1)
            mend = f"did you mean {near[0]}=?" if near else f"expected any of {', '.join(JobOptions.__annotations__)}."
            raise DefinitionError(f"{name}= is not an option of @job; {mend}")


def job_options(options: dict[str, Any], *, is_async: bool) -> dict[str, Any]:
    """Return the fields of a Job for what @job was given, except its name and description."""
    cron = options.get("cron")
    if cron is None:
        for name in CRON_ONLY:
            if name in options:
                raise DefinitionError(f"{name}= is for cron jobs; add cron=… or remove it.")
    atomic = flag(options.get("atomic", False), "atomic")
    if atomic and is_async:
        raise DefinitionError("atomic=True needs a plain function: a transaction belongs to one thread; drop `async`.")
    retry, keep, use = options.get("retry"), options.get("keep", Keep()), options.get("use", ())
    if not isinstance(keep, Keep):
        raise DefinitionError(f"keep={keep!r}; expected Keep(ok=…, error=…, cancelled=…, max_age=…).")
    if isinstance(use, str) or not isinstance(use, Sequence) or not all(isinstance(m, str) or callable(m) for m in use):
        raise DefinitionError(f"use={use!r}; expected a list of middleware: callables or dotted paths.")
    concurrency, grace, timeout = (options.get(name) for name in ("concurrency", "misfire_grace", "timeout"))
    return {
        "cron": None if cron is None else Cron(cron, options.get("timezone")),
        "misfire": one_of(options.get("misfire", "latest"), "misfire", ("latest", "skip", "all")),
        "misfire_grace": None if grace is None else duration(grace, "misfire_grace"),
        "overlap": one_of(options.get("overlap", "skip"), "overlap", ("skip", "allow")),
        "priority": priority(options.get("priority", 0)),
        "queue": queue(options.get("queue", "default")),
        "retry": Retry.of(retry),
        "timeout": None if timeout is None else duration(timeout, "timeout"),
        "interrupt": flag(options.get("interrupt", True), "interrupt"),
        "concurrency": None if concurrency is None else whole(concurrency, "concurrency", least=1),
        "record": None if options.get("record") is None else one_of(options["record"], "record", RECORDS),
        "keep": keep,
        "atomic": atomic,
        "use": tuple(use),
        "sensitive": flag(options.get("sensitive", False), "sensitive"),
    }


def name(value: Any, what: str = "name") -> str:
    """Return the name of a job or an alias."""
    if not isinstance(value, str) or len(value) > NAME_LENGTH or not NAME.fullmatch(value):
        raise DefinitionError(
            f"{what}={_short(value)}; expected at most {NAME_LENGTH} ASCII letters, digits and . _ : - "
            f"that begin with a letter, a digit or _."
        )
    return value


def aliases(value: Any) -> tuple[str, ...]:
    """Return the old names of a job."""
    if isinstance(value, str) or not isinstance(value, Sequence | set | frozenset):
        raise DefinitionError(f"aliases={value!r}; expected a list of names.")
    return tuple(dict.fromkeys(name(item, "alias") for item in value))


def queue(value: Any) -> str:
    """Return the name of a queue."""
    if not isinstance(value, str) or len(value) > QUEUE_LENGTH or not NAME.fullmatch(value):
        raise DefinitionError(
            f"queue={_short(value)}; expected at most {QUEUE_LENGTH} ASCII letters, digits and . _ : -"
        )
    return value


def priority(value: Any) -> int:
    """Return a priority as a number from -100 to 100, higher first; takes the words low, normal, high, critical."""
    if isinstance(value, str) and value in PRIORITIES:
        return PRIORITIES[value]
    if isinstance(value, bool) or not isinstance(value, int) or not -100 <= value <= 100:
        raise DefinitionError(
            f"priority={value!r}; expected a whole number from -100 to 100, higher first, or {', '.join(PRIORITIES)}."
        )
    return value


def whole(value: Any, what: str, *, least: int) -> int:
    """Return a whole number of at least `least`."""
    try:
        return conf.whole(value, what=what, least=least)
    except ValueError as error:
        raise DefinitionError(str(error)) from error


def flag(value: Any, what: str) -> bool:
    """Return True or False; refuse any other value, truthy or not."""
    if not isinstance(value, bool):
        raise DefinitionError(f"{what}={value!r}; expected True or False.")
    return value


def one_of(value: Any, what: str, choices: Sequence[str]) -> str:
    """Return one of the choices."""
    if value not in choices:
        raise DefinitionError(f"{what}={value!r}; expected {' or '.join(map(repr, choices))}.")
    return str(value)


def delay(value: Any) -> float | None:
    """Return a delay in seconds; a negative one is 0, at once."""
    number = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(number, int | float) and not isinstance(number, bool) and -math.inf < number < 0:
        return 0.0
    return None if value is None else duration(value, "delay")


def scheduled_at(value: Any) -> datetime | None:
    """Return an instant in UTC; a naive datetime is in the current time zone."""
    if value is None:
        return None
    if not isinstance(value, datetime):
        raise DefinitionError(f"scheduled_at={value!r}; expected a datetime.")
    # The year first, since the conversion to UTC overflows at both ends of the calendar.
    if value.year < FIRST.year:
        return FIRST
    if value.year < LAST.year:
        return (timezone.make_aware(value) if timezone.is_naive(value) else value).astimezone(UTC)
    raise DefinitionError(f"scheduled_at={value!r}; expected an instant before the year {LAST.year}.")


def key(value: Any) -> str | None:
    """Return a key of 1 to 255 characters, unchanged."""
    if value is None:
        return None
    if not isinstance(value, str) or not 1 <= len(value) <= KEY_LENGTH:
        raise DefinitionError(f"key={_short(value)}; expected 1 to {KEY_LENGTH} characters of text.")
    return storable(value, "key")


def organization_id(value: Any) -> str | None:
    """Return the tenant as text; None if it is empty."""
    if value is None or value == "":
        return None
    if isinstance(value, bool) or not isinstance(value, str | int | UUID) or len(str(value)) > ORGANIZATION_LENGTH:
        raise DefinitionError(
            f"organization_id={_short(value)}; expected text, a number or a UUID of at most {ORGANIZATION_LENGTH} "
            f"characters."
        )
    return storable(str(value), "organization_id")


def attribution(by: Any) -> tuple[str, str]:
    """Return the id and name to store for who did something: a user, a text or None."""
    if by is None:
        return "", ""
    if isinstance(by, str) and len(by) <= BY_LENGTH:
        return storable(by, "by"), by
    if isinstance(by, str) or not hasattr(by, "pk") or not callable(getattr(by, "get_username", None)):
        raise DefinitionError(f"by={_short(by)}; expected a user, or a text of at most {BY_LENGTH} characters.")
    # An anonymous user has no key.
    stored = "" if by.pk is None else str(by.pk)
    return storable(stored, "by")[:BY_LENGTH], storable(str(by.get_username()), "by")[:BY_LENGTH]


def push_options(before: PushOptions, given: dict[str, Any]) -> PushOptions:
    """Return `before` with the options given to using(), checked."""
    checks: dict[str, Callable[[Any], Any]] = {
        "key": key,
        "delay": delay,
        "scheduled_at": scheduled_at,
        "priority": lambda value: None if value is None else priority(value),
        "queue": lambda value: None if value is None else queue(value),
        "organization_id": organization_id,
        "by": _by,
    }
    values = {field: getattr(before, field) for field in checks}
    for field, value in given.items():
        if value is not UNSET:
            values[field] = checks[field](value)
    return PushOptions(**values)


def _by(value: Any) -> Any:
    attribution(value)
    return value


def storable(value: str, what: str) -> str:
    """Return text that every database and page can take."""
    if replaced(value) != value:
        raise DefinitionError(f"{what}={_short(value)}; expected text without NUL characters and lone surrogates.")
    return value


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:60]}… ({len(text)} characters)"
