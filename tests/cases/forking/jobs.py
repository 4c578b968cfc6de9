"""Jobs that use the ORM, here and in processes that they make."""

from __future__ import annotations

import multiprocessing
import time

from django.db import connection, transaction

from django_jobs import JobContext, job
from tests.acc.jobs import note
from tests.acc.models import Thing
from tests.cases.forking import effects


@job
def touching(ctx: JobContext, name: str) -> str:
    """Write, read, and tell which session of the server did it."""
    note("START", ctx, name)
    Thing.objects.create(name=name)
    assert Thing.objects.filter(name=name).exists()
    if connection.vendor != "postgresql":
        return ""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        return str(cursor.fetchone()[0])


@job
def multiplying(ctx: JobContext, name: str, method: str) -> int:
    """Have another process write while this one holds a connection; return its exit code."""
    note("START", ctx, name)
    Thing.objects.create(name=f"{name} before")
    process = multiprocessing.get_context(method).Process(target=effects.make, args=(name,))
    process.start()
    process.join(30)
    Thing.objects.create(name=f"{name} after")
    assert process.exitcode is not None, "it hangs"
    return process.exitcode


@job
def terminating(ctx: JobContext) -> int:
    """Make a process and end it as multiprocessing does; return how it ended."""
    process = multiprocessing.get_context("fork").Process(target=effects.wait_for_ever)
    process.start()
    process.terminate()
    process.join(10)
    ended = process.exitcode
    process.kill()
    assert ended is not None, "it does not end"
    return ended


@job
def holding(ctx: JobContext, s: float) -> None:
    """Hold a connection for some seconds."""
    note("START", ctx, "")
    with transaction.atomic():
        Thing.objects.create(name="held")
        time.sleep(s)
