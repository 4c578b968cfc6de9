"""The channel between processes: its name, its messages, and who can listen; for sender and listener."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from django.db import connections

from django_jobs.models import JobExecution

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

PREFIX = "django_jobs_"
# In bytes; PostgreSQL takes 7999. A message with more queues than fit says "any" instead.
MAX_LENGTH = 7000
# The first version of psycopg that can return what has arrived without waiting.
DRIVER = (3, 2)
APPLICATION_NAME = "django_jobs listener"
# Keepalives: the listener only reads, and might not notice for hours that its connection is dead.
PATIENCE = {
    "connect_timeout": 10,
    "keepalives": 1,
    "keepalives_idle": 15,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One NOTIFY: look for rows in these queues (None: any), look for cancel marks, or a mere probe."""

    sender: str = ""
    queues: frozenset[str] | None = frozenset()
    cancel: bool = False
    probe: int = 0

    def encode(self) -> str:
        """Return the payload of the NOTIFY, ASCII only."""
        said: dict[str, Any] = {"from": self.sender}
        if self.queues != frozenset():
            said["queues"] = None if self.queues is None else sorted(self.queues)
        if self.cancel:
            said["cancel"] = True
        if self.probe:
            said["probe"] = self.probe
        text = json.dumps(said)
        if len(text) > MAX_LENGTH:
            return Message(sender=self.sender, queues=None, cancel=self.cancel, probe=self.probe).encode()
        return text

    @classmethod
    def decode(cls, payload: str) -> Message:
        """Read a payload; one that says something else, as those of a later version may, asks everybody to look."""
        try:
            said = json.loads(payload)
            queues = said.get("queues", ())
            return cls(
                sender=str(said["from"]),
                queues=None if queues is None else frozenset(map(str, queues)),
                cancel=bool(said.get("cancel")),
                probe=int(said.get("probe", 0)),
            )
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            return cls(queues=None, cancel=True)


def send(connection: BaseDatabaseWrapper, message: Message) -> None:
    """Send a message in a statement of its own; the connection must be in autocommit.

    The channel is named by the number of the table, as this connection finds it: projects that share a database, each
    in a schema of its own, do not hear each other.
    """
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_notify(%s || %s::regclass::oid, %s)", [PREFIX, _table(connection), message.encode()])


def name(connection: BaseDatabaseWrapper) -> str:
    """Return the name of the channel, which is safe inside quotes."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT %s::regclass::oid", [_table(connection)])
        return f"{PREFIX}{int(cursor.fetchone()[0])}"


def _table(connection: BaseDatabaseWrapper) -> str:
    return connection.ops.quote_name(JobExecution._meta.db_table)


def open_listener(alias: str) -> BaseDatabaseWrapper:
    """Connect as Django does for the alias, but outside its connections and pools; the caller closes it."""
    pattern = connections[alias]
    options = {**PATIENCE, **pattern.settings_dict["OPTIONS"], "application_name": APPLICATION_NAME}
    options.pop("pool", None)
    connection = type(pattern)({**pattern.settings_dict, "OPTIONS": options, "AUTOCOMMIT": True}, alias)
    connection.ensure_connection()
    return connection


@cache
def missing_driver() -> str | None:
    """Return in one line why this process cannot listen on any server; None when it can."""
    from django.db.backends.postgresql.base import psycopg_version

    found = psycopg_version()
    return None if found >= DRIVER else f"NOTIFY and LISTEN need psycopg {_dotted(DRIVER)}, found {_dotted(found)}"


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
