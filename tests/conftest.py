"""Fixtures for all tests, the choice of tests by engine, and the closing report of what ran on which server."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import platform
import signal
import sqlite3
import threading
from collections.abc import Callable, Generator, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import django
import hypothesis
import pytest

from tests import encryption, pgbouncer
from tests.engines import ENGINES
from tests.support import Ledger, Runjobs, wait_for

pytest_plugins = ["tests.redis_servers"]

# Modules, items and their parameters live as long as the run: with Python's thresholds, a fifth of the time would be
# spent on finding that out again and again. Whatever a test leaves unclosed in a cycle is still found, in a later test
# or at the end.
gc.set_threshold(20_000, 20, 50)

# Other examples in each run, so that few are enough for each.
hypothesis.settings.register_profile("dev", deadline=None, max_examples=30)
# The same examples each time, so that a failure is caused by the change that was tested.
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")

# Programs that cases on PostgreSQL need, by the mark of these cases, and where they are.
PROGRAMS = {"pgbouncer": pgbouncer.BINARY, "openssl": encryption.BINARY}

# Servers that took part, by name, with their versions.
_servers = pytest.StashKey[dict[str, str]]()
# How many cases --database-only left out.
_left_out = pytest.StashKey[int]()


def pytest_configure() -> None:
    """Restore signals that a run in the background or under nohup ignores: the tests' processes would inherit that."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--database-only", action="store_true", help="leave out the cases that need no database")


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
    """Ask the server for its version before anything runs, so that a missing one is reported in one line."""
    from django.conf import settings

    try:
        version = _database_version()
    except Exception as error:
        pytest.exit(f"ENGINE={settings.ENGINE}: no connection to the server: {error}", returncode=1)
    session.config.stash[_servers] = {"database": version}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that are marked for other engines and, with --database-only, those without a database.

    Also those that need a program which is not installed; the summary names it.
    """
    from django.conf import settings

    chosen, left_out = [], []
    config.stash[_left_out] = 0
    for item in items:
        marked = {engine for engine in ENGINES if item.get_closest_marker(engine)}
        if marked:
            belongs = settings.ENGINE in marked
        else:
            belongs = not config.option.database_only or _needs_database(item)
            config.stash[_left_out] += not belongs
        if any(item.get_closest_marker(name) and binary is None for name, binary in PROGRAMS.items()):
            belongs = False
        (chosen if belongs else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    # The longest first, or the run might end with one that started last; the others as they come.
    items[:] = sorted(chosen, key=_seconds, reverse=True)
    if hasattr(config, "workeroutput"):
        config.workeroutput["left_out"] = config.stash[_left_out]


def _seconds(item: pytest.Item) -> int:
    """The duration that the case declares: the argument of its mark "slow", if it has one."""
    mark = item.get_closest_marker("slow")
    return int(mark.args[0]) if mark is not None and mark.args else 0


def _needs_database(item: pytest.Item) -> bool:
    """Whether the case may touch the test database: pytest-django forbids it to all others."""
    fixtures = {"db", "transactional_db"}.intersection(getattr(item, "fixturenames", ()))
    return bool(fixtures) or item.get_closest_marker("django_db") is not None


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over from a worker process how many cases were left out; each of them sees all."""
    node.config.stash[_left_out] = getattr(node, "workeroutput", {}).get("left_out", 0)


def pytest_collection_finish() -> None:
    """Exclude from garbage collection what lives as long as the run: modules, items and their parameters."""
    from django_jobs.runtime import runner

    gc.collect()
    gc.freeze()
    # The first run of a Runner would take it back into collections. tests/runtime/test_garbage.py tests the real one.
    runner.rare_collections = contextlib.nullcontext  # type: ignore[assignment]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say which servers took part, and write the numbers for tests.run."""
    from django.conf import settings

    from tests.redis_servers import REDIS_SERVERS

    servers = [
        *config.stash.get(_servers, {}).values(),
        *sorted(config.stash[REDIS_SERVERS]),
        f"Python {platform.python_version()}",
        f"Django {django.get_version()}",
    ]
    terminalreporter.write_line(f"ran on {', '.join(servers)}")
    left_out = config.stash.get(_left_out, 0)
    if left_out:
        terminalreporter.write_line(f"{left_out} cases need no database and were left to another run")
    missing = [name for name, binary in PROGRAMS.items() if settings.ENGINE == "postgres" and binary is None]
    for name in missing:
        terminalreporter.write_line(f"MISSING: {name} is not installed, the cases marked so did not run")
    if path := os.environ.get("TEST_REPORT"):
        counts = {name: len(terminalreporter.stats.get(name, ())) for name in ("passed", "failed", "error", "skipped")}
        counts["failed"] += counts.pop("error")
        Path(path).write_text(json.dumps({"servers": servers, "left_out": left_out, "missing": missing, **counts}))


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, dict[str, Any] | None, dict[str, Any] | None]:
    """Make captured output fit for transport from a worker process: some tests log lone surrogates on purpose."""
    data = yield
    if data is not None and data.get("sections"):
        data["sections"] = [(name, text.encode(errors="backslashreplace").decode()) for name, text in data["sections"]]
    return data


@pytest.fixture
def now() -> datetime:
    """The time by the clock of the database."""
    from django_jobs import clock

    return clock.now("default")


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """The ledger of the acc jobs, in this process and in those it starts."""
    path = tmp_path / "ledger"
    monkeypatch.setenv("ACC_LEDGER", str(path))
    return Ledger(path)


@pytest.fixture
def set_pool(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Set the pool of the database "default"; its settings are those of all threads."""
    from django.db import connections

    def lingers() -> bool:
        return any(thread.name == "django_jobs notify" for thread in threading.enumerate())

    wait_for(lambda: not lingers(), 10, "the thread of earlier tests has closed its connections")
    return lambda pool: monkeypatch.setitem(connections.settings["default"], "OPTIONS", {"pool": pool})


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
