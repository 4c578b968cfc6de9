"""Convert executions to and from the driver's values, for handwritten statements of transitions, keys and stage."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from django.db import connections
from django.db.models import IntegerField, UUIDField
from django.db.models.base import ModelState
from django.db.models.expressions import Col

from django_jobs.conf import get_settings
from django_jobs.fields import StrictJSONEncoder, StrictJSONField, UTCDateTimeField, text_name, to_database
from django_jobs.models import JobExecution

if TYPE_CHECKING:
    from uuid import UUID

    from django.db.backends.base.base import BaseDatabaseWrapper

TABLE = JobExecution._meta.db_table
# The names under which an instance keeps the values of a row, and the converters by position.
Plan = tuple[list[str], list[tuple[int, list[Callable[..., Any]]]]]


class Columns:
    """Some columns of executions: the SQL that reads them, and executions built from the rows."""

    def __init__(self, names: Collection[str], *, instants_as_seconds: bool = False) -> None:
        """Take names of columns; `instants_as_seconds` is cheaper, but only for instants in the past."""
        self._fields = [field for field in JobExecution._meta.concrete_fields if field.attname in names]
        self._instants_as_seconds = instants_as_seconds
        # By vendor.
        self._sql: dict[str, str] = {}
        # By alias, and by USE_TZ.
        self._plans: dict[tuple[str, bool], Plan] = {}

    def sql(self, connection: BaseDatabaseWrapper) -> str:
        """Return the quoted columns, separated by commas, for SELECT or RETURNING."""
        if (sql := self._sql.get(connection.vendor)) is None:
            sql = self._sql[connection.vendor] = ", ".join(self._column(field, connection) for field in self._fields)
        return sql

    def executions(
        self, rows: Iterable[Sequence[Any]], connection: BaseDatabaseWrapper, **written: Any
    ) -> list[JobExecution]:
        """Build executions from rows of `sql()` and the values that the statement wrote to all of them.

        Fields in neither are deferred. Model.from_db() and __init__() are passed by: they look at each of forty fields
        twice, which is a third of what a claim costs in Python.
        """
        key = (connection.alias, get_settings().use_tz)
        if (plan := self._plans.get(key)) is None:
            plan = self._plans[key] = self._plan(connection, use_tz=key[1])
        names, converters = plan
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

    def _column(self, field: Any, connection: BaseDatabaseWrapper) -> str:
        name = connection.ops.quote_name(field.column)
        return f"date_part('epoch', {name})" if self._comes_as_seconds(field, connection) else name

    def _comes_as_seconds(self, field: Any, connection: BaseDatabaseWrapper) -> bool:
        # Django's loader for the text of an instant costs a claim as much as ten other columns. Until the year 2106,
        # a float is precise to half a microsecond.
        return self._instants_as_seconds and connection.vendor == "postgresql" and isinstance(field, UTCDateTimeField)

    def _plan(self, connection: BaseDatabaseWrapper, *, use_tz: bool) -> Plan:
        # Under USE_TZ, psycopg returns aware datetimes already.
        ready: tuple[type, ...] = (UTCDateTimeField,) if connection.vendor == "postgresql" and use_tz else ()
        names, converters = [], []
        for position, field in enumerate(self._fields):
            if isinstance(field, StrictJSONField):
                # All databases return text, which is parsed on access.
                names.append(text_name(field.attname))
                continue
            names.append(field.attname)
            steps = connection.ops.get_db_converters(Col(TABLE, field)) + field.get_db_converters(connection)
            if self._comes_as_seconds(field, connection):
                converters.append((position, [_from_seconds]))
            elif steps and not isinstance(field, ready):
                converters.append((position, steps))
        return names, converters


def _from_seconds(value: float | None, *_: Any) -> datetime | None:
    return None if value is None else datetime.fromtimestamp(value, UTC)


def _converted(
    row: Sequence[Any], converters: list[tuple[int, list[Callable[..., Any]]]], connection: BaseDatabaseWrapper
) -> list[Any]:
    values = list(row)
    for position, steps in converters:
        for step in steps:
            values[position] = step(values[position], None, connection)
    return values


def filled(row: JobExecution, connection: BaseDatabaseWrapper) -> tuple[list[str], list[Any]]:
    """Return the quoted columns of a row that have a value, and the values as parameters."""
    names, values = [], []
    for attname, name, prepare in _writers(connection.alias):
        if (value := getattr(row, attname)) is not None:
            names.append(name)
            values.append(prepare(value, connection))
    return names, values


@lru_cache(maxsize=8)
def _writers(alias: str) -> list[tuple[str, str, Callable[[Any, BaseDatabaseWrapper], Any]]]:
    """Return each field's attribute, its quoted column, and the function that makes a parameter of the value."""
    fields: Iterable[Any] = JobExecution._meta.concrete_fields
    quote = connections[alias].ops.quote_name
    return [(field.attname, quote(field.column), _writer(field)) for field in fields]


def _writer(field: Any) -> Callable[[Any, BaseDatabaseWrapper], Any]:
    match field:
        case StrictJSONField():
            return lambda value, connection: text(value)
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


def by_index(name: str, connection: BaseDatabaseWrapper) -> str:
    """Return the table for a statement that is to go by an index, which MariaDB and MySQL are told to use.

    Once they know the number of rows, they would rather sort all that match, or walk the primary key through those
    that do not; and a read that locks rows would lock what it reads.
    """
    return f"{TABLE} FORCE INDEX ({name})" if connection.vendor == "mysql" else TABLE


@contextlib.contextmanager
def by_id(using: str) -> Iterator[None]:
    """Have MariaDB and MySQL find what the block updates or deletes by the ids of the rows, which it must name.

    Where these are a good part of all rows, they would rather read the table, or all rows of a status, and wait for
    those among them that other transactions hold.
    """
    connection = connections[using]
    if connection.vendor != "mysql":
        yield
        return
    with connection.execute_wrapper(_by_id):
        yield


def _by_id(execute: Callable[..., Any], sql: str, params: Any, many: bool, context: dict[str, Any]) -> Any:
    table = f"`{TABLE}`"
    verb, _, rest = sql.partition(f" {table} ")
    if verb == "UPDATE":
        sql = f"{verb} {table} FORCE INDEX (PRIMARY) {rest}"
    elif verb == "DELETE FROM":
        # Only where the table stands twice may an index be named.
        sql = f"DELETE {table} FROM {table} FORCE INDEX (PRIMARY) {rest}"
    return execute(sql, params, many, context)


def among(ids: Sequence[UUID], connection: BaseDatabaseWrapper) -> tuple[str, list[Any]]:
    """Return the condition that an id is one of these, to follow the column, and its parameters."""
    if connection.vendor == "postgresql":
        # In one parameter: quoting a hundred one by one takes as long as deleting their rows.
        return "= ANY (%s::uuid[])", [f"{{{','.join([pk.hex for pk in ids])}}}"]
    return f"IN ({', '.join(['%s'] * len(ids))})", [identity(pk, connection) for pk in ids]


def of_jobs(names: Sequence[str], connection: BaseDatabaseWrapper) -> tuple[str, list[Any]]:
    """Return the condition that a row's job has one of these names, and its parameters.

    It is a filter beside conditions that choose an index, as in ExecutionQuerySet.among_jobs().
    """
    known = f"job_name IN ({', '.join(['%s'] * len(names))})"
    if connection.vendor == "postgresql":
        # With much history, the planner takes job and status for independent, expects hardly any rows, and would rather
        # fetch and sort all pending ones than walk the claim index. It cannot look into a CASE, and expects half.
        known = f"CASE WHEN {known} THEN true ELSE false END"
    return known, [*names]


def text(value: Any) -> str | None:
    """Return a value as strict JSON text; None stays NULL."""
    return None if value is None else json.dumps(value, cls=StrictJSONEncoder)
