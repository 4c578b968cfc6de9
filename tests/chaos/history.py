"""Every change to an execution, noted by triggers in the same transaction: rows are trimmed, their history stays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.db import connection

from django_jobs.models import JobExecution

TABLE = "chaos_history"
EXECUTIONS = JobExecution._meta.db_table
# By vendor: the number of a change, a text, the time of day in seconds.
TYPES = {
    "postgresql": ("BIGSERIAL PRIMARY KEY", "TEXT", "extract(epoch FROM clock_timestamp())"),
    "sqlite": ("INTEGER PRIMARY KEY AUTOINCREMENT", "TEXT", "(julianday('now') - 2440587.5) * 86400.0"),
    "mysql": ("BIGINT AUTO_INCREMENT PRIMARY KEY", "CHAR", "UNIX_TIMESTAMP(SYSDATE(6))"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One row written or deleted; None is "there is none" on the side that does not exist."""

    row_id: str
    job_name: str
    old_status: str | None
    status: str | None
    old_key: str | None = None
    key: str | None = None
    old_run_no: int | None = None
    run_no: int | None = None
    old_attempt: int | None = None
    attempt: int | None = None
    is_marked: bool = False
    tick_at: str | None = None
    error: str = ""
    worker_id: str | None = None
    at: float = 0.0


def install() -> None:
    """Make the table and the triggers."""
    with connection.cursor() as cursor:
        for statement in _statements(connection.vendor):
            cursor.execute(statement)


def _statements(vendor: str) -> Iterator[str]:
    number, text, clock = TYPES[vendor]
    yield (
        f"CREATE TABLE {TABLE} (n {number}, row_id VARCHAR(40), job_name VARCHAR(200), old_status VARCHAR(16), "
        "status VARCHAR(16), old_active_key VARCHAR(64), active_key VARCHAR(64), old_run_no BIGINT, run_no BIGINT, "
        "old_attempt BIGINT, attempt BIGINT, marked VARCHAR(40), tick_at VARCHAR(40), error VARCHAR(300), "
        "worker_id VARCHAR(40), at DOUBLE PRECISION)"
    )
    for event in ("INSERT", "UPDATE", "DELETE"):
        there = "OLD" if event == "DELETE" else "NEW"
        sides = [
            "NULL" if side == {"INSERT": "OLD", "DELETE": "NEW"}.get(event) else f"{side}.{column}"
            for column in ("status", "active_key", "run_no", "attempt")
            for side in ("OLD", "NEW")
        ]
        values = [
            f"CAST({there}.id AS {text})",
            f"{there}.job_name",
            *sides,
            f"CAST({there}.cancel_requested_at AS {text})",
            f"CAST({there}.tick_at AS {text})",
            f"substr({there}.error, 1, 300)",
            f"CAST({there}.worker_id AS {text})",
            clock,
        ]
        note = (
            f"INSERT INTO {TABLE} (row_id, job_name, old_status, status, old_active_key, active_key, old_run_no, "
            f"run_no, old_attempt, attempt, marked, tick_at, error, worker_id, at) VALUES ({', '.join(values)});"
        )
        name = f"chaos_{event.lower()}"
        if vendor == "postgresql":
            yield f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {note} RETURN NULL; END $$"
            note = f"EXECUTE FUNCTION {name}()"
        else:
            note = f"BEGIN {note} END"
        yield f"CREATE TRIGGER {name} AFTER {event} ON {EXECUTIONS} FOR EACH ROW {note}"


def read() -> list[Change]:
    """Return all changes in the order in which they happened."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT row_id, job_name, old_status, status, old_active_key, active_key, old_run_no, run_no, old_attempt, "
            f"attempt, marked, tick_at, error, worker_id, at FROM {TABLE} ORDER BY n"
        )
        return [_change(*row) for row in cursor.fetchall()]


def _change(row_id: str, job_name: str, *rest: Any) -> Change:
    old_status, status, old_key, key, old_run_no, run_no, old_attempt, attempt, marked, tick_at, error, worker, at = (
        rest
    )
    return Change(
        # Written with and without dashes.
        row_id=str(UUID(row_id)),
        job_name=job_name,
        old_status=old_status,
        status=status,
        old_key=old_key,
        key=key,
        old_run_no=old_run_no,
        run_no=run_no,
        old_attempt=old_attempt,
        attempt=attempt,
        is_marked=marked is not None,
        tick_at=tick_at,
        error=error or "",
        worker_id=None if worker is None else str(UUID(worker)),
        at=at,
    )
