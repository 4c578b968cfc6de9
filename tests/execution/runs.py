"""Runs of throw-away jobs, with rows that are in no table, in this thread or another one."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from django_jobs import registry
from django_jobs.definition import job
from django_jobs.execution.executor import execute
from django_jobs.execution.outcomes import Outcome
from django_jobs.execution.run import Run
from django_jobs.models import JobExecution

STARTED = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
PATIENCE = 10.0


def row_of(name: str, payload: dict[str, Any] | None = None, **values: Any) -> JobExecution:
    """An execution as a claim returns it, unsaved."""
    values = {"attempt": 1, "max_attempts": 1, "started_at": STARTED} | values
    row = JobExecution(job_name=name, payload=payload or {}, **values)
    row._payload_json = json.dumps(payload or {})
    return row


def run_of(
    func: Callable[..., Any],
    payload: dict[str, Any] | None = None,
    *,
    attempt: int = 1,
    max_attempts: int = 1,
    manage_connections: bool = False,
    **options: Any,
) -> Run:
    """A run of a job made from the function; the connections are the test's."""
    with registry.isolated():
        defined = job(name="tests.sample", **options)(func)
    row = row_of(defined.name, payload, attempt=attempt, max_attempts=max_attempts)
    return Run(row, defined, worker="host.test pid 7", manage_connections=manage_connections)


def outcome_of(func: Callable[..., Any], payload: dict[str, Any] | None = None, **options: Any) -> Any:
    """What running the function as a job comes to."""
    return execute(run_of(func, payload, **options))


class Slot:
    """A thread that executes one run."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._outcome: list[Outcome] = []
        self._thread = threading.Thread(target=lambda: self._outcome.append(execute(run)), daemon=True)
        self._thread.start()

    def outcome(self) -> Any:
        """Wait for the end and return the outcome."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the run did not end"
        return self._outcome[0]

    def is_running(self) -> bool:
        return self._thread.is_alive()


def spin(release: threading.Event) -> None:
    """Stay in Python code, where an exception can land, until released."""
    for _ in range(int(PATIENCE * 1000)):
        if release.wait(0.001):
            return
    raise AssertionError("nobody came")
