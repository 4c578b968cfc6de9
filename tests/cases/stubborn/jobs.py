"""Handlers that do not stop when they are told to, each in its own way; and others with an odd need."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import socket
import threading
import time

from asgiref.sync import sync_to_async
from django.db import connection, transaction

from django_jobs import JobContext, job
from tests.acc.jobs import AT_ONCE, nap, note
from tests.acc.models import Thing

FOR_EVER = 600.0


@job
def in_a_system_call(ctx: JobContext) -> None:
    """Wait for a peer that says nothing."""
    note("START", ctx, "")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.recv(1)


@job(retry=AT_ONCE)
def asleep_retry(ctx: JobContext) -> None:
    """Sleep in one long call."""
    note("START", ctx, "")
    time.sleep(FOR_EVER)


@job(retry=AT_ONCE)
def holding_the_lock_retry(ctx: JobContext) -> None:
    """Keep Python's own lock in a call of C, so that no other thread of the process runs; in the first attempt only."""
    note("START", ctx, "")
    if ctx.attempt == 1:
        ctypes.PyDLL(None).sleep(int(FOR_EVER))


@job(timeout=0.5)
def silent_peer(ctx: JobContext) -> None:
    """Wait, with a time limit, for a peer that says nothing."""
    in_a_system_call.func(ctx)


@job(retry=AT_ONCE)
def swallowing_retry(ctx: JobContext) -> None:
    """Let no exception through."""
    note("START", ctx, "")
    deadline = time.monotonic() + FOR_EVER
    while time.monotonic() < deadline:
        with contextlib.suppress(BaseException):
            time.sleep(0.01)


@job
def shielded(ctx: JobContext) -> None:
    """Stay behind the shield."""
    note("START", ctx, "")
    with ctx.shield():
        for _ in range(int(FOR_EVER * 100)):
            time.sleep(0.01)


@job(interrupt=False)
def uninterruptible(ctx: JobContext) -> None:
    """Belong to a job that forbids interrupts."""
    note("START", ctx, "")
    for _ in range(int(FOR_EVER * 100)):
        time.sleep(0.01)


@job
async def async_deaf(ctx: JobContext) -> None:
    """Go on after each cancel."""
    note("START", ctx, "")
    deadline = time.monotonic() + FOR_EVER
    while time.monotonic() < deadline:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.01)


@job
async def async_in_a_thread(ctx: JobContext) -> None:
    """Wait for a thread that cannot be stopped."""
    note("START", ctx, "")
    await sync_to_async(time.sleep)(FOR_EVER)


@job
async def async_in_the_pool(ctx: JobContext) -> None:
    """Wait for a thread of the loop's own pool that cannot be stopped."""
    note("START", ctx, "")
    await asyncio.to_thread(time.sleep, FOR_EVER)


@job
async def async_blocking(ctx: JobContext) -> None:
    """Block the loop."""
    note("START", ctx, "")
    time.sleep(FOR_EVER)  # noqa: ASYNC251 - that is the fault


@job
def leaving_a_thread(ctx: JobContext) -> None:
    """Return, and leave a thread behind that Python would wait for at its end."""
    threading.Thread(target=time.sleep, args=(FOR_EVER,), daemon=False).start()
    note("END", ctx, "")


@job
def inherits(ctx: JobContext, s: float) -> None:
    """Have the time limit of the settings."""
    nap(ctx, s, heed=False)


@job(timeout=0)
def unlimited(ctx: JobContext, s: float) -> None:
    """Have no time limit, whatever the settings say."""
    nap(ctx, s, heed=False)


@job(timeout=0.5)
def limited(ctx: JobContext, s: float) -> None:
    """Have a time limit of its own."""
    nap(ctx, s, heed=False)


@job
def in_a_snapshot(ctx: JobContext, s: float) -> None:
    """Hold a transaction, and look from inside it whether the run was called off."""
    with transaction.atomic():
        Thing.objects.exists()
        note("START", ctx, "")
        if ctx.signal.wait(s):
            note("SEEN", ctx, "")


@job
def of_many_queries(ctx: JobContext, blob: str = "") -> None:
    """Ask fifty times; tell how many queries the connection remembered before."""
    note("START", ctx, str(len(connection.queries_log)))
    with connection.cursor() as cursor:
        for _ in range(50):
            cursor.execute("SELECT 1")
