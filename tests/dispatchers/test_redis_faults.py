"""What the redis dispatcher does while its server is down, hangs or refuses, and that it comes back by itself."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from django_jobs import dispatchers
from django_jobs.dispatchers import Unavailable, announce
from django_jobs.dispatchers.redis import RedisDispatcher, bounds, breaker, channel, hints, session
from django_jobs.dispatchers.redis.upkeep import PORTION
from django_jobs.fields import uuid7
from tests.dispatchers.contract import when_ready
from tests.forwarder import Forwarder
from tests.redis_servers import RedisServer, running_redis, use_cache
from tests.support import wait_for

if TYPE_CHECKING:
    from pytest_django import Settings

pytestmark = pytest.mark.subprocess

# Of a push while the server does what it may.
BUDGET = 1.0


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hints, "WAIT", 0.2)
    monkeypatch.setattr(channel, "WAIT", 0.2)
    monkeypatch.setattr(session, "ANSWER_TIMEOUT", 0.6)


class Project:
    """A dispatcher, and a worker that counts its calls."""

    def __init__(self, **options: Any) -> None:
        self.dispatcher = RedisDispatcher({"CACHE": "redis"})
        self.wakes, self.looks = threading.Event(), threading.Event()
        self.wants = 10
        self.worker: Any = None

    def listen(self) -> None:
        self.worker = self.dispatcher.subscribe(["mail"], self.wakes.set, self.looks.set, lambda: self.wants)

    def push(self) -> float:
        """Return how long a push took that succeeded or not."""
        began = time.monotonic()
        announce_with(self.dispatcher)
        return time.monotonic() - began

    def hears(self) -> bool:
        """Whether a hint and a cancel of now arrive."""
        when_ready(self.worker)
        self.wakes.clear()
        self.looks.clear()
        try:
            self.dispatcher.hint("mail", [uuid7()])
            self.dispatcher.cancel_hint([uuid7()])
        except Unavailable:
            return False
        return self.wakes.wait(1) and self.looks.wait(1)


def announce_with(dispatcher: RedisDispatcher) -> bool:
    try:
        dispatcher.hint("mail", [uuid7()])
    except Unavailable:
        return False
    return True


@pytest.fixture
def project(own_valkey: RedisServer) -> Iterator[Project]:
    made = Project()
    yield made
    made.dispatcher.close()


def kill(server: RedisServer) -> Callable[[], None]:
    server.kill()
    return server.start


def freeze(server: RedisServer) -> Callable[[], None]:
    server.send(signal.SIGSTOP)
    return lambda: server.send(signal.SIGCONT)


def make_replica(server: RedisServer) -> Callable[[], None]:
    def end() -> None:
        with server.client() as client:
            client.execute_command("REPLICAOF", "NO", "ONE")

    with server.client() as client:
        client.execute_command("REPLICAOF", "127.0.0.1", "1")
    return end


def fill(server: RedisServer) -> Callable[[], None]:
    def end() -> None:
        with server.client() as client:
            client.config_set("maxmemory", 0)

    with server.client() as client:
        client.config_set("maxmemory", 1)
    return end


def load(server: RedisServer) -> Callable[[], None]:
    """Restart it with a dump that takes long to read; it ends by itself."""
    with server.client() as client:
        for first in range(0, 20_000, 1000):
            client.mset({f"key:{number}": "x" * 50 for number in range(first, first + 1000)})
        client.save()
    server.kill()
    slow = ("--key-load-delay", "50", "--loading-process-events-interval-bytes", "1024")
    server.start(*slow, await_answer=False)
    wait_for(lambda: server.answer(b"GET nothing").startswith(b"-LOADING"), 20, "it is loading")
    return lambda: None


@pytest.mark.parametrize("fault", [kill, freeze, make_replica, load, fill])
def test_a_push_takes_less_than_a_second_and_the_next_ones_nothing(
    project: Project, own_valkey: RedisServer, fault: Callable[[RedisServer], Callable[[], None]]
) -> None:
    assert announce_with(project.dispatcher)
    fault(own_valkey)
    assert project.push() < BUDGET
    pushes = [project.push() for _ in range(200)]
    assert sum(pushes) < 0.3


@pytest.mark.parametrize("fault", [kill, freeze, make_replica, pytest.param(load, marks=pytest.mark.slow)])
def test_after_it_wake_ups_come_again_by_themselves(
    project: Project, own_valkey: RedisServer, fault: Callable[[RedisServer], Callable[[], None]]
) -> None:
    project.listen()
    wait_for(project.hears, 20, "hints arrive")
    end = fault(own_valkey)
    # A replica passes messages on.
    sessions = project.worker._sessions[: 1 if fault is make_replica else 2]
    wait_for(lambda: all(session.problem for session in sessions), 20, "the fault is seen")
    assert "the cache 'redis': " in project.worker.problem()
    assert str(own_valkey.port) not in project.worker.problem()
    project.wakes.clear()
    project.looks.clear()
    end()
    # What may have been missed is looked for at once.
    assert project.wakes.wait(10)
    assert fault is make_replica or project.looks.wait(10)
    wait_for(project.hears, 10, "hints arrive again")


def test_a_connection_that_was_silent_once_is_asked_again_before_it_counts_as_silent(
    project: Project, own_valkey: RedisServer
) -> None:
    project.listen()
    when_ready(project.worker)
    end = freeze(own_valkey)
    wait_for(lambda: project.worker._sessions[1].problem, 20, "the fault is seen")
    end()
    when_ready(project.worker)

    def pings() -> int:
        with own_valkey.client() as client:
            commands: Any = client.info("commandstats")
        return int(commands["cmdstat_ping"]["calls"])

    before = pings()
    wait_for(lambda: pings() >= before + 2, 20, "it is asked, and asked again")


def test_a_name_that_leads_to_a_new_primary_is_followed(own_valkey: RedisServer, settings: Settings) -> None:
    """Connections to the old one may stay open: it answers, but takes nothing any more."""
    cable = Forwarder(("127.0.0.1", own_valkey.port))
    use_cache(settings, f"redis://127.0.0.1:{cable.port}/0")
    project = Project()
    project.listen()
    wait_for(project.hears, 20, "hints arrive")

    def is_woken() -> bool:
        project.wakes.clear()
        return announce_with(project.dispatcher) and project.wakes.wait(1)

    with running_redis("valkey") as new:
        # The server ends connections of those that wait, and only these.
        project.wants = 0
        with own_valkey.client() as client:
            wait_for(lambda: not client.info("clients")["blocked_clients"], 20, "nobody waits")
        cable.redirect(("127.0.0.1", new.port))
        make_replica(own_valkey)
        project.wants = 10
        wait_for(is_woken, 10, "hints arrive again")
        project.dispatcher.close()
    cable.cut()


def test_a_full_server_takes_hints_again_as_soon_as_there_is_room(project: Project, own_valkey: RedisServer) -> None:
    project.listen()
    when_ready(project.worker)
    end = fill(own_valkey)
    with pytest.raises(Unavailable, match="maxmemory"):
        project.dispatcher.hint("mail", [uuid7()])
    end()
    wait_for(project.hears, 20, "hints arrive again")


@pytest.mark.parametrize("kind", ["normal", "pubsub"])
def test_connections_that_the_server_ends_are_replaced(project: Project, own_valkey: RedisServer, kind: str) -> None:
    project.listen()
    wait_for(project.hears, 20, "hints arrive")
    for _ in range(3):
        with own_valkey.client() as client:
            client.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")
        # One that was kept for pushing is replaced within the push.
        assert announce_with(project.dispatcher)
        wait_for(project.hears, 20, "hints arrive again")


def test_a_worker_started_while_the_server_is_down_is_woken_once_it_is_there(
    project: Project, own_valkey: RedisServer
) -> None:
    own_valkey.kill()
    project.listen()
    wait_for(lambda: "refused" in (project.worker.problem() or ""), 20, "the fault is told")
    # Pushes need not find that out themselves, and try at once when the worker has found the server.
    with pytest.raises(Unavailable, match="not tried again yet"):
        project.dispatcher.hint("mail", [uuid7()])
    own_valkey.start()
    when_ready(project.worker)
    wait_for(lambda: announce_with(project.dispatcher), 3, "a push tries")
    wait_for(project.hears, 10, "hints arrive")


@pytest.fixture
def silent_resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nobody knows an address until the event is set."""
    answers, look_up = threading.Event(), socket.getaddrinfo

    def wait(*args: Any, **kwargs: Any) -> Any:
        answers.wait(20)
        return look_up(*args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", wait)
    yield answers
    answers.set()


def test_a_name_that_is_not_found_out_costs_a_push_less_than_a_second(
    project: Project, silent_resolver: threading.Event
) -> None:
    assert project.push() < BUDGET
    assert sum(project.push() for _ in range(200)) < 0.3
    silent_resolver.set()
    # The connection that nobody waited for is used when it is there at last.
    wait_for(lambda: announce_with(project.dispatcher), 3, "hints are sent")


def test_a_connection_that_the_server_ended_is_not_replaced_for_longer_than_a_second(
    project: Project, own_valkey: RedisServer, request: pytest.FixtureRequest
) -> None:
    assert announce_with(project.dispatcher)
    request.getfixturevalue("silent_resolver")
    own_valkey.kill()
    assert project.push() < BUDGET


def test_behind_a_new_connection_everything_is_set_up_anew(project: Project, own_valkey: RedisServer) -> None:
    """Fault: what was sent to a server right after its restart had no expiry."""
    assert announce_with(project.dispatcher)
    own_valkey.restart()
    assert announce_with(project.dispatcher)
    with own_valkey.client() as client:
        left = [client.ttl(key) for key in client.scan_iter("*")]
    assert len(left) == 2
    assert all(seconds > 0 for seconds in left)


def test_a_process_that_can_start_no_thread_pushes(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(bounds, "start_thread", refuse)
    assert announce_with(project.dispatcher)


def test_a_cable_that_falls_silent_is_noticed_and_closing_waits_for_nothing(
    own_valkey: RedisServer, settings: Settings
) -> None:
    cable = Forwarder(("127.0.0.1", own_valkey.port))
    use_cache(settings, f"redis://127.0.0.1:{cable.port}/0")
    project = Project()
    project.listen()
    wait_for(project.hears, 20, "hints arrive")
    cable.hush()
    assert project.push() < BUDGET
    wait_for(lambda: all(session.problem for session in project.worker._sessions), 20, "the silence is noticed")
    began = time.monotonic()
    project.dispatcher.close()
    assert time.monotonic() - began < 0.2
    cable.cut()


def test_a_push_does_not_wait_for_answers_that_come_byte_by_byte(
    own_valkey: RedisServer, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breaker, "PATIENCE", 1)
    cable = Forwarder(("127.0.0.1", own_valkey.port))
    use_cache(settings, f"redis://127.0.0.1:{cable.port}/0")
    dispatcher = RedisDispatcher({"CACHE": "redis"})
    assert announce_with(dispatcher)
    # Each byte comes in time, and all of them after five seconds.
    cable.drip(0.2)
    with pytest.raises(Unavailable, match="Timeout reading"):
        dispatcher.hint("mail", [uuid7() for _ in range(PORTION + 1)])
    cable.drip(0.0)
    wait_for(lambda: announce_with(dispatcher), 10, "hints are sent again")
    dispatcher.close()
    cable.cut()


def test_a_worker_whose_hints_come_byte_by_byte_says_so(
    own_valkey: RedisServer, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "PATIENCE", 1.0)
    cable = Forwarder(("127.0.0.1", own_valkey.port))
    use_cache(settings, f"redis://127.0.0.1:{cable.port}/0")
    project = Project()
    project.listen()
    wait_for(project.hears, 20, "hints arrive")
    cable.drip(0.1)
    with own_valkey.client() as client:
        # Ten seconds long, while the answer that there is no hint takes half of one.
        client.zadd(project.dispatcher._keys.queue("mail"), {"x" * 100: 1})
    wait_for(lambda: project.worker._sessions[0].problem, 10, "it is told")
    cable.drip(0.0)
    wait_for(project.hears, 30, "hints arrive again")
    project.dispatcher.close()
    cable.cut()


def test_a_server_without_bzmpop_is_told_once_and_takes_hints_that_are_not_heard(
    own_valkey: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    own_valkey.restart("--rename-command", "BZMPOP", "")
    project = Project()
    with caplog.at_level(logging.WARNING, "django_jobs"):
        project.listen()
        wait_for(lambda: "Redis 7, Valkey, or newer" in (project.worker.problem() or ""), 20, "it is told")
        failures = project.worker._sessions[0]._loop
        wait_for(lambda: failures._failures > 2, 10, "it tries again")
    assert [text for text in caplog.messages if "too old" in text] == caplog.messages[:1]
    assert not caplog.records[0].exc_info
    project.dispatcher.close()


@pytest.mark.parametrize("url", ["redis://:s3cret@127.0.0.1:{port}/0", "redis://anna:s3cret@127.0.0.1:{port}/0"])
def test_a_wrong_password_is_told_without_it(
    own_valkey: RedisServer, settings: Settings, caplog: pytest.LogCaptureFixture, url: str
) -> None:
    own_valkey.restart("--requirepass", "another")
    use_cache(settings, url.format(port=own_valkey.port))
    project = Project()
    with caplog.at_level(logging.DEBUG):
        project.listen()
        wait_for(lambda: "invalid username-password" in (project.worker.problem() or ""), 20, "it is told")
        with pytest.raises(Unavailable, match="invalid username-password"):
            project.dispatcher.hint("mail", [uuid7()])
    assert "s3cret" not in caplog.text
    assert "s3cret" not in project.dispatcher.describe()
    project.dispatcher.close()


def test_an_outage_is_one_line_without_a_traceback_however_many_push(
    own_valkey: RedisServer, settings: Settings, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatchers, "_logged_at", float("-inf"))
    monkeypatch.setattr(dispatchers, "_unlogged", 0)
    settings.DJANGO_JOBS = {"DISPATCHER": {"BACKEND": "redis", "OPTIONS": {"CACHE": "redis"}}}
    own_valkey.kill()
    with caplog.at_level(logging.DEBUG, "django_jobs"):
        for _ in range(50):
            announce("mail", [uuid7()])
    assert dispatchers._unlogged == 49
    [record] = caplog.records
    assert "the cache 'redis': Error 111 connecting to it. Connection refused." in record.getMessage()
    assert record.exc_info is None


class Unsteady(session.Session):
    """A session whose steps are taken by hand, over a connection that only notes when it is cut."""

    name = "unsteady"

    def __init__(self) -> None:
        self.is_broken, self.cuts = False, 0
        pool = SimpleNamespace(disconnect=self._note)
        server: Any = SimpleNamespace(
            client=lambda **options: SimpleNamespace(connection_pool=pool), faults=contextlib.nullcontext
        )
        super().__init__(server, breaker.Breaker())

    def _note(self) -> None:
        self.cuts += 1

    def _open(self) -> None:
        self._listen()

    def _listen(self) -> float:
        if self.is_broken:
            raise Unavailable("it is down")
        return 0.0


def test_pushes_are_refused_only_when_a_worker_finds_no_new_connection() -> None:
    made = Unsteady()
    made._tick()
    made.is_broken = True
    with pytest.raises(Unavailable):
        made._tick()
    assert made._breaker.call(lambda: "sent") == "sent"
    with pytest.raises(Unavailable):
        made._tick()
    with pytest.raises(Unavailable, match="not tried again yet"):
        made._breaker.call(lambda: "sent")
    made.is_broken = False
    made._tick()
    assert made._breaker.call(lambda: "sent") == "sent"


def test_a_connection_that_is_opened_while_its_session_closes_is_closed_too() -> None:
    made = Unsteady()
    made.close()
    assert made.cuts == 1
    made._tick()
    assert made.cuts == 2


def test_after_a_failure_one_caller_tries_and_the_others_wait_for_what_comes_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(breaker, "SHORTEST", 60.0)
    made, asked, go_on = breaker.Breaker(), threading.Event(), threading.Event()

    def fail() -> None:
        raise Unavailable("it is down")

    def hang() -> str:
        asked.set()
        assert go_on.wait(20)
        return "it is back"

    with pytest.raises(Unavailable, match="it is down"):
        made.call(fail)
    with pytest.raises(Unavailable, match="not tried again yet"):
        made.call(hang)
    assert not asked.is_set()
    made._open_until = time.monotonic()
    answers: list[str] = []
    trier = threading.Thread(target=lambda: answers.append(made.call(hang)))
    trier.start()
    assert asked.wait(20)
    with pytest.raises(Unavailable, match="not tried again yet"):
        made.call(hang)
    go_on.set()
    trier.join()
    assert [*answers, made.call(lambda: "and works")] == ["it is back", "and works"]


def test_a_failure_that_took_long_is_not_repeated_for_twenty_times_as_long() -> None:
    made = breaker.Breaker()

    def fail_late() -> None:
        time.sleep(0.1)
        raise Unavailable("no answer")

    began = time.monotonic()
    with pytest.raises(Unavailable):
        made.call(fail_late)
    ended = time.monotonic()
    # A worker of this process sees it as well, and will try again sooner.
    made.trip("no connection")
    assert made._open_until is not None
    assert began + 21 * 0.1 <= made._open_until <= ended + 20 * (ended - began)


def test_a_try_that_ends_in_an_unexpected_way_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breaker, "SHORTEST", 0.01)
    made = breaker.Breaker()
    made.trip("it is down")
    assert made._open_until is not None
    wait_for(lambda: made._open_until < time.monotonic(), 20, "one may try")
    with pytest.raises(ZeroDivisionError):
        made.call(lambda: 1 / 0)

    def answer() -> bool:
        try:
            return made.call(lambda: True)
        except Unavailable:
            return False

    wait_for(answer, 20, "another one may try")
