"""`jobs push`, `trigger`, `pause` and `resume`: the commands that act on a job or a queue."""

from __future__ import annotations

import getpass
import json
import os
import re
import socket
from collections.abc import Callable
from typing import Any

from django_jobs import dispatchers, registry, services
from django_jobs.cli import records
from django_jobs.cli.choosing import seconds
from django_jobs.cli.errors import NothingDone, UsageError
from django_jobs.cli.terminal import Terminal
from django_jobs.models import JobExecution
from django_jobs.options import BY_LENGTH
from django_jobs.reading.queues import named_queues
from django_jobs.reading.waiting import pause_of
from django_jobs.text import clean_text, some

# The most queues that a line lists.
NAMED = 10


def default_by() -> str:
    """Return who did it when --by names nobody: the command line, with the user and host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # In a container the user id may have no name.
        user = str(os.getuid())
    return clean_text(f"command line ({user}@{socket.gethostname()})", BY_LENGTH)


def push(
    terminal: Terminal, name: str, payload: str, *, delay: str | None, priority: str | None, **options: Any
) -> None:
    """Push one execution; the payload is the text of a JSON object, the options are those of using()."""
    job = registry.get(name)
    if job.cron is not None:
        raise UsageError(f"{job.name} is a cron job, which cannot be pushed: manage.py jobs trigger {job.name}")
    values = job.schema.rebuild(_object(payload))
    if delay is not None:
        options["delay"] = seconds(delay, "--delay")
    if priority is not None:
        # Longer numbers, which Python may refuse to read, are as wrong as words that it does not know.
        options["priority"] = int(priority) if re.fullmatch(r"-?\d{1,9}", priority) else priority
    # Whatever the dispatcher, nothing runs in this process, which is about to end.
    with dispatchers.get_dispatcher().without_running():
        row = job.using(**options).push(**values)
    if not row.created:
        raise NothingDone(f"{job.name} was not pushed: {row} has the key {row.key!r} and is {row.status}.")
    _tell(terminal, row, "pushed")


def trigger(terminal: Terminal, name: str, *, by: str) -> None:
    """Run a cron job now."""
    job = registry.get(name)
    if job.cron is None:
        raise UsageError(f"{job.name} is a pushed job and trigger is for cron jobs: manage.py jobs push {job.name}")
    with dispatchers.get_dispatcher().without_running():
        row = job.trigger(by=by)
    _tell(terminal, row, "triggered")


def pause(terminal: Terminal, name: str | None, queue: str | None, *, by: str) -> None:
    """Pause a job or a queue."""
    subject, changed = _pause_or_resume(services.pause_job, services.pause_queue, name, queue, by=by)
    terminal.json({"job": name, "queue": queue, "is_paused": True, "changed": changed})
    if not changed:
        raise NothingDone(f"{subject} was already paused.")
    note = "" if queue is None or queue in (declared := named_queues()) else f"; {_undeclared(declared)}"
    terminal.line(f"{subject} is paused{note}.")


def resume(terminal: Terminal, name: str | None, queue: str | None, *, by: str) -> None:
    """Resume a job or a queue."""
    subject, changed = _pause_or_resume(services.resume_job, services.resume_queue, name, queue, by=by)
    terminal.json({"job": name, "queue": queue, "is_paused": False, "changed": changed})
    if not changed:
        raise NothingDone(f"{subject} was not paused.")
    terminal.line(f"{subject} was resumed.")


def _pause_or_resume(
    on_job: Callable[..., bool], on_queue: Callable[..., bool], name: str | None, queue: str | None, *, by: str
) -> tuple[str, bool]:
    """Call the verb for the job or the queue; return its name for a message, and whether anything changed."""
    if name is not None and queue is None:
        return name, on_job(name, by=by)
    if queue is not None and name is None:
        return f"The queue {queue}", on_queue(queue, by=by)
    raise UsageError("Give the name of a job, or --queue with the name of a queue.")


def _undeclared(declared: set[str]) -> str:
    return f"no job here declares it (declared: {some(sorted(declared), NAMED)})"


def _object(text: str) -> str:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--payload cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f'--payload is a JSON {type(value).__name__}; expected an object, {{"parameter": value}}.')
    return text


def _tell(terminal: Terminal, row: JobExecution, verb: str) -> None:
    terminal.json(records.brief(row))
    note = "".join(f"; {why}" for why in pause_of(row))
    terminal.line(f"{row} was {verb}, and is {row.status}{note}.")
