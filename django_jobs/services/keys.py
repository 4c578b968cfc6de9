"""Dedup keys: insert a row, or find the live one that holds its key; and the key that cron rows share."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from django.db import IntegrityError, connections

from django_jobs import rows, transitions
from django_jobs.contention import retried
from django_jobs.exceptions import KeyTaken
from django_jobs.models import JobExecution
from django_jobs.services._entry import in_transaction, savepoint

if TYPE_CHECKING:
    from django_jobs.definition import Job

# Without what only the end of a run writes; logs are the large ones.
READ = rows.Columns(
    {field.attname for field in JobExecution._meta.concrete_fields}.difference({"logs", "result", "progress"})
)
ROUNDS = 5
CONSTRAINT = "django_jobs_active_key"
_READ_COMMITTED = {"read committed", "read uncommitted"}
# By vendor.
_selects: dict[str, str] = {}


def overlap_key(job: Job[...]) -> str | None:
    """Return the `active_key` of the job's ticks and triggers: one for all with overlap="skip", else None.

    A digest of a user's key is 48 hexadecimal digits, so none is equal to it.
    """
    return "overlap" if job.cron is not None and job.overlap == "skip" else None


def insert_or_find(row: JobExecution, *, now: datetime, using: str) -> JobExecution:
    """Insert the row, or return the live one of its job with the same `active_key`; `created` says which.

    Raises KeyTaken when the holder changed in each of five rounds.
    """
    connection = connections[using]
    conflict = False
    # One look more than inserts: the last conflict is looked at, too.
    for attempt in range(ROUNDS + 1):
        # Read first: most pushes under a taken key meet a row that was there long before, and a refused INSERT costs an
        # error line in the server's log, a dead tuple and, in a transaction, a savepoint.
        holder = find_holder(row.job_name, row.active_key, using=using, conflict=conflict)
        if holder is not None:
            holder.created = False
            return holder
        if attempt == ROUNDS:
            break
        try:
            with savepoint(connection):
                insert(row, now=now, using=using)
        except IntegrityError as error:
            if not is_key_conflict(error):
                raise
            conflict = True
            continue
        row.created = True
        return row
    raise KeyTaken(
        f"{row.job_name} was not pushed: {ROUNDS} times in a row its key {row.key!r} was held by another execution "
        "that was gone a moment later. Push again."
    )


@retried
def insert(row: JobExecution, *, now: datetime, using: str) -> None:
    """Write one new row."""
    transitions.insert([row], now=now, using=using)


def is_key_conflict(error: IntegrityError) -> bool:
    """Whether a live row with the same key is what the database complains of."""
    diagnosis = getattr(error.__cause__, "diag", None)
    if diagnosis is not None:
        # PostgreSQL; its message quotes the row, so the name alone could stand in a payload.
        return bool(diagnosis.constraint_name == CONSTRAINT)
    text = str(error)
    return CONSTRAINT in text or f"{JobExecution._meta.db_table}.active_key" in text


def find_holder(job_name: str, active_key: str | None, *, using: str, conflict: bool = False) -> JobExecution | None:
    """Return the live row of the job under this key as it is now, whatever snapshot the caller's transaction has.

    `conflict` says that the database has just refused this key, so that there is, or was, such a row.
    """
    connection = connections[using]
    wanted = (job_name, active_key)
    if not in_transaction(connection):
        return _read(connection, wanted)
    if connection.vendor == "mysql":
        return _read_innodb(connection, wanted, conflict=conflict)
    seen = _read(connection, wanted)
    if connection.vendor != "postgresql" or (seen is None and not conflict) or _sees_commits(connection):
        return seen
    # The snapshot may hide the winner, or show a row that has ended since. What is seen here and not from outside, and
    # still refuses an INSERT, is a row of this very transaction.
    return _read_apart(connection, wanted) or (seen if conflict else None)


def _read(connection: Any, wanted: tuple[str, str | None], lock: str = "") -> JobExecution | None:
    # By hand: building this query costs the ORM longer than the database takes for it, at every push with a key.
    with connection.cursor() as cursor:
        cursor.execute(_select(connection) + lock, wanted)
        found = READ.executions(cursor.fetchall(), connection)
    return found[0] if found else None


def _select(connection: Any) -> str:
    text = _selects.get(connection.vendor)
    if text is None:
        columns = READ.sql(connection)
        text = f"SELECT {columns} FROM {rows.TABLE} WHERE job_name = %s AND active_key = %s"  # noqa: S608 - our names
        _selects[connection.vendor] = text
    return text


def _read_innodb(connection: Any, wanted: tuple[str, str | None], *, conflict: bool) -> JobExecution | None:
    if not conflict:
        # Without a lock: a locking read that finds nothing locks the gap, and two such pushes deadlock.
        seen = _read(connection, wanted)
        if seen is None or connection.isolation_level in _READ_COMMITTED:
            return seen
    # Sees what is committed now. Shared: two refused INSERTs hold shared locks already, and would deadlock over more.
    return _read(connection, wanted, " LOCK IN SHARE MODE")


def _sees_commits(connection: Any) -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SHOW transaction_isolation")
        return cursor.fetchone()[0] in _READ_COMMITTED


def _read_apart(connection: Any, wanted: tuple[str, str | None]) -> JobExecution | None:
    """Read over a second connection, outside of the caller's transaction."""
    other = connection.copy()
    # Callers like this one each hold a connection of the pool: waiting there for another could be for ever.
    other.settings_dict["OPTIONS"].pop("pool", None)
    try:
        return _read(other, wanted)
    finally:
        other.close()
