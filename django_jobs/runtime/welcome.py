"""The lines with which `runjobs` says what it is about to do."""

from __future__ import annotations

import os
import socket
from collections import Counter

from django.db import connections

from django_jobs import dispatchers, registry
from django_jobs.conf import Settings, get_settings
from django_jobs.execution.liveness import package_version
from django_jobs.pooling import pool_size
from django_jobs.runtime.options import Options
from django_jobs.served import Served


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
        times = "" if options.processes is None else f"{options.processes} times "
        lines.append(f"queues: {_told(options.served)}; slots: {times}{options.concurrency}")
        known = registry.queues()
        if unused := sorted(options.served.among(known) - known):
            lines.append(f"no job declares the queue {', '.join(unused)}; declared: {', '.join(sorted(known))}")
        lines += _small_pools(options.concurrency)
    else:
        lines.append("runs no jobs: that takes a process with --worker, or without any role")
    crons = sum(job.mode == "cron" for job in jobs)
    if crons and "scheduler" not in options.roles:
        which = f"{crons} cron job{'' if crons == 1 else 's'}"
        lines.append(f"fires no ticks of the {which}: that takes a process with --scheduler, or without any role")
    return [*lines, f"database: {using} ({connections[using].display_name}); {_wake_up(settings)}"]


def _told(served: Served) -> str:
    names = ", ".join(sorted(served.names))
    if not served.is_any_but:
        return names
    return f"any except {names}" if names else "any"


def _small_pools(slots: int) -> list[str]:
    return [
        f"the pool of the database {alias!r} has {size} connections for {slots} slots: handlers that use it wait for "
        f"each other; give it OPTIONS['pool'] = {{'max_size': {slots}}} or more"
        for alias in connections
        if (size := pool_size(alias)) is not None and size < slots
    ]


def _wake_up(settings: Settings) -> str:
    return f"wake-up: {dispatchers.get_dispatcher().describe()}, and a poll every {settings.poll_interval:g} s"
