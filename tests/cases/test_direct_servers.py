"""Direct mode under real web servers: jobs run where they were pushed, and no end of a process loses one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest

from django_jobs.models import JobExecution, Worker
from django_jobs.states import Status
from tests.engines import die_with_parent
from tests.support import (
    ROOT,
    SHORT,
    Ledger,
    Runjobs,
    assert_consistent,
    became,
    child_environment,
    free_port,
    wait_for,
)

pytestmark = [pytest.mark.slow, pytest.mark.subprocess]

GUNICORN = ("gunicorn", "--preload", "--workers", "2", "tests.cases.web.wsgi:application")
COMMANDS = {
    "sync": (*GUNICORN, "--worker-class", "sync"),
    "gthread": (*GUNICORN, "--worker-class", "gthread", "--threads", "3"),
    "asgi": ("uvicorn", "--lifespan", "on", "tests.cases.web.asgi:application"),
    "runserver": ("django", "runserver", "--skip-checks", "--noreload"),
    "reloading": ("django", "runserver", "--skip-checks"),
}
# Of these an end is in order.
KINDS = ("sync", "gthread", "asgi", "runserver")


class Server:
    """A web server in a session of its own."""

    def __init__(self, kind: str, output: Path, jobs: dict[str, Any], extra: dict[str, str]) -> None:
        self.output_path = output
        self.port = free_port()
        server, *arguments = COMMANDS[kind]
        address = f"127.0.0.1:{self.port}"
        bind = {"uvicorn": ["--port", str(self.port)], "django": [address]}.get(server, ["--bind", address])
        # What a person presses; by SIGTERM Python ends at once, unless somebody handles it.
        self._end = signal.SIGINT if kind == "runserver" else signal.SIGTERM
        overrides = {"KEEP": {"ok": None, "error": None, "cancelled": None}, **SHORT, **jobs}
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", server, *arguments, *bind],
                cwd=ROOT,
                env=child_environment(
                    **{
                        "DJANGO_SETTINGS_MODULE": "tests.cases.web.settings",
                        "DJANGO_JOBS_OVERRIDES": json.dumps(overrides),
                        **extra,
                    }
                ),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        wait_for(self.pid, 30, "the server answers")

    def get(self, path: str, **query: Any) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self.port}{path}?{urlencode(query)}"
        with urlopen(url, timeout=30) as response:
            answer: dict[str, Any] = json.load(response)
            return answer

    def push(self, name: str, how: str = "push", **payload: Any) -> tuple[JobExecution, int]:
        """Push in the server's process; return the row and that process's id."""
        answer = self.get(f"/{how}/{name}/", payload=json.dumps(payload))
        return JobExecution.objects.get(pk=answer["id"]), answer["pid"]

    def end(self) -> None:
        """End it as its supervisor would, and wait for that."""
        self.process.send_signal(self._end)
        self.process.wait(30)

    def press_ctrl_c(self) -> None:
        """Tell all of its processes, as a terminal does, and wait for the end."""
        os.killpg(self.process.pid, signal.SIGINT)
        self.process.wait(30)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)

    def pid(self) -> int | None:
        """Return the id of a process that answers; None while there is none."""
        assert self.process.poll() is None, self.output_path.read_text()
        try:
            return int(self.get("/pid/")["pid"])
        except (URLError, ConnectionError):
            return None


@pytest.fixture
def serve(transactional_db: None, ledger: Ledger, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def start(kind: str, extra: dict[str, str] | None = None, **jobs: Any) -> Server:
        started.append(Server(kind, tmp_path / f"server-{len(started)}.log", jobs, extra or {}))
        return started[-1]

    yield start
    for server in started:
        server.close()
        print(server.output_path.read_text())


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_runs_in_the_process_that_pushed_it_and_the_end_of_the_server_lets_it_end(
    kind: str, serve: Callable[..., Server], ledger: Ledger
) -> None:
    server = serve(kind, DRAIN_TIMEOUT=20)
    assert not Worker.objects.exists(), "nothing starts before the first push"
    for _ in range(8):
        row, pid = server.push("acc.mark", how="apush" if kind == "asgi" else "push")
        became(row, Status.OK)
        assert [entry.pid for entry in ledger.ends(row.pk)] == [pid]
    row, pid = server.push("acc.slow", s=2)
    wait_for(lambda: ledger.starts(row.pk), 10, "it began")
    server.end()
    row.refresh_from_db()
    assert row.status == Status.OK
    assert [entry.pid for entry in ledger.ends(row.pk)] == [pid]
    for worker in Worker.objects.all():
        assert worker.roles == ["direct"]
        assert worker.stopped_at is not None
    assert_consistent()


@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_end_in_time_is_handed_back_or_ended(
    kind: str, serve: Callable[..., Server], ledger: Ledger
) -> None:
    server = serve(kind, DRAIN_TIMEOUT=0.5, INTERRUPT_GRACE=0.5)
    again, once = server.push("acc.slow_retry", s=60)[0], server.push("acc.slow", s=60)[0]
    wait_for(lambda: ledger.starts(again.pk) and ledger.starts(once.pk), 10, "both began")
    server.end()
    again.refresh_from_db()
    once.refresh_from_db()
    assert (again.status, again.attempt) == (Status.PENDING, 0)
    assert (once.status, once.attempt) == (Status.ERROR, 1)
    assert "interrupted by shutdown" in once.error
    assert_consistent()


def test_a_killed_server_process_is_replaced_and_its_rows_are_rescued(
    serve: Callable[..., Server], runjobs: Callable[..., Runjobs], ledger: Ledger
) -> None:
    server = serve("sync")
    again, pid = server.push("acc.slow_retry", s=1.5)
    wait_for(lambda: ledger.starts(again.pk), 10, "it began")
    os.kill(pid, signal.SIGKILL)
    runjobs().wait_ready()
    became(again, Status.OK, 40)
    assert again.attempt == 2
    assert {entry.pid for entry in ledger.ends(again.pk)}.isdisjoint({pid})
    for _ in range(4):
        row, now = server.push("acc.mark")
        became(row, Status.OK)
        assert now != pid
    assert_consistent()


@pytest.fixture
def edited(tmp_path: Path) -> Path:
    """Settings that a test may touch, as if somebody had changed them."""
    path = tmp_path / "edited_settings.py"
    path.write_text("from tests.cases.web.settings import *\n")
    return path


def from_edited(path: Path) -> dict[str, str]:
    return {"DJANGO_SETTINGS_MODULE": path.stem, "PYTHONPATH": f"{ROOT}{os.pathsep}{path.parent}"}


def test_a_reload_of_runserver_hands_back_what_runs_and_begins_anew(
    serve: Callable[..., Server], runjobs: Callable[..., Runjobs], ledger: Ledger, edited: Path
) -> None:
    server = serve("reloading", from_edited(edited), INTERRUPT_GRACE=0.5)
    first = server.pid()
    assert first not in (None, server.process.pid), "the reloader starts a process"
    row, pid = server.push("acc.mark")
    became(row, Status.OK)
    assert [entry.pid for entry in ledger.ends(row.pk)] == [pid] == [first]
    again, once = server.push("acc.slow_retry", s=60)[0], server.push("acc.slow", s=60)[0]
    wait_for(lambda: ledger.starts(again.pk) and ledger.starts(once.pk), 10, "both began")
    # The reloader itself, which has loaded the same project, is no worker.
    assert list(Worker.objects.values_list("pid", "stopped_at")) == [(first, None)]
    os.utime(edited, (time.time() + 1, time.time() + 1))
    wait_for(lambda: server.pid() not in (None, first), 30, "another process answers")
    again.refresh_from_db()
    once.refresh_from_db()
    assert (again.status, again.attempt) == (Status.PENDING, 0)
    assert (once.status, once.attempt) == (Status.ERROR, 1)
    assert "interrupted by shutdown" in once.error
    second = server.pid()
    row, pid = server.push("acc.mark")
    became(row, Status.OK)
    assert [entry.pid for entry in ledger.ends(row.pk)] == [pid] == [second]
    assert list(Worker.objects.filter(stopped_at=None).values_list("pid", flat=True)) == [second]
    assert Worker.objects.get(pid=first).stop_reason == "the process ends"
    again.cancel()
    assert_consistent()


def test_ctrl_c_at_the_reloader_of_runserver_is_a_crash_after_which_rows_are_rescued(
    serve: Callable[..., Server], runjobs: Callable[..., Runjobs], ledger: Ledger
) -> None:
    server = serve("reloading")
    # It must not end before the keys are pressed.
    again, pid = server.push("acc.slow_retry", s=5)
    wait_for(lambda: ledger.starts(again.pk), 10, "it began")
    server.press_ctrl_c()
    assert ledger.ends(again.pk) == []
    runjobs().wait_ready()
    became(again, Status.OK, 40)
    assert {entry.pid for entry in ledger.ends(again.pk)}.isdisjoint({pid})
    assert_consistent()
