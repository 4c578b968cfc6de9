"""Direct mode under real web servers: jobs run where they were pushed, and no end of a process loses one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
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
}


class Server:
    """A web server in a session of its own."""

    def __init__(self, kind: str, output: Path, jobs: dict[str, Any]) -> None:
        self.output_path = output
        self.port = free_port()
        server, *arguments = COMMANDS[kind]
        bind = ["--port", str(self.port)] if server == "uvicorn" else ["--bind", f"127.0.0.1:{self.port}"]
        overrides = {"KEEP": {"ok": None, "error": None, "cancelled": None}, **SHORT, **jobs}
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", server, *arguments, *bind],
                cwd=ROOT,
                env=child_environment(
                    DJANGO_SETTINGS_MODULE="tests.cases.web.settings", DJANGO_JOBS_OVERRIDES=json.dumps(overrides)
                ),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        wait_for(self._answers, 30, "the server answers")

    def get(self, path: str, **query: Any) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self.port}{path}?{urlencode(query)}"
        with urlopen(url, timeout=30) as response:
            answer: dict[str, Any] = json.load(response)
            return answer

    def push(self, name: str, how: str = "push", **payload: Any) -> tuple[JobExecution, int]:
        """Push in the server's process; return the row and that process's id."""
        answer = self.get(f"/{how}/{name}/", payload=json.dumps(payload))
        return JobExecution.objects.get(pk=answer["id"]), answer["pid"]

    def end(self, number: int = signal.SIGTERM) -> None:
        """End it as its supervisor would, and wait for that."""
        self.process.send_signal(number)
        self.process.wait(30)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)

    def _answers(self) -> bool:
        assert self.process.poll() is None, self.output_path.read_text()
        try:
            return bool(self.get("/pid/"))
        except (URLError, ConnectionError):
            return False


@pytest.fixture
def serve(transactional_db: None, ledger: Ledger, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def start(kind: str, **jobs: Any) -> Server:
        started.append(Server(kind, tmp_path / f"server-{len(started)}.log", jobs))
        return started[-1]

    yield start
    for server in started:
        server.close()
        print(server.output_path.read_text())


@pytest.mark.parametrize("kind", COMMANDS)
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


@pytest.mark.parametrize("kind", COMMANDS)
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
