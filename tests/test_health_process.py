"""`runjobs --health-port`, `--heartbeat-file` and `--check` with real processes, signals and outages."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db.backends.signals import connection_created

from django_jobs import clock
from django_jobs.execution.liveness import Liveness
from django_jobs.models import Worker
from django_jobs.runtime import runner
from django_jobs.runtime.live_processes import missing
from django_jobs.runtime.options import Options, UsageError
from django_jobs.runtime.startup import DatabaseNotReady
from tests.acc import jobs
from tests.factories import WorkerFactory
from tests.forwarder import forwarded_database
from tests.support import ROOT, Ledger, Runjobs, free_port, manage, wait_for
from tests.test_runjobs import unreachable
from tests.threads import in_thread

Start = Callable[..., Runjobs]


def ask(port: int, path: str) -> tuple[int, str, list[str]]:
    """Return code, status and problems; code 0 while nobody answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        body = json.loads(response.read())
    except OSError:
        return 0, "", []
    finally:
        connection.close()
    return response.status, body["status"], body["problems"]


def becomes(port: int, path: str, code: int, status: str, timeout: float = 20) -> list[str]:
    """Wait for an answer and return its problems."""
    wait_for(lambda: ask(port, path)[:2] == (code, status), timeout, f"{path} answers {code} {status}")
    return ask(port, path)[2]


@pytest.mark.subprocess
def test_a_process_is_ready_when_it_works_and_alive_while_it_drains(
    runjobs: Start, ledger: Ledger, tmp_path: Path
) -> None:
    port, beat = free_port(), tmp_path / "beat"
    process = runjobs(
        "--health-port", str(port), "--heartbeat-file", str(beat), jobs={"DRAIN_TIMEOUT": 20, "HEARTBEAT_INTERVAL": 0.5}
    )
    assert becomes(port, "/readyz", 200, "ok") == []
    assert ask(port, "/healthz") == (200, "ok", [])
    first = beat.stat().st_mtime_ns
    wait_for(lambda: beat.stat().st_mtime_ns > first, 10, "the file is written again")
    row = jobs.gate.push(path=str(tmp_path / "gate"))
    wait_for(lambda: ledger.starts(row.pk), 10, "the handler began")
    process.kill(signal.SIGTERM)
    becomes(port, "/readyz", 503, "draining")
    assert ask(port, "/healthz") == (200, "ok", [])
    (tmp_path / "gate").touch()
    assert process.wait(10) == 0
    assert not beat.exists()
    assert ask(port, "/healthz")[0] == 0


@pytest.mark.sqlite
@pytest.mark.subprocess
def test_a_port_or_file_that_cannot_be_had_is_exit_code_2_and_one_line(transactional_db: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = manage("runjobs", "--health-port", str(taken.getsockname()[1]))
    assert result.returncode == 2
    assert "--health-port" in result.stderr
    assert "Traceback" not in result.stderr
    assert not Worker.objects.exists()


@pytest.mark.subprocess
@pytest.mark.slow
@pytest.mark.postgres
@pytest.mark.mysql
def test_an_outage_of_the_database_makes_it_unready_and_leaves_it_alive(runjobs: Start) -> None:
    """A probe that asks the database has every process killed while that one restarts."""
    with forwarded_database() as (forwarder, url):
        port = free_port()
        runjobs("--health-port", str(port), DATABASE_URL=url)
        becomes(port, "/readyz", 200, "ok")
        forwarder.cut()
        (problem,) = becomes(port, "/readyz", 503, "failing")
        assert problem.startswith("its last sign of life reached the database ")
        assert ask(port, "/healthz") == (200, "ok", [])
        forwarder.mend()
        becomes(port, "/readyz", 200, "ok", timeout=30)


@pytest.mark.subprocess
@pytest.mark.slow
def test_a_supervisor_answers_for_its_children(runjobs: Start, tmp_path: Path) -> None:
    """Fault: where nothing can be written but that one file, it did not start, or its children "had not reported"."""
    port, beat = free_port(), tmp_path / "beat"
    (tmp_path / "written_nowhere.py").write_text(
        f"import tempfile\nfrom tests.settings import *\ntempfile.tempdir = {str(tmp_path / 'missing')!r}\n"
    )
    process = runjobs(
        "--processes",
        "2",
        "--health-port",
        str(port),
        "--heartbeat-file",
        str(beat),
        jobs={"DRAIN_TIMEOUT": 5},
        DJANGO_SETTINGS_MODULE="written_nowhere",
        PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}",
    ).wait_ready(60, workers=3)
    becomes(port, "/readyz", 200, "ok")
    assert ask(port, "/healthz") == (200, "ok", [])
    victim = Worker.objects.filter(roles=["worker"]).first()
    assert victim is not None
    os.kill(victim.pid, signal.SIGKILL)
    assert "process" in wait_for(lambda: ask(port, "/readyz")[2], 10, "a child is missed")[0]
    assert ask(port, "/healthz")[0] == 200
    becomes(port, "/readyz", 200, "ok")
    assert beat.exists()
    assert process.stop() == 0
    assert not beat.exists()


@pytest.mark.subprocess
@pytest.mark.slow
def test_no_secret_is_in_what_a_process_says_of_itself(runjobs: Start) -> None:
    """Monitoring output contains passwords. Source: rq/django-rq, unreleased changelog of 2026."""
    port = free_port()
    process = runjobs(
        "-v", "3", "--health-port", str(port),
        jobs={"CRON_SECRET": "s3cret-of-the-cron-view"},
        REDIS_URL="redis://:s3cret@127.0.0.1:1/0",
    )  # fmt: skip
    becomes(port, "/readyz", 200, "ok")
    row = jobs.scripted.push(text="s3cret")
    wait_for(lambda: str(row.pk) in process.output, 10, "it ran")
    answers = [ask(port, path) for path in ("/healthz", "/readyz", "/")]
    assert process.stop() == 0
    assert "s3cret" not in process.output + str(answers)
    assert "s3cret" not in str(list(Worker.objects.values()))


@pytest.mark.medium
def test_the_port_answers_while_the_database_is_waited_for_no_longer_than_the_time_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port, found = free_port(), []

    def wait(using: str, say: Any, *, patience: float) -> None:
        found.extend((ask(port, "/healthz")[:2], ask(port, "/readyz")[:2], patience))
        raise DatabaseNotReady("down")

    monkeypatch.setattr(runner, "wait_for_database", wait)
    with pytest.raises(DatabaseNotReady):
        runner.Runner(Options.of(health_port=port, max_time=5)).run()
    assert found == [(200, "ok"), (503, "starting"), 5]
    assert ask(port, "/healthz")[0] == 0


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_number_that_is_no_port_is_refused(port: int) -> None:
    with pytest.raises(UsageError, match=rf"--health-port is {port}; expected a port from 1 to 65535"):
        Options.of(health_port=port)


@pytest.mark.django_db(transaction=True)
class TestCheck:
    @staticmethod
    def check(**options: Any) -> str:
        """Return what it found missing; "" when it found nothing."""
        workers = Worker.objects.count()
        try:
            call_command("runjobs", check=True, skip_checks=True, **options)
            code, said = 0, ""
        except CommandError as error:
            code, said = error.returncode, str(error)
        assert (code, Worker.objects.count()) == (int(bool(said)), workers)
        return said

    @staticmethod
    def live(roles: list[str], queues: list[str] | None = None) -> None:
        Liveness(roles=roles, queues=queues, names=[], slots=1, using="default").register()

    def test_without_any_live_process_it_fails(self) -> None:
        assert self.check() == "There is no live process of any role."
        WorkerFactory(dead=True)
        now = clock.now("default")
        WorkerFactory(heartbeat_at=now, stopped_at=now)
        assert self.check() == "There is no live process of any role."

    def test_the_clock_of_the_database_decides(self) -> None:
        worker = WorkerFactory(heartbeat_at=clock.now("default") - timedelta(seconds=44))
        assert self.check() == ""
        Worker.objects.filter(pk=worker.pk).update(heartbeat_at=clock.now("default") - timedelta(seconds=46))
        assert self.check() != ""

    def test_each_role_that_is_named_must_be_there(self) -> None:
        self.live(["worker"])
        assert self.check() == self.check(worker=True) == ""
        assert self.check(worker=True, scheduler=True, sweep=True) == (
            "There is no live process with the role scheduler, no live process with the role sweep."
        )
        self.live(["scheduler", "sweep"])
        assert self.check(worker=True, scheduler=True, sweep=True) == ""

    def test_each_queue_that_is_named_must_be_served(self) -> None:
        self.live(["worker"], ["mail"])
        self.live(["scheduler"], None)
        assert self.check(queues=["mail"]) == ""
        assert self.check(queues=["mail", "slow"]) == "There is no live worker that serves the queue slow."
        self.live(["worker"], None)
        assert self.check(queues=["mail", "slow"]) == ""

    def test_a_queue_that_a_worker_leaves_out_must_be_served_by_another(self) -> None:
        self.live(["worker"], ["-mail", "-slow"])
        assert self.check(queues=["mail", "new"]) == "There is no live worker that serves the queue mail."
        self.live(["worker"], ["-slow"])
        assert self.check(queues=["mail", "new"]) == ""
        assert self.check(queues=["slow"]) != ""

    def test_what_is_excluded_is_not_asked_for(self) -> None:
        """The command line of a worker, with --check behind it, asks for that worker."""
        self.live(["worker"], ["mail"])
        assert self.check(queues=["mail", "slow"], exclude=["slow"]) == ""
        assert self.check(exclude=["mail"]) == ""
        with pytest.raises(CommandError, match="--exclude takes away every queue"):
            call_command("runjobs", check=True, skip_checks=True, queues=["mail"], exclude=["mail"])

    @pytest.mark.postgres
    def test_it_opens_one_connection_and_no_pool(self, set_pool: Callable[[Any], None]) -> None:
        """Fault: it went through Django's pool, which opens four."""
        set_pool({"min_size": 4})
        opened: list[Any] = []

        def note(connection: Any, **kwargs: Any) -> None:
            opened.append(connection.pool)

        connection_created.connect(note)
        try:
            said = in_thread(lambda: missing(roles=[], queues=[]))
        finally:
            connection_created.disconnect(note)
        assert (said, opened) == (["process of any role"], [None])

    def test_a_wrong_name_is_a_mistake(self) -> None:
        with pytest.raises(CommandError, match="--queues") as caught:
            call_command("runjobs", check=True, skip_checks=True, queues=["a b"])
        assert caught.value.returncode == 2


@pytest.mark.subprocess
@pytest.mark.slow
def test_a_check_without_a_database_is_exit_code_3_within_seconds(transactional_db: None, tmp_path: Path) -> None:
    result = manage("runjobs", "--check", timeout=30, **unreachable(tmp_path))
    assert result.returncode == 3
    assert result.stderr.strip().splitlines()[-1].startswith("CommandError: The database 'default' cannot be reached: ")
    assert "Traceback" not in result.stderr
    assert "sesame" not in result.stderr
