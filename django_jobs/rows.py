"""Executions to and from the driver's own forms, for the statements that transitions.py writes by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from django.db import connections
from django.db.models.base import ModelState
from django.db.models.expressions import Col

from django_jobs.conf import get_settings
from django_jobs.fields import StrictJSONEncoder, StrictJSONField, UTCDateTimeField, to_database
from django_jobs.models import JobExecution, Worker

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from django.db.backends.base.base import BaseDatabaseWrapper

TABLE = JobExecution._meta.db_table
WORKER_TABLE = Worker._meta.db_table
Fields = tuple[Any, ...]
# Without what only the end of a run writes; logs are the large ones.
READ: Fields = tuple(
    field for field in JobExecution._meta.concrete_fields if field.attname not in {"logs", "result", "progress"}
)
# Without what the claim has just written itself, or no run reads.
_WRITTEN = {"hinted_at", "created_at", "status", "worker_id", "started_at", "updated_at", "completed_at"}
CLAIMED: Fields = tuple(field for field in READ if field.attname not in _WRITTEN)


_columns: dict[tuple[str, int, str], str] = {}


def columns(connection: BaseDatabaseWrapper, fields: Fields, prefix: str = "") -> str:
    """Return fields as a SQL list of columns, each quoted."""
    # By count: there are two sets of fields, and hashing one costs more than joining it.
    known = (connection.vendor, len(fields), prefix)
    if known not in _columns:
        _columns[known] = ", ".join(prefix + connection.ops.quote_name(field.column) for field in fields)
    return _columns[known]


@lru_cache(maxsize=32)
def _plan(
    alias: str, use_tz: bool, fields: Fields
) -> tuple[list[str], int, list[tuple[int, list[Callable[..., Any]]]]]:
    """Return the attribute names, where the payload is, and which positions need which converters."""
    connection = connections[alias]
    # psycopg hands out aware datetimes under USE_TZ already.
    ready: tuple[type, ...] = (UTCDateTimeField,) if connection.vendor == "postgresql" and use_tz else ()
    converters = []
    for position, field in enumerate(fields):
        if isinstance(field, StrictJSONField):
            converters.append((position, [_json]))
            continue
        steps = connection.ops.get_db_converters(Col(TABLE, field)) + field.get_db_converters(connection)
        if steps and not isinstance(field, ready):
            converters.append((position, steps))
    names = [field.attname for field in fields]
    return names, names.index("payload"), converters


def _json(value: str | None, expression: Any, connection: Any) -> Any:
    """Read JSON text, as all databases give it; most of ours is empty."""
    if value == "{}":
        return {}
    return [] if value == "[]" else None if value is None else json.loads(value)


def executions(
    rows: Sequence[Sequence[Any]], connection: BaseDatabaseWrapper, fields: Fields, **written: Any
) -> list[JobExecution]:
    """Build executions from rows of `columns()` and the values that the statement wrote to all of them.

    Fields in neither are deferred. The payload's text is kept as the database gave it. Model.from_db() and __init__()
    are passed by: they look at each of forty fields twice, which is a third of what a claim costs in Python.
    """
    names, payload, converters = _plan(connection.alias, get_settings().use_tz, fields)
    built = []
    for row in rows:
        values = list(row)
        text = values[payload]
        for position, steps in converters:
            value = values[position]
            for step in steps:
                value = step(value, None, connection)
            values[position] = value
        execution = JobExecution.__new__(JobExecution)
        execution._state = ModelState()
        execution._state.adding, execution._state.db = False, connection.alias
        execution.__dict__.update(zip(names, values, strict=True), _payload_json=text, **written)
        built.append(execution)
    return built


def instant(value: datetime | None, connection: BaseDatabaseWrapper) -> Any:
    """Return an aware datetime as a parameter."""
    return None if value is None else to_database(value, connection)


def identity(value: UUID, connection: BaseDatabaseWrapper) -> Any:
    """Return a UUID as a parameter."""
    return value if connection.features.has_native_uuid_field else value.hex


def text(value: Any) -> str | None:
    """Return a value as strict JSON text; None stays NULL."""
    return None if value is None else json.dumps(value, cls=StrictJSONEncoder)
