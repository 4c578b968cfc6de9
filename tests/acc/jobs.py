"""Jobs that write START and END lines into the file named by ACC_LEDGER; the table alone cannot say how often one ran.

A line is `START|END <row id> <attempt> <pid> <time> <tag>`. Names that end in `_retry` are the same with retries.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from django_jobs import JobContext, Retry, job
from tests.acc.models import Thing

logger = logging.getLogger(__name__)

AT_ONCE = Retry(2, backoff=None)


def note(event: str, ctx: JobContext, tag: str) -> None:
    """Append one line; O_APPEND keeps the lines of many processes whole."""
    path = os.environ.get("ACC_LEDGER")
    if not path:
        return
    line = f"{event} {ctx.execution_id} {ctx.attempt} {os.getpid()} {time.time():.6f} {tag}\n"
    ledger = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(ledger, line.encode())
    finally:
        os.close(ledger)


@contextlib.contextmanager
def noted(ctx: JobContext, tag: str) -> Iterator[None]:
    """Write START before, and END after if nothing was raised."""
    note("START", ctx, tag)
    yield
    # Not reached when the handler raised, and reached by a return.
    note("END", ctx, tag)


def nap(ctx: JobContext, s: float, *, heed: bool) -> None:
    """Sleep in steps of 0.2 s; with `heed` end early once the signal is set."""
    deadline = time.monotonic() + s
    while (left := deadline - time.monotonic()) > 0:
        if heed:
            if ctx.signal.wait(min(0.2, left)):
                return
        else:
            time.sleep(min(0.2, left))


def play(ctx: JobContext, act: str, *, s: float, text: str, exit_code: int) -> str:
    """Do what the scripted job was told."""
    match act:
        case "fail":
            raise ValueError(text)
        case "sleep":
            nap(ctx, s, heed=False)
        case "log":
            logger.info("%s", text)
        case "exit":
            os._exit(exit_code)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    return text


def await_file(ctx: JobContext, path: str, s: float) -> None:
    """Return when the file exists or the signal is set; raise TimeoutError after s seconds."""
    deadline = time.monotonic() + s
    while not Path(path).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(path)
        if ctx.signal.wait(0.02):
            return


Act = Literal["ok", "fail", "sleep", "log", "exit", "kill"]


@job
def mark(ctx: JobContext, tag: str = "") -> None:
    """Do nothing but tell."""
    with noted(ctx, tag):
        pass


@job(retry=AT_ONCE)
def mark_retry(ctx: JobContext, tag: str = "") -> None:
    """Do nothing but tell."""
    with noted(ctx, tag):
        pass


@job
def slow(ctx: JobContext, s: float = 1.0, tag: str = "", heed: bool = False) -> None:
    """Sleep; look at the signal only when told to heed it."""
    with noted(ctx, tag):
        nap(ctx, s, heed=heed)


@job(retry=AT_ONCE)
def slow_retry(ctx: JobContext, s: float = 1.0, tag: str = "", heed: bool = False) -> None:
    """Sleep; look at the signal only when told to heed it."""
    with noted(ctx, tag):
        nap(ctx, s, heed=heed)


@job
def boom(ctx: JobContext, text: str = "boom", tag: str = "") -> None:
    """Raise ValueError."""
    with noted(ctx, tag):
        raise ValueError(text)


@job(retry=AT_ONCE)
def boom_retry(ctx: JobContext, text: str = "boom", tag: str = "") -> None:
    """Raise ValueError."""
    with noted(ctx, tag):
        raise ValueError(text)


@job
def gate(ctx: JobContext, path: str, s: float = 30.0, tag: str = "") -> None:
    """Wait for a file."""
    with noted(ctx, tag):
        await_file(ctx, path, s)


@job(retry=AT_ONCE)
def gate_retry(ctx: JobContext, path: str, s: float = 30.0, tag: str = "") -> None:
    """Wait for a file."""
    with noted(ctx, tag):
        await_file(ctx, path, s)


@job
def scripted(
    ctx: JobContext, act: Act = "ok", s: float = 1.0, text: str = "scripted", exit_code: int = 3, tag: str = ""
) -> str:
    """Do as told."""
    with noted(ctx, tag):
        return play(ctx, act, s=s, text=text, exit_code=exit_code)


@job(retry=AT_ONCE)
def scripted_retry(
    ctx: JobContext, act: Act = "ok", s: float = 1.0, text: str = "scripted", exit_code: int = 3, tag: str = ""
) -> str:
    """Do as told."""
    with noted(ctx, tag):
        return play(ctx, act, s=s, text=text, exit_code=exit_code)


@job
async def async_mark(ctx: JobContext, s: float = 0.0, tag: str = "") -> None:
    """Sleep on the event loop."""
    with noted(ctx, tag):
        await asyncio.sleep(s)


@job
async def async_gate(ctx: JobContext, path: str, s: float = 30.0, tag: str = "") -> None:
    """Wait for a file on the event loop."""
    with noted(ctx, tag):
        async with asyncio.timeout(s):
            while not Path(path).exists():  # noqa: ASYNC110, ASYNC240 - another process makes it
                await asyncio.sleep(0.02)


@job(atomic=True, retry=AT_ONCE)
def atomic_thing(ctx: JobContext, name: str, s: float = 0.0, fail: bool = False, tag: str = "") -> None:
    """Make a Thing, then sleep, then perhaps fail: the row must be there exactly if the run ends ok."""
    with noted(ctx, tag):
        Thing.objects.create(name=name)
        nap(ctx, s, heed=False)
        if fail:
            raise ValueError(name)


@job(atomic=True, retry=AT_ONCE)
def atomic_gate(ctx: JobContext, name: str, path: str, s: float = 30.0, tag: str = "") -> None:
    """Make a Thing, tell that it is there, and wait for a file."""
    with noted(ctx, tag):
        Thing.objects.create(name=name)
        note("MADE", ctx, tag)
        await_file(ctx, path, s)


@job
def see_thing(ctx: JobContext, thing_id: int, tag: str = "") -> None:
    """Fail unless the Thing is there."""
    with noted(ctx, tag):
        Thing.objects.get(pk=thing_id)


@job(retry=AT_ONCE, concurrency=2)
def pair(ctx: JobContext, s: float = 0.0, tag: str = "") -> None:
    """Sleep; two of these at most run at once."""
    with noted(ctx, tag):
        time.sleep(s)


# A tick disturbs every test that counts rows, so there is one only where a test's process asks for it.
if cron := os.environ.get("ACC_CRON"):

    @job(cron=cron, overlap="allow" if "ACC_CRON_OVERLAP" in os.environ else "skip")
    def tick(ctx: JobContext) -> None:
        """Tell that a tick ran."""
        with noted(ctx, "tick"):
            pass


if "ACC_PULSE" in os.environ:

    @job(cron="* * * * * *", overlap="allow")
    def pulse() -> None:
        """Leave a row for each second in which a scheduler looked at its jobs."""
