"""Executions to and from the driver's own forms, for statements written by hand: of transitions, keys and stage."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from django.db import connections, transaction
from django.db.models import IntegerField, UUIDField
from django.db.models.base import ModelState
from django.db.models.expressions import Col

from django_jobs.conf import get_settings
from django_jobs.fields import StrictJSONEncoder, StrictJSONField, UTCDateTimeField, text_name, to_database
from django_jobs.models import JobExecution, Worker

if TYPE_CHECKING:
    from uuid import UUID

    from django.db.backends.base.base import BaseDatabaseWrapper

TABLE = JobExecution._meta.db_table
WORKER_TABLE = Worker._meta.db_table
Fields = tuple[Any, ...]
# Without what only the end of a run writes; logs are the large ones.
READ: Fields = tuple(
    field for field in JobExecution._meta.concrete_fields if field.attname not in {"logs", "result", "progress"}
)
# What a run and its receivers read; the rest is fetched for those who ask, while the row is there. Each column costs
# every row of every claim.
_OF_A_RUN = {
    "id",
    "job_name",
    "queue",
    "rank",
    "payload",
    "key",
    "organization_id",
    "attempt",
    "max_attempts",
    "run_no",
    "scheduled_at",
    "tick_at",
    "created_at",
    "errors",
    "triggered_by",
    "triggered_by_name",
}
CLAIMED: Fields = tuple(field for field in READ if field.attname in _OF_A_RUN)
# What tells stage why the first of all scheduled rows waits.
WAITING: Fields = tuple(field for field in READ if field.attname in {"parked_reason", "scheduled_at"})


_columns: dict[tuple[str, int], str] = {}


def columns(connection: BaseDatabaseWrapper, fields: Fields) -> str:
    """Return fields as a SQL list of columns, each quoted."""
    # By count: no two sets of fields have the same, and hashing one costs more than joining it.
    known = (connection.vendor, len(fields))
    if known not in _columns:
        _columns[known] = ", ".join(_column(field, fields, connection) for field in fields)
    return _columns[known]


def _column(field: Any, fields: Fields, connection: BaseDatabaseWrapper) -> str:
    name = connection.ops.quote_name(field.column)
    return f"date_part('epoch', {name})" if _comes_as_seconds(field, fields, connection) else name


def _comes_as_seconds(field: Any, fields: Fields, connection: BaseDatabaseWrapper) -> bool:
    # The text of an instant, through Django's loader, costs a claim as much as ten other columns. Those of its rows are
    # past: until the year 2106 a float holds half a microsecond.
    return fields is CLAIMED and connection.vendor == "postgresql" and isinstance(field, UTCDateTimeField)


def _from_seconds(value: float | None, *_: Any) -> datetime | None:
    return None if value is None else datetime.fromtimestamp(value, UTC)


@lru_cache(maxsize=32)
def _plan(alias: str, use_tz: bool, fields: Fields) -> tuple[list[str], list[tuple[int, list[Callable[..., Any]]]]]:
    """Return under which names the columns are kept, and which positions need which converters."""
    connection = connections[alias]
    # psycopg hands out aware datetimes under USE_TZ already.
    ready: tuple[type, ...] = (UTCDateTimeField,) if connection.vendor == "postgresql" and use_tz else ()
    names, converters = [], []
    for position, field in enumerate(fields):
        if isinstance(field, StrictJSONField):
            # All databases give text, which is read when somebody asks.
            names.append(text_name(field.attname))
            continue
        names.append(field.attname)
        steps = connection.ops.get_db_converters(Col(TABLE, field)) + field.get_db_converters(connection)
        if _comes_as_seconds(field, fields, connection):
            converters.append((position, [_from_seconds]))
        elif steps and not isinstance(field, ready):
            converters.append((position, steps))
    return names, converters


def executions(
    rows: Iterable[Sequence[Any]], connection: BaseDatabaseWrapper, fields: Fields, **written: Any
) -> list[JobExecution]:
    """Build executions from rows of `columns()` and the values that the statement wrote to all of them.

    Fields in neither are deferred. Model.from_db() and __init__() are passed by: they look at each of forty fields
    twice, which is a third of what a claim costs in Python.
    """
    names, converters = _plan(connection.alias, get_settings().use_tz, fields)
    if converters:
        rows = [_converted(row, converters, connection) for row in rows]
    built = []
    for row in rows:
        execution = JobExecution.__new__(JobExecution)
        execution._state = state = ModelState()
        state.adding, state.db = False, connection.alias
        execution.__dict__.update(zip(names, row, strict=True), **written)
        built.append(execution)
    return built


def first_scheduled(using: str) -> JobExecution | None:
    """Return the first scheduled row, parked ones last, or None; of its fields only WAITING."""
    connection = connections[using]
    with connection.cursor() as cursor:
        cursor.execute(
            f"SELECT {columns(connection, WAITING)} FROM {TABLE} WHERE status = 'scheduled' "
            "ORDER BY parked_reason, scheduled_at LIMIT 1"
        )
        return next(iter(executions(cursor.fetchall(), connection, WAITING)), None)


def _converted(
    row: Sequence[Any], converters: list[tuple[int, list[Callable[..., Any]]]], connection: BaseDatabaseWrapper
) -> list[Any]:
    values = list(row)
    for position, steps in converters:
        for step in steps:
            values[position] = step(values[position], None, connection)
    return values


def insert(row: JobExecution, connection: BaseDatabaseWrapper) -> None:
    """Write a new row, in the caller's transaction; Model.save() takes twice as long for forty fields.

    Columns without a value are left to be NULL.
    """
    names, values = [], []
    for attname, name, prepare in _writers(connection.alias):
        if (value := getattr(row, attname)) is not None:
            names.append(name)
            values.append(prepare(value, connection))
    statement = f"INSERT INTO {TABLE} ({', '.join(names)}) VALUES ({', '.join(['%s'] * len(names))})"
    # As save() does: in the caller's transaction nothing may follow an error before it is rolled back.
    with transaction.mark_for_rollback_on_error(using=connection.alias), connection.cursor() as cursor:
        cursor.execute(statement, values)
    row._state.adding, row._state.db = False, connection.alias


@lru_cache(maxsize=8)
def _writers(alias: str) -> list[tuple[str, str, Callable[[Any, BaseDatabaseWrapper], Any]]]:
    """Return for each field where its value is kept, its quoted column, and what makes a parameter of the value."""
    fields: Fields = JobExecution._meta.concrete_fields
    quote = connections[alias].ops.quote_name
    return [(field.attname, quote(field.column), _writer(field)) for field in fields]


def _writer(field: Any) -> Callable[[Any, BaseDatabaseWrapper], Any]:
    match field:
        case StrictJSONField():
            return lambda value, connection: json.dumps(value, cls=StrictJSONEncoder)
        case UTCDateTimeField():
            return instant
        case UUIDField():
            return identity
        case IntegerField():
            return lambda value, connection: int(value)
    return lambda value, connection: str(value)


def instant(value: datetime | None, connection: BaseDatabaseWrapper) -> Any:
    """Return an aware datetime as a parameter."""
    return None if value is None else to_database(value, connection)


def identity(value: UUID, connection: BaseDatabaseWrapper) -> Any:
    """Return a UUID as a parameter."""
    return value if connection.features.has_native_uuid_field else value.hex


def among(ids: Sequence[UUID], connection: BaseDatabaseWrapper) -> tuple[str, list[Any]]:
    """Return the condition that an id is one of these, to stand behind the column, and its parameters."""
    if connection.vendor == "postgresql":
        # In one parameter: to quote a hundred one by one takes as long as to delete their rows.
        return "= ANY (%s::uuid[])", [f"{{{','.join([pk.hex for pk in ids])}}}"]
    return f"IN ({', '.join(['%s'] * len(ids))})", [identity(pk, connection) for pk in ids]


def text(value: Any) -> str | None:
    """Return a value as strict JSON text; None stays NULL."""
    return None if value is None else json.dumps(value, cls=StrictJSONEncoder)
