"""Helpers for tests: wait for an event, read the ledger of the acc jobs, run `runjobs` as a process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tests.engines import die_with_parent

if TYPE_CHECKING:
    from django_jobs.models import JobExecution

T = TypeVar("T")
ROOT = Path(__file__).resolve().parent.parent

# Whether this is `make test-scale`: see sized().
FULL_SIZE = os.environ.get("FULL_SIZE") == "1"

# Durations for processes that tests wait for; JSON, since they travel to the process in its environment.
SHORT: dict[str, Any] = {
    "POLL_INTERVAL": 0.2,
    "HEARTBEAT_INTERVAL": 1,
    "WORKER_LOST_AFTER": 3,
    # Six fields: the seconds come last, so this is each second.
    "SWEEP_CRON": "* * * * * *",
    "DRAIN_TIMEOUT": 2,
    "INTERRUPT_GRACE": 1,
}


def sized(usual: T, full: T) -> T:
    """Return the full size of a case in `make test-scale`, and the usual, smaller one in any other run."""
    return full if FULL_SIZE else usual


def wait_for(predicate: Callable[[], T], timeout: float, message: str) -> T:
    """Return the predicate's first true value; fail with the message after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        if value := predicate():
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"Within {timeout} s it did not come true: {message}; the last value was {value!r}.")
        time.sleep(0.02)


def became(row: JobExecution, status: str, timeout: float = 20) -> JobExecution:
    """Wait until the row has this status, and return it."""

    def is_there() -> bool:
        row.refresh_from_db()
        return row.status == status

    wait_for(is_there, timeout, f"{row} became {status}")
    return row


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of the ledger: a handler that began or returned."""

    event: str
    row_id: str
    attempt: int
    pid: int
    time: float
    tag: str


class Ledger:
    """The file in which the acc jobs write that they ran; unlike the table it cannot be wrong about it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Tests ask all the time, and lines never change: each is read once.
        self._known: list[Entry] = []
        self._size = 0
        self._reading = threading.Lock()

    def entries(
        self, event: str | None = None, row_id: uuid.UUID | str | None = None, tag: str | None = None
    ) -> list[Entry]:
        self._read_on()
        row = None if row_id is None else str(row_id)
        return [
            entry
            for entry in self._known
            if event in (None, entry.event) and row in (None, entry.row_id) and tag in (None, entry.tag)
        ]

    def _read_on(self) -> None:
        with self._reading:
            if not self.path.exists():
                return
            with self.path.open("rb") as file:
                file.seek(self._size)
                new = file.read()
            # A line may be half written.
            new = new[: new.rfind(b"\n") + 1]
            self._size += len(new)
            for line in new.decode().splitlines():
                name, row, attempt, pid, at, *rest = line.split(" ", 5)
                self._known.append(
                    Entry(event=name, row_id=row, attempt=int(attempt), pid=int(pid), time=float(at), tag="".join(rest))
                )

    def starts(self, row_id: uuid.UUID | str | None = None, tag: str | None = None) -> list[Entry]:
        """Return the runs that began, of one row or with one tag if given."""
        return self.entries("START", row_id, tag)

    def ends(self, row_id: uuid.UUID | str | None = None, tag: str | None = None) -> list[Entry]:
        """Return the runs whose handler got to its last line."""
        return self.entries("END", row_id, tag)


def free_port() -> int:
    """Return a port on which nothing listens now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def child_environment(**extra: str) -> dict[str, str]:
    """Return the environment for a process on this test's databases; only for tests with committed data."""
    from django.db import connections

    return {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "DATABASE_NAME": str(connections["default"].settings_dict["NAME"]),
        "OTHER_DATABASE_NAME": str(connections["other"].settings_dict["NAME"]),
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        **extra,
    }


def manage(*args: str, timeout: float = 60, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run a management command in a process of its own and return its output and exit code; it may fail."""
    return subprocess.run(
        [sys.executable, "-m", "django", *args],
        cwd=ROOT,
        env=child_environment(**extra),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


class Runjobs:
    """A `manage.py runjobs` process in its own session, so that signals reach only it.

    Made by the fixture `runjobs`, which ends it whatever the test does.
    """

    def __init__(self, *args: str, output: Path, jobs: dict[str, Any] | None = None, **extra: str) -> None:
        self.output_path = output
        self._before = self._workers()
        overrides = {"KEEP": {"ok": None, "error": None, "cancelled": None}, **SHORT, **(jobs or {})}
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "django", "runjobs", *args],
                cwd=ROOT,
                env=child_environment(DJANGO_JOBS_OVERRIDES=json.dumps(overrides), **extra),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    @staticmethod
    def _workers() -> set[uuid.UUID]:
        from django_jobs.models import Worker

        return set(Worker.objects.filter(stopped_at=None).values_list("pk", flat=True))

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def output(self) -> str:
        """Its output so far, from both streams."""
        return self.output_path.read_text(errors="replace")

    def wait_ready(self, timeout: float = 60, *, workers: int = 1) -> Runjobs:
        """Wait until it has registered itself (or as many children as `workers` says) in the database."""

        def registered() -> bool:
            assert self.process.poll() is None, f"runjobs ended with {self.process.returncode}:\n{self.output}"
            return len(self._workers() - self._before) >= workers

        wait_for(registered, timeout, "runjobs has registered its worker row")
        return self

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send the signal to this process alone; a killed one is reaped by wait()."""
        self.process.send_signal(number)

    def freeze(self) -> None:
        """Stop this process alone, and wait until all its threads stand still; SIGCONT thaws it."""

        def stands_still() -> bool:
            states = [path.read_text().rpartition(")")[2].split()[0] for path in threads.glob("*/stat")]
            return set(states) == {"T"}

        threads = Path(f"/proc/{self.process.pid}/task")
        self.kill(signal.SIGSTOP)
        wait_for(stands_still, 10, "every thread has stopped")

    def kill_group(self, number: int = signal.SIGKILL) -> None:
        """Send the signal to it and to all its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def wait(self, timeout: float = 30) -> int:
        """Wait for its end and return the exit code."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"runjobs did not end within {timeout} s:\n{self.output}") from None

    def stop(self, timeout: float = 30) -> int:
        """Ask it to shut down and return the exit code."""
        self.kill(signal.SIGTERM)
        return self.wait(timeout)

    def close(self) -> None:
        """Kill it and its children, whatever state they are in."""
        self.kill_group()
        self.process.wait(10)


def assert_consistent(executions: Iterable[Any] | None = None) -> None:
    """Check the invariants of every row."""
    from django_jobs.models import JobExecution
    from django_jobs.states import FINAL, Status

    live_keys = set()
    for row in JobExecution.objects.all() if executions is None else executions:
        final = row.status in FINAL
        assert (row.completed_at is not None) == final, f"{row}: {row.status}, completed at {row.completed_at}"
        assert 0 <= row.attempt <= row.max_attempts, f"{row}: attempt {row.attempt} of {row.max_attempts}"
        if row.started_at is not None and row.completed_at is not None:
            assert row.started_at <= row.completed_at, f"{row}: started {row.started_at}, ended {row.completed_at}"
        if row.status == Status.RUNNING:
            assert row.worker_id is not None, f"{row} runs without a worker"
            assert row.attempt >= 1, f"{row} runs its attempt {row.attempt}"
        if final:
            assert row.active_key is None, f"{row} is {row.status} and holds its key"
        elif row.active_key is not None:
            assert (row.job_name, row.active_key) not in live_keys, f"{row}: a second live row of its key"
            live_keys.add((row.job_name, row.active_key))
