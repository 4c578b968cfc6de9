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
from django_jobs.fields import StrictJSONEncoder, UTCDateTimeField, to_database
from django_jobs.models import JobExecution, Worker

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from django.db.backends.base.base import BaseDatabaseWrapper

TABLE = JobExecution._meta.db_table
WORKER_TABLE = Worker._meta.db_table
# What a claim reads back: not what it has just written itself, nor what only the next end of the row will write.
_SKIPPED = {
    "logs",
    "result",
    "progress",
    "hinted_at",
    "status",
    "worker_id",
    "started_at",
    "updated_at",
    "completed_at",
}
FIELDS = [field for field in JobExecution._meta.concrete_fields if field.attname not in _SKIPPED]
NAMES = [field.attname for field in FIELDS]
_PAYLOAD = NAMES.index("payload")


def columns(connection: BaseDatabaseWrapper, prefix: str = "") -> str:
    """Return the claimed columns as a SQL list, each quoted."""
    return ", ".join(prefix + connection.ops.quote_name(str(field.column)) for field in FIELDS)


@lru_cache(maxsize=32)
def _converters(alias: str, use_tz: bool) -> list[tuple[int, list[Callable[..., Any]]]]:
    connection = connections[alias]
    # psycopg hands out aware datetimes under USE_TZ already.
    ready: tuple[type, ...] = (UTCDateTimeField,) if connection.vendor == "postgresql" and use_tz else ()
    found = []
    for position, field in enumerate(FIELDS):
        steps = connection.ops.get_db_converters(Col(TABLE, field)) + field.get_db_converters(connection)
        if steps and not isinstance(field, ready):
            found.append((position, steps))
    return found


def executions(rows: Sequence[Sequence[Any]], connection: BaseDatabaseWrapper, **written: Any) -> list[JobExecution]:
    """Build executions from rows of `columns()` and the values that the statement wrote to all of them.

    Fields in neither are deferred. The payload's text is kept as the database gave it. Model.from_db() and __init__()
    are passed by: they look at each of forty fields twice, which is a third of what a claim costs in Python.
    """
    converters = _converters(connection.alias, get_settings().use_tz)
    built = []
    for row in rows:
        values = list(row)
        text = values[_PAYLOAD]
        for position, steps in converters:
            value = values[position]
            for step in steps:
                value = step(value, None, connection)
            values[position] = value
        execution = JobExecution.__new__(JobExecution)
        execution._state = ModelState()
        execution._state.adding, execution._state.db = False, connection.alias
        execution.__dict__.update(zip(NAMES, values, strict=True), _payload_json=text, **written)
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
