"""The column types of the models: instants in UTC, strict JSON, and time-ordered ids."""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from django.db import models
from django.db.models.query_utils import DeferredAttribute
from django.utils import timezone

from django_jobs.conf import get_settings

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

_last_tick = 0
_lock = threading.Lock()
if hasattr(os, "register_at_fork"):
    # Another thread of the parent may have held it.
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def uuid7() -> uuid.UUID:
    """Return a UUID version 7 (RFC 9562), strictly increasing within this process.

    48 bits of Unix milliseconds, then 12 bits of the fraction of the millisecond in place of rand_a (method 3 of
    section 6.2), then 62 random bits. Ids that are made one after the other sort in that order, which decides
    first-in, first-out.
    """
    global _last_tick
    tick = time.time_ns() * 4096 // 1_000_000
    with _lock:
        tick = max(tick, _last_tick + 1)
        _last_tick = tick
    millis, fraction = divmod(tick, 4096)
    random = int.from_bytes(os.urandom(8), "big") >> 2
    return uuid7_at(millis, fraction << 64 | random)


def uuid7_at(millis: int, rest: int = 0) -> uuid.UUID:
    """Return the UUID version 7 of a Unix millisecond with the bits of `rest`; without any it is the lowest one."""
    return uuid.UUID(int=(millis & (1 << 48) - 1) << 80 | 0x7 << 76 | 0b10 << 62 | rest)


def from_database(value: datetime, connection: BaseDatabaseWrapper) -> datetime:
    """Return a datetime that was read from a column as an aware one in UTC.

    With USE_TZ=False, PostgreSQL returns naive values in the connection's time zone, whose `fold` tells the two passes
    of a repeated hour apart; on other databases the naive value is UTC, as UTCDateTimeField stored it.
    """
    if timezone.is_naive(value):
        if connection.vendor == "postgresql":
            value = value.replace(tzinfo=timezone.get_default_timezone())
        else:
            return value.replace(tzinfo=UTC)
    return value if value.tzinfo is UTC else value.astimezone(UTC)


def to_database(value: datetime, connection: BaseDatabaseWrapper) -> Any:
    """Return an aware datetime in the form that the connection's driver takes."""
    if not get_settings().use_tz and connection.vendor != "postgresql":
        value = value.astimezone(UTC).replace(tzinfo=None)
    return connection.ops.adapt_datetimefield_value(value)


class UTCDateTimeField(models.DateTimeField):  # type: ignore[type-arg] # the plugin fills them in by null=
    """An instant: aware and in UTC on the Python side whatever USE_TZ says, so that stored times never shift."""

    def from_db_value(
        self, value: datetime | None, expression: Any, connection: BaseDatabaseWrapper
    ) -> datetime | None:
        return None if value is None else from_database(value, connection)

    def get_db_prep_value(self, value: Any, connection: BaseDatabaseWrapper, prepared: bool = False) -> Any:
        if isinstance(value, datetime) and timezone.is_aware(value):
            return to_database(value, connection)
        return super().get_db_prep_value(value, connection, prepared)


class StrictJSONEncoder(json.JSONEncoder):
    """Plain JSON in ASCII: NaN and Infinity raise ValueError, since only some databases refuse them."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "allow_nan": False})


def text_name(attname: str) -> str:
    """Return the attribute in which an instance keeps the text of a JSON column until its value is needed."""
    return f"_{attname}_json"


class _FromText(DeferredAttribute):
    """Parses the text that came with the row; without one, the column is deferred like any other."""

    def __get__(self, instance: models.Model | None, cls: type[models.Model] | None = None) -> Any:
        text = None if instance is None else vars(instance).get(text_name(self.field.attname))
        if instance is None or text is None:
            return super().__get__(instance, cls)
        if self.field.attname not in vars(instance):
            vars(instance)[self.field.attname] = json.loads(text)
        return vars(instance)[self.field.attname]


class StrictJSONField(models.JSONField):
    """A JSONField that holds strict JSON only."""

    descriptor_class = _FromText

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("encoder", StrictJSONEncoder)
        super().__init__(*args, **kwargs)

    def deconstruct(self) -> Any:
        name, path, args, kwargs = super().deconstruct()
        kwargs.pop("encoder", None)
        return name, path, args, kwargs
