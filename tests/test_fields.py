"""The column types: instants that never shift, JSON that every database takes, ids in the order of their making."""

from __future__ import annotations

import json
import threading
import uuid
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from django.db import transaction

from django_jobs import fields
from django_jobs.fidelity import LARGEST, SMALLEST
from django_jobs.fields import StrictJSONEncoder, StrictJSONField, UTCDateTimeField, uuid7
from django_jobs.models import JobExecution, Worker
from tests.factories import JobExecutionFactory, WorkerFactory
from tests.verbs import claim

# The second hour is the first one again in New York; the last instant has microseconds.
INSTANTS = [
    datetime(2026, 1, 15, 12, tzinfo=UTC),
    datetime(2026, 7, 15, 12, tzinfo=UTC),
    datetime(2026, 3, 8, 6, 59, 59, 999999, tzinfo=UTC),
    datetime(2026, 3, 8, 7, tzinfo=UTC),
    datetime(2026, 11, 1, 5, 30, tzinfo=UTC),
    datetime(2026, 11, 1, 6, 30, tzinfo=UTC),
    datetime(2026, 11, 29, 23, 59, 59, 123456, tzinfo=UTC),
]
ZONES = [(True, "UTC"), (True, "America/New_York"), (False, "UTC"), (False, "America/New_York")]


# Ids


def test_an_id_is_a_uuid_of_version_seven() -> None:
    made = uuid7()
    assert (made.version, made.variant) == (7, uuid.RFC_4122)


def test_ids_sort_in_the_order_of_their_making() -> None:
    made = [uuid7() for _ in range(20_000)]
    assert all(older < newer for older, newer in pairwise(made))


def test_ids_of_several_threads_are_different_and_in_order() -> None:
    made: list[list[uuid.UUID]] = [[] for _ in range(4)]
    threads = [threading.Thread(target=lambda ids=ids: ids.extend(uuid7() for _ in range(2_000))) for ids in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len({each for ids in made for each in ids}) == 8_000
    assert all(older < newer for ids in made for older, newer in pairwise(ids))


def test_an_id_begins_with_the_millisecond_of_its_making(monkeypatch: pytest.MonkeyPatch) -> None:
    # Later than any id that this process has made.
    at = datetime(2200, 1, 1, 12, 0, 0, 123000, tzinfo=UTC)
    monkeypatch.setattr(fields, "_last_tick", 0)
    monkeypatch.setattr(fields, "time", SimpleNamespace(time_ns=lambda: int(at.timestamp() * 1000) * 1_000_000))
    assert uuid7().int >> 80 == int(at.timestamp() * 1000)


def test_a_clock_that_stands_still_or_goes_back_makes_no_older_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fields, "_last_tick", 0)
    clock = SimpleNamespace(now=10**18)
    monkeypatch.setattr(fields, "time", SimpleNamespace(time_ns=lambda: clock.now))
    made = [uuid7() for _ in range(5_000)]
    clock.now -= 3600 * 10**9
    made += [uuid7() for _ in range(5)]
    assert all(older < newer for older, newer in pairwise(made))


@pytest.mark.django_db
def test_the_database_sorts_ids_as_python_does() -> None:
    rows = JobExecutionFactory.build_batch(50)
    JobExecution.objects.bulk_create(reversed(rows))
    assert list(JobExecution.objects.order_by("pk").values_list("pk", flat=True)) == [row.pk for row in rows]


# Instants


def write(at: datetime) -> JobExecution:
    return JobExecutionFactory(now=at, started_at=at)


@pytest.mark.django_db
@pytest.mark.parametrize(("use_tz", "zone"), ZONES)
def test_an_instant_comes_back_as_it_was(use_tz: bool, zone: str, settings: Any) -> None:
    settings.USE_TZ, settings.TIME_ZONE = use_tz, zone
    for at in INSTANTS:
        row = write(at.astimezone(ZoneInfo("Asia/Tokyo")))
        found = JobExecution.objects.get(pk=row.pk)
        assert found.started_at == at
        assert found.started_at is not None and found.started_at.tzinfo is UTC
        assert JobExecution.objects.filter(pk=row.pk).values_list("started_at", flat=True).get() == at


@pytest.mark.django_db
@pytest.mark.parametrize(("use_tz", "zone"), ZONES)
def test_instants_are_compared_as_instants(use_tz: bool, zone: str, settings: Any) -> None:
    settings.USE_TZ, settings.TIME_ZONE = use_tz, zone
    step = timedelta(microseconds=1)
    for at in INSTANTS:
        rows = JobExecution.objects.filter(pk=write(at).pk)
        assert rows.filter(started_at=at).exists()
        assert rows.filter(started_at__lt=at + step).exists() and not rows.filter(started_at__lt=at).exists()
        assert rows.filter(started_at__gt=at - step).exists() and not rows.filter(started_at__gt=at).exists()
        assert rows.update(started_at=at + step) == 1
        assert rows.filter(started_at=at + step).exists()


@pytest.mark.django_db
def test_what_was_written_with_time_zones_is_read_without_and_the_other_way_round(settings: Any) -> None:
    settings.TIME_ZONE = "America/New_York"
    for written, read in ((True, False), (False, True)):
        settings.USE_TZ = written
        rows = [write(at) for at in INSTANTS]
        settings.USE_TZ = read
        assert [JobExecution.objects.get(pk=row.pk).started_at for row in rows] == INSTANTS


@pytest.mark.django_db
@pytest.mark.parametrize(("use_tz", "zone"), ZONES)
def test_statements_by_hand_take_and_give_the_same_instants(use_tz: bool, zone: str, settings: Any) -> None:
    settings.USE_TZ, settings.TIME_ZONE = use_tz, zone
    for at in INSTANTS:
        row = JobExecutionFactory(now=at)
        (run,) = claim(WorkerFactory(now=at), at)
        assert (run.pk, run.scheduled_at, run.started_at) == (row.pk, at, at)
        assert run.scheduled_at.tzinfo is UTC
        found = JobExecution.objects.get(pk=row.pk)
        assert (found.scheduled_at, found.started_at) == (at, at)


@pytest.mark.django_db
@pytest.mark.parametrize(("use_tz", "zone"), ZONES)
def test_no_instant_stays_none(use_tz: bool, zone: str, settings: Any) -> None:
    settings.USE_TZ, settings.TIME_ZONE = use_tz, zone
    JobExecutionFactory()
    assert JobExecution.objects.get().started_at is None
    assert JobExecution.objects.filter(started_at__isnull=True).exists()


def test_an_instant_is_an_ordinary_column_to_migrations() -> None:
    _, path, args, kwargs = UTCDateTimeField(null=True).deconstruct()
    assert (path, args, kwargs) == ("django_jobs.fields.UTCDateTimeField", [], {"null": True})


# JSON


@pytest.mark.django_db
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"a": [1, x]}], ids=["bare", "nested"])
def test_numbers_that_are_no_json_are_refused_on_every_engine(value: float, wrap: Any) -> None:
    with pytest.raises(ValueError, match=r"(?i)out of range float"), transaction.atomic():
        JobExecutionFactory(payload=wrap(value))
    assert not JobExecution.objects.exists()
    row = JobExecutionFactory()
    with pytest.raises(ValueError, match=r"(?i)out of range float"), transaction.atomic():
        JobExecution.objects.filter(pk=row.pk).update(result=wrap(value))


@pytest.mark.django_db
@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        [],
        "",
        "é💥",
        0,
        1.5,
        True,
        SMALLEST,
        LARGEST,
        {"a": {"b": [1, None, "x"]}},
        {"": ""},
        "quote ' and \" and \\ and %s",
    ],
    ids=repr,
)
def test_json_comes_back_as_it_was(value: Any) -> None:
    row = JobExecutionFactory(result=value)
    assert JobExecution.objects.get(pk=row.pk).result == value


@pytest.mark.django_db
def test_no_result_is_null_in_the_table() -> None:
    JobExecutionFactory(result=None)
    assert JobExecution.objects.filter(result__isnull=True).exists()


def test_json_is_written_in_ascii() -> None:
    assert json.dumps({"a": "é💥"}, cls=StrictJSONEncoder).isascii()


def test_json_is_an_ordinary_column_to_migrations() -> None:
    _, path, args, kwargs = StrictJSONField(default=dict).deconstruct()
    assert (path, args, kwargs) == ("django_jobs.fields.StrictJSONField", [], {"default": dict})


@pytest.mark.django_db
def test_a_worker_without_queues_serves_any() -> None:
    WorkerFactory(queues=None, names=["a", "b"])
    found = Worker.objects.get()
    assert (found.queues, found.names) == (None, ["a", "b"])
