from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from functools import cache
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_jobs import DefinitionError
from django_jobs.schedules import Cron, configured

MINUTE = timedelta(minutes=1)
ZONES = (
    "America/New_York",
    "Europe/Berlin",
    "Europe/Paris",
    "Africa/Cairo",
    "Australia/Lord_Howe",
    "Asia/Kolkata",
    "UTC",
)
EXPRESSIONS = (
    "* * * * *",
    "*/7 * * * *",
    "0 * * * *",
    "30 */1 * * *",
    "15,45 0-23 * * *",
    "59 * * * *",
    "0 * * * 0",
    "0 * 28 3 *",
    "10 * 1-7 11 *",
    "0 0 * * *",
    "30 0 * * *",
    "0 1 * * *",
    "30 1 * * *",
    "*/10 1 * * *",
    "45 1 * * 0",
    "0 2 * * *",
    "15 2 * * *",
    "30 2 * * *",
    "*/15 2 * * *",
    "0-59 2 * * *",
    "0 3 * * *",
    "0,30 1-3 * * *",
    "*/20 0-4 * * *",
    "0 */2 * * *",
    "0 */5 * * *",
    "30 1-23/2 * * *",
    "0 20 * * *",
    "5 4 * * 1-5",
    "0 0 30 4 *",
    "0 0 13 * 5",
    "0 9 l * *",
    "30 23 * * 6",
)


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)


def local(cron: Cron, start: str, count: int) -> list[str]:
    """The next ticks in the zone of the expression, as ISO texts to the minute."""
    ticks, tick = [], at(start)
    for _ in range(count):
        tick = cron.next_after(tick)
        ticks.append(tick.astimezone(cron.tz).isoformat(timespec="minutes"))
    return ticks


@cache
def matcher(expression: str) -> tuple[Callable[[datetime], bool], list[int], bool]:
    """Read an expression without croniter: is a day its, its minutes of a day, and whether these cover all hours."""
    spans = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 6))
    parts = expression.split()
    sets: list[set[int]] = []
    for part, (low, high) in zip(parts, spans, strict=True):
        found: set[int] = set()
        for piece in part.split(","):
            body, _, step = piece.partition("/")
            if body == "l":
                continue
            first, _, last = (f"{low}-{high}" if body == "*" else body).partition("-")
            found |= set(range(int(first), int(last or first) + 1, int(step or 1)))
        sets.append(found)

    def is_day(wall: datetime) -> bool:
        last_day = parts[2] == "l" and (wall + timedelta(days=1)).day == 1
        day, weekday = wall.day in sets[2] or last_day, wall.isoweekday() % 7 in sets[4]
        both = day or weekday if parts[2] != "*" and parts[4] != "*" else day and weekday
        return wall.month in sets[3] and both

    return is_day, [hour * 60 + minute for hour in sorted(sets[1]) for minute in sorted(sets[0])], len(sets[1]) == 24


def reference(expression: str, zone: str, start: datetime, end: datetime) -> list[datetime]:
    """Every tick in (start, end], by looking at each minute of the clock."""
    is_day, minutes, every_hour = matcher(expression)
    of_day = set(minutes)
    tz, ticks, now = ZoneInfo(zone), [], start
    before = now.astimezone(tz).replace(tzinfo=None)

    def matches(wall: datetime) -> bool:
        return wall.hour * 60 + wall.minute in of_day and is_day(wall)

    while now < end:
        now += MINUTE
        shown = now.astimezone(tz)
        wall = shown.replace(tzinfo=None, fold=0)
        due = matches(wall) and (every_hour or not shown.fold)
        # The clock jumped ahead: every minute that it left out is due now.
        missing = before + MINUTE
        while not every_hour and missing < wall:
            due = due or matches(missing)
            missing += MINUTE
        if due:
            ticks.append(now)
        before = wall
    return ticks


def ticks_of_a_year(expression: str, zone: str, year: int) -> list[datetime]:
    """Every tick of a year in its zone: day by day, and minute by minute on a day that is longer or shorter."""
    is_day, minutes, _ = matcher(expression)
    tz, ticks = ZoneInfo(zone), []
    day = datetime(year, 1, 1)  # noqa: DTZ001 - wall time has no zone
    while day.year == year:
        start, day = day, day + timedelta(days=1)
        first, last = (wall.replace(tzinfo=tz).astimezone(UTC) for wall in (start, day))
        if last - first != timedelta(days=1):
            ticks += reference(expression, zone, first - MINUTE, last - MINUTE)
        elif is_day(start):
            ticks += [first + timedelta(minutes=minute) for minute in minutes]
    return ticks


def changes(zone: str, year: int) -> list[datetime]:
    """The days of a year on which a zone changes its offset, and one on which it does not."""
    tz = ZoneInfo(zone)
    days = [datetime(year, 1, 1, tzinfo=UTC) + timedelta(days=n) for n in range(365)]
    found = [day for day in days if day.astimezone(tz).utcoffset() != (day + timedelta(1)).astimezone(tz).utcoffset()]
    return [*found, datetime(year, 8, 12, tzinfo=UTC)]


def windows(zone: str, margin: timedelta) -> Iterator[tuple[datetime, datetime]]:
    for day in changes(zone, 2027):
        yield day - margin, day + timedelta(days=1) + margin


@pytest.mark.medium
@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("expression", ["*/15 * * * *", "30 1 * * *", "*/15 2 * * *", "0 0 * * *", "0 */5 * * *"])
def test_ticks_around_a_clock_change_are_those_of_a_walk_minute_by_minute(expression: str, zone: str) -> None:
    for start, end in windows(zone, timedelta(hours=6)):
        assert Cron(expression, zone).between(start, end, 20_000) == reference(expression, zone, start, end)


@pytest.mark.slow
@pytest.mark.parametrize("zone", ZONES)
def test_every_expression_agrees_with_a_walk_minute_by_minute_around_the_changes_of_2027(zone: str) -> None:
    for expression in EXPRESSIONS:
        for start, end in windows(zone, timedelta(days=1)):
            assert Cron(expression, zone).between(start, end, 20_000) == reference(expression, zone, start, end), (
                expression
            )


@pytest.mark.slow
@pytest.mark.parametrize("zone", ZONES)
def test_every_expression_agrees_with_a_calendar_of_the_whole_year_2027(zone: str) -> None:
    for expression in EXPRESSIONS:
        cron, ticks = Cron(expression, zone), ticks_of_a_year(expression, zone, 2027)
        now, looks = ticks[0] - timedelta(seconds=1), 0
        while now < ticks[-1]:
            following = ticks[bisect_right(ticks, now)]
            assert cron.next_after(now) == following, (expression, now)
            if looks % 100 == 99:
                assert cron.previous_before(now) == ticks[bisect_left(ticks, now) - 1], (expression, now)
            looks += 1
            # Each tick of a rare one; of the others one in seven hours, so that every hour of the day has its turn.
            now = max(following, now + timedelta(hours=7))


@pytest.mark.medium
@given(
    expression=st.sampled_from(EXPRESSIONS),
    zone=st.sampled_from(ZONES),
    seconds=st.integers(0, 366 * 86400),
    micro=st.sampled_from([0, 1, 999_999]),
)
def test_the_next_tick_is_later_and_the_previous_one_finds_it_again(
    expression: str, zone: str, seconds: int, micro: int
) -> None:
    cron = Cron(expression, zone)
    instant = datetime(2027, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds, microseconds=micro)
    tick = cron.next_after(instant)
    assert tick > instant
    assert cron.previous_before(tick + timedelta(microseconds=1)) == tick
    previous = cron.previous_before(instant)
    assert previous < instant
    assert cron.next_after(previous) >= instant


@pytest.mark.parametrize(
    ("zone", "start", "days"),
    [
        (
            "America/New_York",
            "2027-03-13T12:00-05:00",
            ["2027-03-14T03:00-04:00", "2027-03-15T02:30-04:00", "2027-03-16T02:30-04:00"],
        ),
        (
            "Europe/Berlin",
            "2027-03-27T12:00+01:00",
            ["2027-03-28T03:00+02:00", "2027-03-29T02:30+02:00", "2027-03-30T02:30+02:00"],
        ),
    ],
)
def test_a_daily_job_in_the_skipped_hour_runs_once_that_day(zone: str, start: str, days: list[str]) -> None:
    """A daily job inside the hour that spring skips did not run that day (kelektiv/node-cron#563, robfig/cron#541)."""
    assert local(Cron("30 2 * * *", zone), start, 3) == days


@pytest.mark.parametrize(
    ("expression", "zone", "start", "ticks"),
    [
        (
            "0 20 * * *",
            "Europe/Paris",
            "2027-10-30T00:00+02:00",
            [
                f"{day}T20:00{off}"
                for day, off in (
                    ("2027-10-30", "+02:00"),
                    ("2027-10-31", "+01:00"),
                    ("2027-11-01", "+01:00"),
                    ("2027-11-02", "+01:00"),
                    ("2027-11-03", "+01:00"),
                )
            ],
        ),
        (
            "0 6 * * *",
            "Europe/Berlin",
            "2027-03-27T00:00+01:00",
            [
                f"{day}T06:00{off}"
                for day, off in (
                    ("2027-03-27", "+01:00"),
                    ("2027-03-28", "+02:00"),
                    ("2027-03-29", "+02:00"),
                    ("2027-03-30", "+02:00"),
                    ("2027-03-31", "+02:00"),
                )
            ],
        ),
        (
            "0 0 * * *",
            "Europe/Berlin",
            "2027-10-30T12:00+02:00",
            [
                f"{day}T00:00{off}"
                for day, off in (
                    ("2027-10-31", "+02:00"),
                    ("2027-11-01", "+01:00"),
                    ("2027-11-02", "+01:00"),
                    ("2027-11-03", "+01:00"),
                    ("2027-11-04", "+01:00"),
                )
            ],
        ),
    ],
)
def test_the_wall_time_stays_after_a_clock_change(expression: str, zone: str, start: str, ticks: list[str]) -> None:
    """The days after a change stayed one hour off (pallets-eco/croniter#25, Koed00/django-q#630, django-q2#44)."""
    assert local(Cron(expression, zone), start, 5) == ticks


def test_a_day_without_midnight_still_has_its_daily_run() -> None:
    """In zones that change at midnight a day was lost or the next run went backwards (robfig/cron#541)."""
    assert local(Cron("@daily", "Africa/Cairo"), "2027-04-29T12:00+02:00", 3) == [
        "2027-04-30T01:00+03:00",
        "2027-05-01T00:00+03:00",
        "2027-05-02T00:00+03:00",
    ]


def test_in_the_second_pass_of_an_hour_the_next_run_is_later() -> None:
    """Asked in the second pass, the next run was earlier than the question (dragonmantank/cron-expression#196)."""
    cron = Cron("0 1 * * *", "America/Los_Angeles")
    assert local(cron, "2027-11-07T01:15-08:00", 2) == ["2027-11-08T01:00-08:00", "2027-11-09T01:00-08:00"]


def test_a_wall_time_that_comes_twice_counts_once() -> None:
    assert local(Cron("30 1 * * *", "America/New_York"), "2027-11-06T12:00-04:00", 2) == [
        "2027-11-07T01:30-04:00",
        "2027-11-08T01:30-05:00",
    ]


def test_an_hourly_job_runs_in_each_real_hour_of_a_long_day() -> None:
    ticks = Cron("0 * * * *", "America/New_York").between(
        at("2027-11-07T00:30-04:00"), at("2027-11-07T04:00-05:00"), 99
    )
    assert {later - tick for tick, later in pairwise(ticks)} == {timedelta(hours=1)}
    assert len(ticks) == 5


@pytest.mark.parametrize(
    ("expression", "days"),
    [
        ("0 16 1,2,3 * FRI", ["01-01", "01-02", "01-03", "01-08", "01-15", "01-22"]),
        ("0 0 */2 * 1", ["01-03", "01-04", "01-05", "01-07", "01-09", "01-11"]),
        ("0 0 13 * 5", ["01-08", "01-13", "01-15", "01-22", "01-29", "02-05"]),
    ],
)
def test_of_day_of_month_and_day_of_week_either_is_enough(expression: str, days: list[str]) -> None:
    """Users got far more runs than they meant from OR against AND (pallets-eco/croniter#41, QwenLM/qwen-code#7452)."""
    assert [tick[5:10] for tick in local(Cron(expression, "UTC"), "2027-01-01T00:00+00:00", 6)] == days


@pytest.mark.parametrize("expression", ["0 0 31 2 *", "0 0 31 4 *", "0 0 31 2,4 *", "0 0 30 2 *"])
def test_an_expression_that_never_comes_is_refused(expression: str) -> None:
    """31 February passed validation, then took the scheduler down (pallets-eco/croniter#141, dagster#26238)."""
    with pytest.raises(DefinitionError, match=r"never occurs"):
        Cron(expression)


@pytest.mark.parametrize(("expression", "first"), [("0 0 29 2 *", "2028-02-29"), ("0 0 30 2 1", "2027-02-01")])
def test_a_rare_expression_is_accepted_with_its_date(expression: str, first: str) -> None:
    assert local(Cron(expression, "UTC"), "2027-01-01T00:00+00:00", 1)[0].startswith(first)


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("60 * * * *", "out of range"),
        ("*/0 * * * *", "cannot be parsed"),
        ("*/90 * * * *", "never steps"),
        ("0 */24 * * *", "never steps"),
        ("", "not a cron expression"),
        ("  ", "not a cron expression"),
        (None, "not a cron expression"),
        (5, "not a cron expression"),
        ("@reboot", "does not name a time"),
        ("@fortnightly", "cannot be parsed"),
        ("H H * * *", "hashed or random"),
        ("R * * * *", "hashed or random"),
        ("0 h(1-5) * * *", "hashed or random"),
        ("* * * *", "4 fields"),
        ("0 0 1 1 * 0 2030", "7 fields"),
        ("0 0 * * 8", "cannot be parsed"),
        ("0-100000 * * * *", "far too wide"),
        (",".join(["0"] * 200) + " * * * *", "far too wide"),
        ("rubbish words in five fields", "cannot be parsed"),
    ],
)
def test_an_invalid_schedule_is_refused_with_its_reason(expression: Any, reason: str) -> None:
    """Accepted grammar differed from what users knew, up to self-made floods (taichino/croniter#122, #176)."""
    with pytest.raises(DefinitionError, match=reason) as caught:
        Cron(expression)
    assert repr(expression)[:50] in str(caught.value)


def test_spaces_around_an_expression_mean_nothing() -> None:
    assert Cron("  0  0 * * * ", "UTC") == Cron("0 0 * * *", "UTC")


def test_of_six_fields_the_last_is_seconds() -> None:
    """`*/5 * * * * *` fires each second of every fifth minute where seconds come last (taichino/croniter#122)."""
    ticks = Cron("* * * * * */20", "UTC").between(at("2027-01-01T00:00+00:00"), at("2027-01-01T00:01+00:00"), 9)
    assert [tick.second for tick in ticks] == [20, 40, 0]


def test_seconds_go_through_a_repeated_hour_in_real_time() -> None:
    cron = Cron("* * * * * */30", "Europe/Berlin")
    ticks = cron.between(at("2027-10-31T02:59+02:00"), at("2027-10-31T02:01+01:00"), 99)
    assert [tick.astimezone(cron.tz).isoformat(timespec="seconds")[11:] for tick in ticks] == [
        "02:59:30+02:00",
        "02:00:00+01:00",
        "02:00:30+01:00",
        "02:01:00+01:00",
    ]


def test_a_schedule_without_zone_follows_the_setting(settings: Any) -> None:
    cron = Cron("0 0 * * *")
    settings.TIME_ZONE = "Asia/Kolkata"
    assert str(cron) == "0 0 * * * Asia/Kolkata"
    assert cron.next_after(at("2027-01-01T00:00+00:00")) == at("2027-01-01T18:30+00:00")


@pytest.mark.parametrize("key", ["SWEEP_CRON", "TRIM_CRON"])
def test_a_schedule_of_the_settings_is_parsed_once_and_follows_them(key: str, settings: Any) -> None:
    settings.DJANGO_JOBS = {key: "7 3 * * *"}
    assert configured(key) is configured(key)
    assert configured(key) == Cron("7 3 * * *")
    settings.DJANGO_JOBS = {key: "8 3 * * *"}
    assert configured(key) == Cron("8 3 * * *")
    settings.DJANGO_JOBS = {key: "0 0 31 2 *"}
    with pytest.raises(DefinitionError, match=f"DJANGO_JOBS: {key} is '0 0 31 2 \\*': .*never occurs"):
        configured(key)


@pytest.mark.parametrize("zone", ["Europe/Paris", ZoneInfo("Europe/Paris")])
def test_a_zone_is_a_name_or_a_zoneinfo(zone: Any) -> None:
    assert str(Cron("0 3 * * *", zone)) == "0 3 * * * Europe/Paris"


@pytest.mark.parametrize("zone", ["Mars/Olympus", "", "../etc/passwd", 5, timezone(timedelta(hours=1))])
def test_an_unknown_zone_is_refused(zone: Any) -> None:
    with pytest.raises(DefinitionError, match=r"is not known"):
        Cron("0 3 * * *", zone)
