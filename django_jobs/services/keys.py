"""Dedup keys: insert a row or find the live one that holds its key; and the key that a cron job's rows share."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from django.db import IntegrityError, connections

from django_jobs import registry, rows, transitions
from django_jobs.contention import in_transaction, retried
from django_jobs.exceptions import KeyTaken
from django_jobs.models import JobExecution
from django_jobs.services._entry import savepoint

if TYPE_CHECKING:
    from django_jobs.definition import Job

# Without what only the end of a run writes; logs are the large ones.
READ = rows.Columns(
    {field.attname for field in JobExecution._meta.concrete_fields}.difference({"logs", "result", "progress"})
)
ROUNDS = 5
CONSTRAINT = "django_jobs_active_key"
_READ_COMMITTED = {"read committed", "read uncommitted"}
# By vendor and number of names.
_selects: dict[tuple[str, int], str] = {}
# The names of a job, and a key.
_Wanted = tuple[Sequence[str], str | None]


def overlap_key(job: Job[...]) -> str | None:
    """Return the `active_key` that all ticks and triggers of a job with overlap="skip" share, or None for other jobs.

    It cannot equal the digest of a user's key, which is 48 hexadecimal digits.
    """
    return "overlap" if job.cron is not None and job.overlap == "skip" else None


def insert_or_find(row: JobExecution, *, now: datetime, using: str) -> JobExecution:
    """Insert the row, or return the live one of its job with the same `active_key`; `created` says which it was.

    Raises KeyTaken when the holder changed in each of five rounds.
    """
    connection = connections[using]
    job = registry.find(row.job_name)
    names = (row.job_name,) if job is None else job.names
    conflict = False
    # One more look than INSERTs, so that the holder after the last conflict is found as well.
    for attempt in range(ROUNDS + 1):
        # Read first: most pushes under a taken key meet a row that has long been there, and a refused INSERT costs an
        # error in the server's log, a dead tuple and, in a transaction, a savepoint.
        holder = find_holder(names, row.active_key, using=using, conflict=conflict)
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
        f"{row.job_name} was not pushed: {ROUNDS} times in a row, its key {row.key!r} was held by another execution "
        "that was gone a moment later. Push again."
    )


@retried
def insert(row: JobExecution, *, now: datetime, using: str) -> None:
    """Write one new row."""
    transitions.insert([row], now=now, using=using)


def is_key_conflict(error: IntegrityError) -> bool:
    """Whether the database refused the row because a live one has the same key."""
    diagnosis = getattr(error.__cause__, "diag", None)
    if diagnosis is not None:
        # PostgreSQL. Its message quotes the row, and a payload could contain the constraint's name.
        return bool(diagnosis.constraint_name == CONSTRAINT)
    text = str(error)
    return CONSTRAINT in text or f"{JobExecution._meta.db_table}.active_key" in text


def held_by_namesake(row: JobExecution, job: Job[...], active_key: str | None, *, using: str) -> JobExecution | None:
    """Return the live row with this key that the job has under another name than the row's, or None.

    The unique index knows nothing of aliases; for jobs without any this costs nothing.
    """
    others = job.names_besides(row.job_name)
    return find_holder(others, active_key, using=using) if others and active_key is not None else None


@retried
def find_holder(
    names: Sequence[str], active_key: str | None, *, using: str, conflict: bool = False
) -> JobExecution | None:
    """Return the row under these names of a job that holds this key now, whatever the caller's transaction sees.

    `conflict` says that the database has just refused this key, so that such a row exists, or did.
    """
    connection = connections[using]
    wanted = (names, active_key)
    if not in_transaction(connection):
        return _read(connection, wanted)
    if connection.vendor == "mysql":
        return _read_innodb(connection, wanted, conflict=conflict)
    seen = _read(connection, wanted)
    if connection.vendor != "postgresql" or (seen is None and not conflict) or _sees_commits(connection):
        return seen
    # The snapshot may hide the winner, or show a row that has ended since. A row that is seen here but not from
    # outside, and still refuses an INSERT, was written by this very transaction.
    return _read_apart(connection, wanted) or (seen if conflict else None)


def _read(connection: Any, wanted: _Wanted, lock: str = "") -> JobExecution | None:
    # By hand: at every push with a key, the ORM would take longer to build this query than the database to answer it.
    names, active_key = wanted
    with connection.cursor() as cursor:
        cursor.execute(_select(connection, len(names)) + lock, [*names, active_key])
        found = READ.executions(cursor.fetchall(), connection)
    return found[0] if found else None


def _select(connection: Any, names: int) -> str:
    text = _selects.get((connection.vendor, names))
    if text is None:
        among = ", ".join(["%s"] * names)
        text = f"SELECT {READ.sql(connection)} FROM {rows.TABLE} WHERE job_name IN ({among}) AND active_key = %s"  # noqa: S608 - our names
        _selects[connection.vendor, names] = text
    return text


def _read_innodb(connection: Any, wanted: _Wanted, *, conflict: bool) -> JobExecution | None:
    if not conflict:
        # Without a lock: a locking read that finds nothing locks the gap, and two such pushes would deadlock.
        seen = _read(connection, wanted)
        if seen is None or connection.isolation_level in _READ_COMMITTED:
            return seen
    # A locking read sees what is committed now. Two refused INSERTs hold shared locks already, and would deadlock if
    # each wanted an exclusive one.
    return _read(connection, wanted, " LOCK IN SHARE MODE")


def _sees_commits(connection: Any) -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SHOW transaction_isolation")
        return cursor.fetchone()[0] in _READ_COMMITTED


def _read_apart(connection: Any, wanted: _Wanted) -> JobExecution | None:
    """Read over a second connection, outside of the caller's transaction."""
    other = connection.copy()
    # Every caller holds a connection of the pool: if all waited there for a second one, they would wait for ever.
    other.settings_dict["OPTIONS"].pop("pool", None)
    try:
        return _read(other, wanted)
    finally:
        other.close()
