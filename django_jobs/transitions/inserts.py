"""New rows, as push, copies and cron ticks write them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from django.db import connections, transaction

from django_jobs import rows
from django_jobs.models import JobExecution
from django_jobs.states import Status

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper


def insert(executions: Sequence[JobExecution], *, now: datetime, using: str) -> None:
    """Write new rows, PENDING or, if their time is yet to come, SCHEDULED; called by push, copies and cron ticks.

    Runs in the caller's transaction. Raises IntegrityError when a live row of the job holds the same key.
    """
    for row in executions:
        later = row.scheduled_at is not None and row.scheduled_at > now
        row.created_at = row.updated_at = row.hinted_at = now
        if not later:
            row.scheduled_at = now
        row.status = Status.SCHEDULED if later else Status.PENDING
    # As in save(): after an error, the caller's transaction must be rolled back before anything else. Since Django 6.1,
    # bulk_create() does not see to it when one statement is enough.
    with transaction.mark_for_rollback_on_error(using=using):
        if len(executions) == 1:
            _insert_one(executions[0], connections[using])
        else:
            JobExecution.objects.using(using).bulk_create(executions)


def _insert_one(row: JobExecution, connection: BaseDatabaseWrapper) -> None:
    # Model.save() takes twice as long for forty fields. Columns without a value become NULL.
    names, values = rows.filled(row, connection)
    statement = f"INSERT INTO {rows.TABLE} ({', '.join(names)}) VALUES ({', '.join(['%s'] * len(names))})"
    with connection.cursor() as cursor:
        cursor.execute(statement, values)
    row._state.adding, row._state.db = False, connection.alias
