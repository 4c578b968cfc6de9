"""Executions to and from the driver's own forms, for the statements that transitions.py writes by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from django.db import connections
from django.db.models.expressions import Col

from django_jobs.conf import get_settings
from django_jobs.fields import StrictJSONEncoder, to_database
from django_jobs.models import JobExecution, Worker

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from django.db.backends.base.base import BaseDatabaseWrapper

TABLE = JobExecution._meta.db_table
WORKER_TABLE = Worker._meta.db_table
# A run never reads the logs, result and progress of the attempt before it, and logs are the large ones.
FIELDS = [f for f in JobExecution._meta.concrete_fields if f.attname not in {"logs", "result", "progress"}]
NAMES = [f.attname for f in FIELDS]
_PAYLOAD = NAMES.index("payload")


def columns(connection: BaseDatabaseWrapper, prefix: str = "") -> str:
    """Return the claimed columns as a SQL list, each quoted."""
    return ", ".join(prefix + connection.ops.quote_name(f.column) for f in FIELDS)


@lru_cache(maxsize=32)
def _converters(alias: str, use_tz: bool) -> list[tuple[int, list[Callable[..., Any]]]]:
    connection = connections[alias]
    found = []
    for position, field in enumerate(FIELDS):
        steps = connection.ops.get_db_converters(Col(TABLE, field)) + field.get_db_converters(connection)
        if steps:
            found.append((position, steps))
    return found


def executions(rows: Sequence[Sequence[Any]], connection: BaseDatabaseWrapper) -> list[JobExecution]:
    """Build executions from rows of `columns()`; the payload's text is kept as the database gave it."""
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
        execution = JobExecution.from_db(connection.alias, NAMES, values)
        execution._payload_json = text
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
