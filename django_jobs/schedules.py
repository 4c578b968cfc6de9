"""Cron expressions and the instants they mean in a time zone; for the definition, the scheduler and the admin."""

from __future__ import annotations

import re
from copy import copy
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, tzinfo
from functools import cache, lru_cache
from typing import Any, Literal
from zoneinfo import ZoneInfo

from croniter import CroniterError, croniter

from django_jobs.conf import get_settings
from django_jobs.exceptions import DefinitionError

SECOND = timedelta(seconds=1)
DAY = timedelta(days=1)
# A fixed day, so that whether an expression is valid does not depend on the day of the deploy.
SOME_DAY = datetime(2024, 1, 1)  # noqa: DTZ001 - wall time has no zone
# The sizes of minute, hour, day of month, month, day of week and second; a wider step never takes effect.
SIZES = (60, 24, 31, 12, 7, 60)
LONGEST = 200
HASHED = re.compile(r"(?i)(^|[\s,])[hr](?=[\s,/(]|$)")
GRAMMAR = "five fields, or six with seconds last (minute hour day month weekday [second])"


@dataclass(frozen=True, slots=True)
class Cron:
    """A cron expression in a time zone (None: the project's TIME_ZONE, which is read when it is needed).

    An expression whose hour field covers all 24 hours counts in real time. Any other counts by the wall clock: a time
    that the clock shows twice counts once, at its first pass; one that the clock skips counts at the jump; several that
    fall on one instant count once. With both a day of month and a day of week, either is enough, as in croniter.
    """

    expression: str
    zone: str | tzinfo | None = None
    _every_hour: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raise DefinitionError for an invalid expression or time zone."""
        expression = parse(self.expression)
        values = _read(expression).expanded
        put = object.__setattr__
        put(self, "expression", expression)
        put(self, "zone", zone_name(self.zone))
        put(self, "_every_hour", "*" in values[1] or len(values[1]) == 24)

    def __str__(self) -> str:
        return f"{self.expression} {self.effective_zone}"

    @property
    def effective_zone(self) -> str:
        """The name of the effective time zone."""
        return str(self.zone) if self.zone else get_settings().time_zone

    @property
    def tz(self) -> ZoneInfo:
        """The effective time zone."""
        return ZoneInfo(self.effective_zone)

    def next_after(self, instant: datetime) -> datetime:
        """Return the first tick strictly after an aware instant, in UTC."""
        start = instant.astimezone(UTC).replace(microsecond=0)
        return self._next_real(start) if self._every_hour else self._next_wall(start)

    def previous_before(self, instant: datetime) -> datetime:
        """Return the last tick strictly before an aware instant, in UTC."""
        end = instant.astimezone(UTC)
        # The last of these is longer than any gap: an expression that has a tick at all has one within 50 years.
        for gap in (SECOND * 61, SECOND * 3600, DAY, 32 * DAY, 367 * DAY, 9 * 366 * DAY, 50 * 366 * DAY):
            low = end - gap
            if self.next_after(low) < end:
                break
        # Find the last second that a tick still follows before the end: the wanted tick is one second later.
        high = end
        while high - low > SECOND:
            middle = low + (high - low) / 2
            low, high = (middle, high) if self.next_after(middle) < end else (low, middle)
        return self.next_after(low)

    def between(self, after: datetime, until: datetime, limit: int) -> list[datetime]:
        """Return at most `limit` ticks in (after, until], oldest first."""
        ticks: list[datetime] = []
        tick = self.next_after(after)
        while tick <= until and len(ticks) < limit:
            ticks.append(tick)
            tick = self.next_after(tick)
        return ticks

    def _next_real(self, start: datetime) -> datetime:
        zone = self.tz
        while True:
            offset = _offset(start, zone)
            found = _following(self.expression, _wall(start, offset)).replace(tzinfo=UTC) - offset
            change = _first_change(start, found, zone)
            if change is None:
                return found
            # The clock changes before that: look again from the change, that instant included.
            start = change - SECOND
            found = _following(self.expression, _wall(start, _offset(change, zone))).replace(tzinfo=UTC)
            found -= _offset(change, zone)
            if found == change:
                return found
            start = change

    def _next_wall(self, start: datetime) -> datetime:
        zone = self.tz
        local = start.astimezone(zone)
        wall = local.replace(tzinfo=None, fold=0)
        if local.fold:
            # Second pass: every time up to the end of the repeated hour has had its turn.
            back = _offset_of(wall, zone, 0) - _offset_of(wall, zone, 1)
            change = _first_change(start - back, start, zone)
            if change is not None:
                wall = _wall(change, _offset(change, zone)) + back - SECOND
        while True:
            wall = _following(self.expression, wall)
            instant = _instant(wall, zone)
            if instant > start:
                return instant


def configured(key: Literal["SWEEP_CRON", "TRIM_CRON"]) -> Cron:
    """Return the schedule of a key in DJANGO_JOBS; raise DefinitionError, naming the key, if it is invalid."""
    settings = get_settings()
    expression = settings.sweep_cron if key == "SWEEP_CRON" else settings.trim_cron
    try:
        return _cron(expression)
    except DefinitionError as error:
        raise DefinitionError(f"DJANGO_JOBS: {key} is {expression!r}: {error}") from error


def parse(expression: Any) -> str:
    """Return the expression with single spaces; raise DefinitionError if it is not a valid schedule."""
    if not isinstance(expression, str) or not expression.strip():
        raise DefinitionError(f"cron={expression!r} is not a cron expression; expected {GRAMMAR}.")
    text = " ".join(expression.split())
    wrong = f"cron={text[:LONGEST]!r}"
    if len(text) > LONGEST or re.search(r"\d{5}", text):
        raise DefinitionError(f"{wrong} is far too wide; expected {GRAMMAR}, each within its range.")
    if text.startswith("@"):
        if text == "@reboot":
            raise DefinitionError(f"{wrong} does not name a time; call a management command where the process starts.")
    elif len(text.split(" ")) not in {5, 6}:
        raise DefinitionError(f"{wrong} has {len(text.split(' '))} fields; expected {GRAMMAR}.")
    if HASHED.search(text):
        raise DefinitionError(f"{wrong} has a hashed or random field; write the minute or hour itself.")
    for part, size in zip(text.split(" "), SIZES, strict=False):
        for step in re.findall(r"/(\d+)", part):
            if int(step) >= size:
                raise DefinitionError(f"{wrong} steps by {step} in a field of {size}, so it never steps; list values.")
    try:
        _following(text, SOME_DAY)
    except (CroniterError, TypeError, ValueError, OverflowError, IndexError, KeyError) as error:
        raise DefinitionError(f"{wrong} never occurs or cannot be parsed ({error}); expected {GRAMMAR}.") from error
    return text


def zone_name(zone: Any) -> str | None:
    """Return the name of a time zone given as a name or a tzinfo; raise DefinitionError if it is unknown."""
    if zone is None:
        return None
    name = zone.key if isinstance(zone, ZoneInfo) else "UTC" if zone is UTC else zone
    if isinstance(name, str) and name:
        try:
            return ZoneInfo(name).key
        except (ValueError, OSError, LookupError):
            pass
    raise DefinitionError(f'timezone={zone!r} is not known; expected a name such as "Europe/Paris", or a ZoneInfo.')


@lru_cache(maxsize=16)
def _cron(expression: str) -> Cron:
    return Cron(expression)


@cache
def _read(expression: str) -> croniter:
    return croniter(expression, SOME_DAY)


def _following(expression: str, wall: datetime) -> datetime:
    # Parsing costs more than all the rest, so it is cached; get_next() changes the object, so each call gets a copy.
    found: datetime = copy(_read(expression)).get_next(datetime, start_time=wall)
    return found


def _wall(instant: datetime, offset: timedelta) -> datetime:
    return instant.replace(tzinfo=None) + offset


def _offset(instant: datetime, zone: tzinfo) -> timedelta:
    return instant.astimezone(zone).utcoffset() or timedelta()


def _offset_of(wall: datetime, zone: tzinfo, fold: int) -> timedelta:
    return wall.replace(tzinfo=zone, fold=fold).utcoffset() or timedelta()


def _instant(wall: datetime, zone: tzinfo) -> datetime:
    """Return the instant of a wall time: its first pass, or the jump of the clock that skipped it."""
    before, after = _offset_of(wall, zone, 0), _offset_of(wall, zone, 1)
    instant = wall.replace(tzinfo=UTC) - before
    if before >= after:
        return instant
    # Skipped (the folds have swapped offsets): the jump is between the two readings.
    return _first_change(wall.replace(tzinfo=UTC) - after, instant, zone) or instant


def _first_change(start: datetime, end: datetime, zone: tzinfo) -> datetime | None:
    """Return the first instant in (start, end] at which the zone changes its offset, to the second, or None."""
    offset, low = _offset(start, zone), start
    while low < end:
        # Changes of a zone are at least days apart.
        high = min(low + DAY, end)
        if _offset(high, zone) != offset:
            while high - low > SECOND:
                middle = low + timedelta(seconds=(high - low) // SECOND // 2)
                low, high = (middle, high) if _offset(middle, zone) == offset else (low, middle)
            return high
        low = high
    return None
