"""The options of one `runjobs`, checked and completed from the settings; made by the command and by the view."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from django_jobs.conf import get_settings
from django_jobs.exceptions import DefinitionError
from django_jobs.options import queue as checked_queue
from django_jobs.runtime.limits import Limits
from django_jobs.schedules import configured
from django_jobs.served import Served

ROLES = ("worker", "scheduler", "sweep")
# More than machines have cores for: a slip of the finger is not to take one down.
MOST_PROCESSES = 1000


class UsageError(Exception):
    """An option or a setting is wrong; the text says which, and how to correct it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What this process is to do; checked and completed from the settings."""

    roles: tuple[str, ...]
    served: Served
    concurrency: int
    once: bool
    max_time: float | None
    limits: Limits
    # The number of supervised workers; None means that this process is the worker.
    processes: int | None
    # Where the health of the process is reported.
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
        """Check the options; no role means all of them. Raises UsageError."""
        settings = get_settings()
        named = settings.queues if queues is None else tuple(_queue(name, "--queues") for name in queues)
        if named is not None and not named:
            raise UsageError("--queues names no queue; give names separated by commas, or leave it out to serve any.")
        try:
            configured("SWEEP_CRON")
            configured("TRIM_CRON")
        except DefinitionError as error:
            raise UsageError(str(error)) from error
        left_out = tuple(_queue(name, "--exclude") for name in exclude)
        if not (served := Served.of(named, left_out)):
            raise UsageError(f"--exclude takes away every queue of {', '.join(named or ())}; leave one to serve.")
        if concurrency is not None and concurrency < 1:
            raise UsageError(f"--concurrency is {concurrency}; expected a whole number of at least 1.")
        if max_time is not None and not 0 < max_time < float("inf"):
            raise UsageError(f"--max-time is {max_time:g}; expected more than 0 seconds.")
        if max_jobs is not None and max_jobs < 1:
            raise UsageError(f"--max-jobs is {max_jobs}; expected a whole number of at least 1.")
        if max_memory is not None and not 0 < max_memory < float("inf"):
            raise UsageError(f"--max-memory is {max_memory:g}; expected more than 0 megabytes.")
        if health_port is not None and not 0 < health_port < 65536:
            raise UsageError(f"--health-port is {health_port}; expected a port from 1 to 65535.")
        chosen = tuple(role for role in ROLES if not roles or role in roles)
        if processes is not None:
            _check_processes(processes, roles=chosen, once=once)
        return cls(
            roles=chosen,
            served=served,
            concurrency=settings.concurrency if concurrency is None else concurrency,
            once=once,
            max_time=max_time,
            limits=Limits(max_jobs=max_jobs, max_memory=max_memory),
            processes=processes,
            health_port=health_port,
            heartbeat_file=heartbeat_file,
        )


def _check_processes(processes: int, *, roles: Collection[str], once: bool) -> None:
    if not 1 <= processes <= MOST_PROCESSES:
        raise UsageError(f"--processes is {processes}; expected a whole number from 1 to {MOST_PROCESSES}.")
    if once:
        raise UsageError(
            "--once ends by itself and --processes restarts what ends: give only one of them; "
            "with --once, --concurrency runs more at a time."
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
