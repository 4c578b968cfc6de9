"""Fixtures for all tests, the choice of tests by engine, and the closing report of what ran on which server."""

from __future__ import annotations

import json
import os
import platform
import socket
import sqlite3
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import django
import hypothesis
import pytest

from tests.engines import ENGINES, embedded_valkey
from tests.support import Ledger, Runjobs

if TYPE_CHECKING:
    from pytest_django import Settings

hypothesis.settings.register_profile("dev", deadline=None)
# The same examples each time: a red run is the fault of the change it ran on.
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")

# Servers that took part, by name, with their versions.
_servers = pytest.StashKey[dict[str, str]]()


def _database_version() -> str:
    from django.db import connection

    if connection.vendor == "sqlite":
        return f"SQLite {sqlite3.sqlite_version}"
    # Around pytest-django's guard: this connection reads no table.
    raw = connection.get_new_connection(connection.get_connection_params())
    with raw.cursor() as cursor:
        cursor.execute("SELECT version()")
        version = str(cursor.fetchone()[0])
    raw.close()
    if connection.vendor == "postgresql":
        return " ".join(version.split()[:2])
    return f"{'MariaDB' if 'mariadb' in version.lower() else 'MySQL'} {version.split('-', maxsplit=1)[0]}"


def pytest_sessionstart(session: pytest.Session) -> None:
    """Ask the server for its version before anything runs, so that an absent one is one clear line."""
    from django.conf import settings

    try:
        version = _database_version()
    except Exception as error:
        pytest.exit(f"ENGINE={settings.ENGINE}: no connection to the server: {error}", returncode=1)
    session.config.stash[_servers] = {"database": version}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that are marked for other engines only."""
    from django.conf import settings

    def belongs(item: pytest.Item) -> bool:
        marked = {engine for engine in ENGINES if item.get_closest_marker(engine)}
        return not marked or settings.ENGINE in marked

    chosen, left_out = [], []
    for item in items:
        (chosen if belongs(item) else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = chosen


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say which servers took part, and write the numbers for tests.run."""
    servers = [
        *config.stash.get(_servers, {}).values(),
        f"Python {platform.python_version()}",
        f"Django {django.get_version()}",
    ]
    terminalreporter.write_line(f"ran on {', '.join(servers)}")
    if path := os.environ.get("TEST_REPORT"):
        counts = {name: len(terminalreporter.stats.get(name, ())) for name in ("passed", "failed", "error", "skipped")}
        counts["failed"] += counts.pop("error")
        Path(path).write_text(json.dumps({"servers": servers, **counts}))


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, dict[str, Any] | None, dict[str, Any] | None]:
    """Make captured output fit to travel from a worker process: some tests log lone surrogates on purpose."""
    data = yield
    if data is not None and data.get("sections"):
        data["sections"] = [(name, text.encode(errors="backslashreplace").decode()) for name, text in data["sections"]]
    return data


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """The ledger of the acc jobs, in this process and in those it starts."""
    path = tmp_path / "ledger"
    monkeypatch.setenv("ACC_LEDGER", str(path))
    return Ledger(path)


@pytest.fixture
def runjobs(transactional_db: None, ledger: Ledger, tmp_path: Path) -> Iterator[Callable[..., Runjobs]]:
    """Start `runjobs` with the given arguments, e.g. runjobs("--worker", jobs={"CONCURRENCY": 2}).wait_ready()."""
    started: list[Runjobs] = []

    def start(*args: str, jobs: dict[str, Any] | None = None, **extra: str) -> Runjobs:
        output = tmp_path / f"runjobs-{len(started) + 1}.log"
        started.append(Runjobs(*args, output=output, jobs=jobs, **extra))
        return started[-1]

    yield start
    for process in started:
        process.close()
        # Shown by pytest when the test fails.
        print(f"--- runjobs pid {process.pid}, exit code {process.process.returncode}\n{process.output}")


@pytest.fixture(scope="session")
def valkey_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a Valkey server for this run: REDIS_URL if that is set, else one started from its wheel."""
    servers = request.config.stash[_servers]
    if url := os.environ.get("REDIS_URL"):
        servers["valkey"] = _valkey_version(url)
        yield url
        return
    with embedded_valkey() as url:
        servers["valkey"] = _valkey_version(url)
        yield url


def _valkey_version(url: str) -> str:
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 6379), timeout=5) as connection:
        connection.sendall(b"INFO server\r\n")
        answer = connection.recv(8192).decode()
    fields = dict(line.split(":", 1) for line in answer.splitlines() if ":" in line)
    return f"Valkey {fields['valkey_version']}" if "valkey_version" in fields else f"Redis {fields['redis_version']}"


@pytest.fixture
def valkey(valkey_url: str, settings: Settings) -> str:
    """An empty Valkey behind the cache alias "valkey"; its URL, for REDIS_URL of processes that the test starts."""
    import redis

    with redis.Redis.from_url(valkey_url) as client:
        client.flushdb()
    settings.CACHES = {
        **settings.CACHES,
        "valkey": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": valkey_url},
    }
    return valkey_url
