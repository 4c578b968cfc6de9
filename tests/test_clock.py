"""The database's clock: asked rarely, and the same for all processes whatever their hosts say."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from django_jobs import clock

pytestmark = pytest.mark.django_db


class Host:
    """The clocks of a host, in place of the module `time`."""

    def __init__(self) -> None:
        self.steady, self.wall, self.step = 1000.0, 5000.0, 0.0

    def monotonic(self) -> float:
        self.steady += self.step
        return self.steady

    def time(self) -> float:
        return self.wall

    def passes(self, seconds: float) -> None:
        self.steady += seconds
        self.wall += seconds


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    host = Host()
    monkeypatch.setattr(clock, "time", host)
    monkeypatch.setattr(clock, "_readings", {})
    return host


@contextmanager
def asked() -> Iterator[CaptureQueriesContext]:
    with CaptureQueriesContext(connection) as queries:
        yield queries


def database_time() -> datetime:
    with connection.cursor() as cursor:
        cursor.execute(clock._QUERIES[connection.vendor])
        return clock.EPOCH + timedelta(seconds=float(cursor.fetchone()[0]))


def test_now_is_an_aware_instant_in_utc() -> None:
    found = clock.now("default")
    assert found.tzinfo is UTC
    # Servers and tests share a host here, or hosts whose clocks are set: hours apart would be a wrong time zone.
    assert abs(found - datetime.now(UTC)) < timedelta(minutes=5)


@pytest.mark.sqlite
def test_sqlite_has_its_hosts_clock_and_is_not_asked() -> None:
    with asked() as queries:
        before, found, after = datetime.now(UTC), clock.now("default"), datetime.now(UTC)
        clock.refresh("default")
    assert before <= found <= after
    assert len(queries) == 0


@pytest.mark.postgres
@pytest.mark.mysql
def test_now_is_the_databases_time_however_wrong_the_host_is(host: Host) -> None:
    before = database_time()
    found = clock.now("default")
    after = database_time()
    # The host says it is 1970.
    assert before - timedelta(seconds=1) <= found <= after + timedelta(seconds=1)


@pytest.mark.postgres
@pytest.mark.mysql
def test_the_database_is_asked_once_and_time_goes_on_by_the_steady_clock(host: Host) -> None:
    first = clock.now("default")
    host.passes(30)
    with asked() as queries:
        assert clock.now("default") - first == timedelta(seconds=30)
    assert len(queries) == 0


@pytest.mark.postgres
@pytest.mark.mysql
@pytest.mark.parametrize(
    ("steady", "wall", "again"),
    [
        pytest.param(60, 60, False, id="a minute"),
        pytest.param(61, 61, True, id="more than a minute"),
        pytest.param(1, 3600, True, id="the host slept"),
        pytest.param(1, -3600, True, id="the clock was set back"),
    ],
)
def test_it_is_asked_again_when_the_answer_is_old_by_either_clock(
    steady: float, wall: float, again: bool, host: Host
) -> None:
    clock.now("default")
    host.steady += steady
    host.wall += wall
    with asked() as queries:
        clock.now("default")
    assert len(queries) == int(again)


@pytest.mark.postgres
@pytest.mark.mysql
def test_a_refresh_asks_at_once(host: Host) -> None:
    clock.now("default")
    with asked() as queries:
        clock.refresh("default")
    assert len(queries) == 1


@pytest.mark.postgres
@pytest.mark.mysql
def test_the_answer_is_taken_as_of_the_middle_of_the_round_trip(host: Host) -> None:
    before = database_time()
    # Each look at the steady clock is two seconds after the one before: asked at 1002, answered at 1004.
    host.step = 2.0
    clock.refresh("default")
    after = database_time()
    offset = clock._readings["default"].offset
    second = timedelta(seconds=1)
    assert before - second < clock.EPOCH + timedelta(seconds=1003 + offset) < after + second


@pytest.mark.postgres
@pytest.mark.mysql
def test_a_slow_answer_sets_no_clock_back_and_another_clock_does(host: Host) -> None:
    """A run ended before it began: under load the offset falls from one round trip to the next."""
    clock.refresh("default")
    reading = clock._readings["default"]
    # What the last answers said was too late by a moment, and then by far.
    clock._readings["default"] = replace(reading, offset=reading.offset + 0.9)
    told = clock.now("default")
    for _ in range(2):
        clock.refresh("default")
        assert clock.now("default") == told
    host.passes(5)
    assert clock.now("default") > told

    clock._readings["default"] = replace(reading, offset=reading.offset + 100)
    told = clock.now("default")
    clock.refresh("default")
    assert told - clock.now("default") > timedelta(seconds=80)


@pytest.mark.postgres
@pytest.mark.mysql
def test_no_thread_tells_a_time_by_a_reading_that_another_one_replaces(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """See above: the thread that told when it began was interrupted just before it read the time."""
    clock.refresh("default")
    reading = clock._readings["default"]
    clock._readings["default"] = replace(reading, offset=reading.offset + 0.5)

    def replaced() -> None:
        clock.refresh("default")
        connection.close()

    other, read = threading.Thread(target=replaced), host.monotonic

    def interrupted() -> float:
        monkeypatch.setattr(host, "monotonic", read)
        other.start()
        # It is not done before this thread is.
        other.join(0.3)
        host.passes(0.2)
        return host.monotonic()

    monkeypatch.setattr(host, "monotonic", interrupted)
    told = clock.now("default")
    other.join()
    assert clock.now("default") >= told


@pytest.mark.postgres
@pytest.mark.mysql
def test_the_time_zone_of_the_session_makes_no_difference(host: Host) -> None:
    first = clock.now("default")
    with transaction.atomic(), connection.cursor() as cursor:
        postgres = connection.vendor == "postgresql"
        cursor.execute("SET LOCAL TIME ZONE 'Asia/Tokyo'" if postgres else "SET time_zone = '+09:00'")
        clock.refresh("default")
        cursor.execute("SET LOCAL TIME ZONE 'UTC'" if postgres else "SET time_zone = DEFAULT")
    assert abs(clock.now("default") - first) < timedelta(minutes=5)


@pytest.mark.postgres
def test_time_goes_on_inside_a_transaction(host: Host) -> None:
    """CURRENT_TIMESTAMP stands still from the begin of a transaction."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT extract(epoch FROM now())")
        begin = float(cursor.fetchone()[0])
        clock.refresh("default")
    assert host.steady + clock._readings["default"].offset > begin


@pytest.mark.parametrize("use_tz", [True, False])
def test_the_settings_of_time_zones_make_no_difference(use_tz: bool, settings: Any) -> None:
    settings.USE_TZ, settings.TIME_ZONE = use_tz, "Asia/Tokyo"
    clock.refresh("default")
    assert clock.now("default").tzinfo is UTC
    assert abs(clock.now("default") - datetime.now(UTC)) < timedelta(minutes=5)
