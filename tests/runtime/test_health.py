"""The answers of a process about its health, the port that tells them and the file that shows them."""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import os
import signal
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from django_jobs.loop import Loop
from django_jobs.runtime import health, health_port, reports
from django_jobs.runtime.health import Answer, Health
from django_jobs.runtime.health_port import Server
from django_jobs.runtime.heartbeat_file import heartbeat_file
from django_jobs.runtime.options import UsageError
from django_jobs.runtime.reports import Reports, reported
from tests.support import free_port, wait_for

# Nothing here asks a database: once is enough.
pytestmark = pytest.mark.sqlite


class Said:
    """Probes that answer what the test says."""

    def __init__(self) -> None:
        self.answer = Answer(status="ok")

    def alive(self) -> Answer:
        return self.answer

    def ready(self) -> Answer:
        return Answer(status="degraded", problems=["slow"])


class Trouble:
    """A subscription with a problem."""

    def close(self) -> None: ...

    def problem(self) -> str | None:
        return "the broker is away"


@contextlib.contextmanager
def turning(name: str, tick: Any = lambda now=None: 60.0) -> Iterator[Loop]:
    loop = Loop(tick, name=name)
    loop.start()
    try:
        yield loop
    finally:
        loop.stop()
        loop.join(10)


def well() -> Health:
    answers = Health()
    answers.beaten()
    return answers


class TestAnswers:
    def test_a_process_that_beats_and_turns_is_alive_and_ready(self) -> None:
        with turning("sample") as loop:
            answers = well()
            answers.watch(loop)
            assert (answers.alive().status, answers.ready().status) == ("ok", "ok")
            assert not answers.alive().problems

    def test_before_its_first_beat_it_is_alive_and_not_ready(self) -> None:
        answers = Health()
        assert answers.alive().is_good
        assert (answers.ready().status, answers.ready().is_good) == ("starting", False)

    def test_while_it_drains_it_is_alive_and_not_ready(self) -> None:
        answers = well()
        answers.drain()
        assert answers.alive().is_good
        assert (answers.ready().status, answers.ready().is_good) == ("draining", False)

    def test_without_beats_that_reach_the_database_it_is_alive_and_not_ready(self, settings: Any) -> None:
        settings.DJANGO_JOBS = {"HEARTBEAT_INTERVAL": 0.02}
        answers = well()
        wait_for(lambda: not answers.ready().is_good, 20, "the beat is old")
        assert answers.ready().status == "failing"
        assert "reached the database" in answers.ready().problems[0]
        assert answers.alive().is_good
        answers.beaten()
        assert answers.ready().is_good

    def test_a_tick_that_does_not_end_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(health, "STUCK_AFTER", 0.1)
        release = threading.Event()

        def hang(now: datetime | None = None) -> float:
            release.wait(20)
            return 60.0

        answers = well()
        with turning("stage", hang) as loop, turning("beat") as other:
            answers.watch(loop, other)
            assert wait_for(lambda: answers.alive().problems, 20, "it is stuck")[0].startswith(
                "the stage thread has not turned for"
            )
            assert len(answers.alive().problems) == 1
            assert not answers.ready().is_good
            release.set()
            wait_for(lambda: answers.alive().is_good, 20, "it turns again")

    def test_a_thread_that_died_is_named(self) -> None:
        def die(now: datetime | None = None) -> float:
            raise SystemExit

        answers = well()
        with turning("claim", die) as loop:
            answers.watch(loop)
            wait_for(lambda: answers.alive().problems == ["the claim thread is dead"], 20, "it is dead")

    def test_a_loop_that_was_stopped_is_no_trouble(self) -> None:
        answers = well()
        with turning("claim") as loop:
            answers.watch(loop)
        assert answers.alive().is_good

    def test_a_long_wait_is_no_trouble(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(health, "STUCK_AFTER", 0.0)
        answers = well()
        with turning("trim", lambda now=None: 3600.0) as loop:
            answers.watch(loop)
            wait_for(lambda: loop.overdue == 0.0, 20, "the first tick is over")
            time.sleep(0.05)
            assert answers.alive().is_good

    def test_without_wake_ups_it_is_degraded_and_ready(self) -> None:
        answers = well()
        answers.listen(Trouble())
        assert answers.ready().status == "degraded"
        assert answers.ready().is_good
        assert "the broker is away" in answers.ready().problems[0]


class TestPort:
    @pytest.fixture
    def said(self) -> Said:
        return Said()

    @pytest.fixture
    def server(self, said: Said) -> Iterator[Server]:
        with Server(said, 0) as server:
            thread = threading.Thread(target=server.serve_forever, args=(0.02,))
            thread.start()
            yield server
            server.shutdown()
            thread.join(10)

    @staticmethod
    def ask(server: Server, path: str, method: str = "GET") -> tuple[int, dict[str, Any], str]:
        connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
        with contextlib.closing(connection):
            connection.request(method, path)
            response = connection.getresponse()
            text = response.read().decode()
            return response.status, json.loads(text or "{}"), str(response.headers)

    @staticmethod
    def connect(server: Server) -> socket.socket:
        return socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=10)

    def test_it_tells_what_the_probes_say(self, server: Server, said: Said) -> None:
        code, body, headers = self.ask(server, "/healthz?verbose")
        assert (code, body) == (200, {"status": "ok", "problems": []})
        assert "no-store" in headers
        said.answer = Answer(status="failing", problems=["the stage thread is dead"])
        assert self.ask(server, "/healthz")[:2] == (
            503,
            {"status": "failing", "problems": ["the stage thread is dead"]},
        )
        assert self.ask(server, "/readyz")[:2] == (200, {"status": "degraded", "problems": ["slow"]})
        assert self.ask(server, "/healthz", "HEAD")[:2] == (503, {})

    def test_it_answers_on_ipv6_as_well(self, server: Server) -> None:
        if not socket.has_dualstack_ipv6():
            assert server.address_family == socket.AF_INET
            return
        connection = http.client.HTTPConnection("::1", server.server_address[1], timeout=10)
        with contextlib.closing(connection):
            connection.request("GET", "/healthz")
            assert connection.getresponse().status == 200

    @pytest.mark.parametrize(("method", "path", "code"), [("GET", "/s3cret", 404), ("POST", "/healthz", 501)])
    def test_anything_else_is_refused_without_repeating_it(
        self, server: Server, method: str, path: str, code: int
    ) -> None:
        answered, body, headers = self.ask(server, path, method)
        assert answered == code
        assert "s3cret" not in str(body) + headers
        assert "Python" not in headers

    def test_rubbish_is_refused(self, server: Server) -> None:
        with self.connect(server) as client:
            client.sendall(b"\x16\x03\x01\x00 s3cret\r\n\r\n")
            answer = client.makefile("rb").read()
        assert b"s3cret" not in answer
        assert self.ask(server, "/healthz")[0] == 200

    @pytest.mark.medium
    def test_a_client_that_dribbles_is_cut_off(self, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(health_port, "LIFETIME", 0.2)
        with self.connect(server) as client:
            client.sendall(b"GET /healthz HTTP/1.1\r\n")
            began = time.monotonic()
            with contextlib.suppress(OSError):
                while client.recv(1024):
                    pass
            assert time.monotonic() - began < 5

    def test_a_crowd_of_silent_clients_keeps_no_probe_waiting(self, server: Server) -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(3 * health_port.MOST):
                stack.enter_context(self.connect(server))
            began = time.monotonic()
            assert self.ask(server, "/healthz")[0] == 200
            assert time.monotonic() - began < 2
            assert len(server._open) <= health_port.MOST

    def test_a_process_that_may_open_no_more_files_waits_until_it_may(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Fault: it tried again and again without a pause, which took a core from the handlers."""
        tries = []

        def refuse(self: Server) -> Any:
            tries.append(time.monotonic())
            raise OSError(errno.EMFILE, "Too many open files")

        with monkeypatch.context() as full:
            full.setattr(socketserver.TCPServer, "get_request", refuse)
            with self.connect(server):
                wait_for(lambda: len(tries) >= 3, 10, "it tries")
        assert tries[2] - tries[0] > 1.5 * health_port.LOOK_EVERY
        assert self.ask(server, "/healthz")[0] == 200

    def test_a_port_that_is_taken_is_a_mistake_in_one_line(self, said: Said) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            refused = pytest.raises(
                UsageError, match=rf"^--health-port {port} cannot be opened: Address already in use\.$"
            )
            with refused, health_port.health_port(said, port):
                pass

    def test_afterwards_the_port_is_free_again(self, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(health_port, "LOOK_EVERY", 0.01)
        port = free_port()
        for _ in range(2):
            with health_port.health_port(said, port):
                pass

    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
    def test_a_process_that_a_handler_forked_does_not_keep_the_port(
        self, said: Said, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(health_port, "LOOK_EVERY", 0.01)
        port, (begun, begins) = free_port(), os.pipe()
        with health_port.health_port(said, port):
            child = os.fork()
            if child == 0:
                os.write(begins, b"x")
                time.sleep(60)
                os._exit(0)
        try:
            # What a fork does first in the child is done.
            assert os.read(begun, 1) == b"x"
            with health_port.health_port(said, port):
                pass
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(begun)
            os.close(begins)


class TestFile:
    @pytest.mark.medium
    def test_it_is_fresh_while_all_is_alive_and_gone_afterwards(self, tmp_path: Path, settings: Any) -> None:
        settings.DJANGO_JOBS = {"HEARTBEAT_INTERVAL": 0.02}
        path, said = tmp_path / "beat", Said()
        with heartbeat_file(said, path):
            assert datetime.fromisoformat(path.read_text().strip()).tzinfo is not None
            first = path.stat().st_mtime_ns
            wait_for(lambda: path.stat().st_mtime_ns > first, 20, "it was touched")
            said.answer = Answer(status="failing", problems=["x"])
            time.sleep(0.06)
            last = path.stat().st_mtime_ns
            time.sleep(0.06)
            assert path.stat().st_mtime_ns == last
        assert list(tmp_path.iterdir()) == []

    def test_it_is_fresh_on_a_disk_that_is_full_and_back_when_it_was_lost(
        self, tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        settings.DJANGO_JOBS = {"HEARTBEAT_INTERVAL": 0.02}
        path = tmp_path / "beat"
        with heartbeat_file(Said(), path):
            with monkeypatch.context() as full:
                full.setattr(Path, "write_text", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
                times = {path.stat().st_mtime_ns}
                # The first of them may have begun before.
                wait_for(lambda: times.add(path.stat().st_mtime_ns) or len(times) > 3, 20, "it is touched")
            path.unlink()
            wait_for(path.exists, 20, "it is back")

    def test_a_folder_that_is_lost_meanwhile_does_not_disturb_the_end(self, tmp_path: Path) -> None:
        folder = tmp_path / "folder"
        folder.mkdir()
        with heartbeat_file(Said(), folder / "beat"):
            # In one go: the file is written again and again.
            folder.rename(tmp_path / "elsewhere")
            # No folder at all would be as good as a file that is gone.
            folder.touch()

    def test_a_folder_that_is_not_there_is_a_mistake_in_one_line(self, tmp_path: Path) -> None:
        path = tmp_path / "absent" / "beat"
        refused = pytest.raises(
            UsageError, match=r"^--heartbeat-file .*beat cannot be written: No such file or directory\.$"
        )
        with refused, heartbeat_file(Said(), path):
            pass

    def test_what_is_no_file_is_left_as_it_is(self, tmp_path: Path) -> None:
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        for path in (pipe, tmp_path):
            with pytest.raises(UsageError, match="it exists and is not a file"), heartbeat_file(Said(), path):
                pass
        assert pipe.is_fifo()


class TestReports:
    @staticmethod
    def of(**lines: bytes | None) -> Reports:
        return Reports(lambda: lines)

    def test_a_supervisor_is_as_well_as_its_children(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(reports, "EVERY", 0.02)
        said, silent = Said(), self.of(one=b"")
        assert silent.alive() == Answer(status="ok", problems=[])
        assert silent.ready() == Answer(status="starting", problems=["one: it has not reported yet"])
        with reported(said) as report:
            answers = Reports(lambda: {"one": report()})
            wait_for(lambda: answers.ready().status == "degraded", 20, "it reported")
            assert answers.alive() == Answer(status="ok", problems=[])
            said.answer = Answer(status="failing", problems=["the stage thread is dead"])
            wait_for(lambda: not answers.alive().is_good, 20, "it reported again")
            assert answers.alive().problems == ["one: the stage thread is dead"]

    def test_a_child_that_says_nothing_any_more_is_not_alive(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with reported(Said()) as report:
            answers = self.of(one=wait_for(report, 20, "it reported"), two=None)
        assert answers.alive().is_good
        monkeypatch.setattr(reports, "STALE_AFTER", 0.0)
        assert answers.alive().problems == ["one: it has not reported for 0 s"]

    def test_a_child_that_is_being_replaced_is_alive_and_not_ready(self) -> None:
        answers = self.of(one=None)
        assert answers.alive().is_good
        assert answers.ready() == Answer(status="failing", problems=["one: it ended and will be replaced soon"])

    def test_a_supervisor_that_drains_is_not_ready(self) -> None:
        answers = self.of()
        assert answers.ready().is_good
        answers.drain()
        assert (answers.alive().status, answers.ready().status) == ("ok", "draining")
