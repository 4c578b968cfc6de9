"""Jobs that use the ORM, here and in processes that they make."""

from __future__ import annotations

import multiprocessing
import threading
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


_used, _started = threading.Barrier(effects.TOGETHER), threading.Barrier(effects.TOGETHER)


@job
def multiplying(ctx: JobContext, name: str, method: str) -> int:
    """Have another process write while this one does, over a connection that it holds; return the exit code.

    None begins while the others are in the database: a fork would keep the locks that a library of the driver held.
    """
    note("START", ctx, name)
    Thing.objects.create(name=f"{name} before")
    process = multiprocessing.get_context(method).Process(target=effects.make, args=(name,))
    _used.wait(30)
    process.start()
    _started.wait(30)
    give_up_at = time.monotonic() + 45
    while process.exitcode is None:
        assert time.monotonic() < give_up_at, "it hangs"
        assert Thing.objects.filter(name=f"{name} before").exists()
        process.join(0.1)
    Thing.objects.create(name=f"{name} after")
    return process.exitcode


@job
def collecting(ctx: JobContext) -> list[int]:
    """Have a fork collect garbage; return how many connections are open here, and how many of them it closed."""
    connections = effects.opened()
    process = multiprocessing.get_context("fork").Process(target=effects.collect, args=(connections,))
    process.start()
    process.join(30)
    assert process.exitcode is not None, "it hangs"
    return [len(connections), process.exitcode]


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
