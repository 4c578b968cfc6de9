"""The database's clock, so that all machines agree on the time; everything that needs `now` asks here."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from django.db import connections

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# Seconds, by both clocks: the monotonic one may stand still while a host sleeps, the wall clock can be set.
MAX_AGE = 60.0
# Seconds. A smaller step back is put down to the round trip, which varies under load, not to the clock.
JITTER = 1.0

_QUERIES = {
    "postgresql": "SELECT extract(epoch FROM clock_timestamp())::float8",
    "mysql": "SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01 00:00:00', UTC_TIMESTAMP(6)) / 1e6",
}


@dataclass(frozen=True, slots=True)
class _Reading:
    offset: float  # database epoch seconds minus time.monotonic()
    monotonic: float
    wall: float
    # Database epoch seconds that were returned already: time stands still until it gets there again.
    floor: float = 0.0

    def at(self, moment: float) -> float:
        """Return the database epoch seconds of an instant of time.monotonic()."""
        return max(moment + self.offset, self.floor)


_readings: dict[str, _Reading] = {}
# Held while time is told by a reading, so that none is told by the old one once a new one knows what was told.
_lock = threading.Lock()
if hasattr(os, "register_at_fork"):
    # Another thread of the parent may have held it.
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def refresh(using: str) -> None:
    """Measure the offset of the database clock to this process's monotonic clock; one short query.

    The middle of the round trip counts as the moment of the answer. The time in this process never goes back because of
    it, or a run could end before it began. SQLite has no server, so the host's clock is read.
    """
    connection = connections[using]
    query = _QUERIES.get(connection.vendor)
    if query is None:
        return
    before = time.monotonic()
    with connection.cursor() as cursor:
        cursor.execute(query)
        epoch = float(cursor.fetchone()[0])
    after = time.monotonic()
    offset = epoch - (before + after) / 2
    with _lock:
        moment, old = time.monotonic(), _readings.get(using)
        told = 0.0 if old is None else old.at(moment)
        floor = told if 0 < told - (moment + offset) < JITTER else 0.0
        _readings[using] = _Reading(offset, after, time.time(), floor)


def now(using: str) -> datetime:
    """Return the database's time as an aware datetime in UTC; queries it if the last answer is over 60 s old."""
    if connections[using].vendor not in _QUERIES:
        return datetime.now(UTC)
    reading = _readings.get(using)
    if reading is None or time.monotonic() - reading.monotonic > MAX_AGE or abs(time.time() - reading.wall) > MAX_AGE:
        refresh(using)
    with _lock:
        seconds = _readings[using].at(time.monotonic())
    return EPOCH + timedelta(seconds=seconds)


def is_within(span: timedelta, at: datetime | None, now: datetime) -> bool:
    """Whether something happened less than `span` ago; a clock that was set back since then makes that unknown: no."""
    return at is not None and timedelta() <= now - at < span
