"""What `runjobs` does before it starts anything: check its options, wait for the database, say what it will do."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from django.db import Error, connections

from django_jobs import dispatchers, registry
from django_jobs.conf import Settings, get_settings
from django_jobs.exceptions import DefinitionError
from django_jobs.execution.liveness import package_version
from django_jobs.models import JobExecution, JobStat, JobState, QueueState, Worker
from django_jobs.options import queue as checked_queue
from django_jobs.pooling import bypass_pool, pool_size
from django_jobs.runtime.limits import Limits
from django_jobs.schedules import configured
from django_jobs.text import one_line

ROLES = ("worker", "scheduler", "sweep")
# Longer than a restart of the database takes, and well within the minute in which a supervisor wants to know.
PATIENCE = 30.0


class UsageError(Exception):
    """An option or a setting is wrong; the text says which, and the mend."""


class DatabaseNotReady(Exception):
    """The database cannot be reached, or has no tables of ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What this process is to do; checked and filled in from the settings."""

    roles: tuple[str, ...]
    # None is any queue.
    queues: tuple[str, ...] | None
    exclude: tuple[str, ...]
    concurrency: int
    once: bool
    max_time: float | None
    limits: Limits
    # How many supervised workers; None is this very process.
    processes: int | None
    # Where to tell how the process is.
    health_port: int | None
    heartbeat_file: Path | None

    @classmethod
    def of(
        cls,
        *,
        roles: Collection[str] = (),
        queues: Sequence[str] | None = None,
        exclude: Sequence[str] = (),
        concurrency: int | None = None,
        once: bool = False,
        max_time: float | None = None,
        max_jobs: int | None = None,
        max_memory: float | None = None,
        processes: int | None = None,
        health_port: int | None = None,
        heartbeat_file: Path | None = None,
    ) -> Options:
        """Check what was asked for; no role named means all of them. Raises UsageError."""
        settings = get_settings()
        named = settings.queues if queues is None else tuple(_queue(name, "--queues") for name in queues)
        if named is not None and not named:
            raise UsageError("--queues names no queue; give names separated by commas, or leave it out for any queue.")
        try:
            configured("SWEEP_CRON")
            configured("TRIM_CRON")
        except DefinitionError as error:
            raise UsageError(str(error)) from error
        left_out = tuple(_queue(name, "--exclude") for name in exclude)
        if named is not None and not set(named) - set(left_out):
            raise UsageError(f"--exclude leaves no queue to serve of {', '.join(named)}.")
        if concurrency is not None and concurrency < 1:
            raise UsageError(f"--concurrency is {concurrency}; expected a whole number from 1 up.")
        if max_time is not None and not 0 < max_time < float("inf"):
            raise UsageError(f"--max-time is {max_time:g}; expected more than 0 seconds.")
        if max_jobs is not None and max_jobs < 1:
            raise UsageError(f"--max-jobs is {max_jobs}; expected a whole number from 1 up.")
        if max_memory is not None and not 0 < max_memory < float("inf"):
            raise UsageError(f"--max-memory is {max_memory:g}; expected more than 0 megabytes.")
        if health_port is not None and not 0 < health_port < 65536:
            raise UsageError(f"--health-port is {health_port}; expected a port from 1 to 65535.")
        chosen = tuple(role for role in ROLES if not roles or role in roles)
        if processes is not None:
            _check_processes(processes, roles=chosen, once=once)
        return cls(
            roles=chosen,
            queues=named,
            exclude=left_out,
            concurrency=settings.concurrency if concurrency is None else concurrency,
            once=once,
            max_time=max_time,
            limits=Limits(max_jobs=max_jobs, max_memory=max_memory),
            processes=processes,
            health_port=health_port,
            heartbeat_file=heartbeat_file,
        )

    @property
    def served(self) -> tuple[str, ...] | None:
        """The queues to serve; None for any but those in `exclude`."""
        return None if self.queues is None else tuple(name for name in self.queues if name not in self.exclude)


def _check_processes(processes: int, *, roles: Collection[str], once: bool) -> None:
    if processes < 1:
        raise UsageError(f"--processes is {processes}; expected a whole number from 1 up.")
    if once:
        raise UsageError(
            "--once ends by itself and --processes starts again what ends: give one of them; "
            "--concurrency makes --once run more at a time."
        )
    if "worker" not in roles:
        raise UsageError(
            f"--processes starts workers, and {' '.join(f'--{role}' for role in roles)} asks for none: add --worker, "
            "or leave out --processes, since one process is enough."
        )


def _queue(name: str, option: str) -> str:
    try:
        return checked_queue(name.strip())
    except DefinitionError as error:
        raise UsageError(f"{option}: {error}") from error


def refuse_transaction(using: str) -> None:
    """Raise UsageError inside a transaction: threads have connections of their own, and would see none of its rows."""
    if connections[using].in_atomic_block:
        raise UsageError(
            f"runjobs was called inside a transaction on the database {using!r}: its workers have connections of their "
            "own and see only what is committed. Call it outside; in tests, use TransactionTestCase."
        )


def wait_for_database(using: str, say: Callable[[str], None], *, patience: float = PATIENCE) -> None:
    """Return once the database answers; raise DatabaseNotReady when it did not within `patience` seconds."""
    deadline = time.monotonic() + patience
    told = False
    while True:
        fault = _try(using, deadline)
        if fault is None:
            return
        if time.monotonic() > deadline - 1:
            raise DatabaseNotReady(f"The database {using!r} cannot be reached: {fault}")
        if not told:
            say(f"waiting for the database {using!r} for up to {patience:g} s: {fault}")
            told = True
        time.sleep(1)


def _try(using: str, deadline: float) -> str | None:
    """Return what is wrong with the connection, in one line; None when it works."""
    # In a thread of its own: some drivers wait for minutes inside C when the host does not answer.
    results: list[BaseException | None] = []

    def connect() -> None:
        try:
            bypass_pool()
            with connections[using].cursor() as cursor:
                cursor.execute("SELECT 1")
            results.append(None)
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that asked
            results.append(error)
        finally:
            connections[using].close()

    thread = threading.Thread(target=connect, name="django_jobs connect", daemon=True)
    thread.start()
    while thread.is_alive() and time.monotonic() < deadline:
        thread.join(0.1)
    if not results:
        return "no answer"
    error = results[0]
    if isinstance(error, Error):
        return one_line(error)
    if error is not None:
        raise error
    return None


def check_tables(using: str) -> None:
    """Raise DatabaseNotReady when a table of ours is missing."""
    connection = connections[using]
    wanted = {model._meta.db_table for model in (JobExecution, JobState, QueueState, Worker, JobStat)}
    with connection.cursor() as cursor:
        missing = wanted - set(connection.introspection.table_names(cursor))
    if missing:
        command = "manage.py migrate" + ("" if using == "default" else f" --database {using}")
        raise DatabaseNotReady(f"The database {using!r} has no table {min(missing)}; run {command} first.")


def welcome(options: Options, using: str) -> list[str]:
    """Return the lines that say what this process is about to do."""
    settings = get_settings()
    jobs = registry.all_jobs()
    modes = ", ".join(f"{count} {mode}" for mode, count in sorted(Counter(job.mode for job in jobs).items()))
    lines = [
        " ".join(filter(None, ["django_jobs", package_version(), f"on {socket.gethostname()}, pid {os.getpid()}:"]))
        + f" {', '.join(options.roles)}",
        f"jobs: {len(jobs)}" + (f" ({modes})" if modes else ""),
    ]
    if "worker" in options.roles:
        queues = "any" if options.queues is None else ", ".join(options.queues)
        without = f" except {', '.join(options.exclude)}" if options.exclude else ""
        times = "" if options.processes is None else f"{options.processes} times "
        lines.append(f"queues: {queues}{without}; slots: {times}{options.concurrency}")
        known = {job.queue for job in jobs}
        if unused := sorted(set(options.served or ()) - known):
            lines.append(f"no job here declares the queue {', '.join(unused)}; declared: {', '.join(sorted(known))}")
        lines += _small_pools(options.concurrency)
    return [*lines, f"database: {using} ({connections[using].display_name}); {_wake_up(settings)}"]


def _small_pools(slots: int) -> list[str]:
    return [
        f"the pool of the database {alias!r} has {size} connections for {slots} slots: handlers that use it wait for "
        f"each other; give it OPTIONS['pool'] = {{'max_size': {slots}}} or more"
        for alias in connections
        if (size := pool_size(alias)) is not None and size < slots
    ]


def _wake_up(settings: Settings) -> str:
    return f"wake-up: {dispatchers.get_dispatcher().describe()}, and a look every {settings.poll_interval:g} s"
