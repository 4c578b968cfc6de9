"""The environment of latency.py, idle.py and key_loss.py: a database, Valkey if needed, and runjobs processes."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.engines import embedded_postgres, mysql_url
from tests.redis_servers import running_redis

ROOT = Path(__file__).resolve().parent.parent
MODES = ("redis", "database")
ENGINES = ("postgres", "mysql", "sqlite")


@contextlib.contextmanager
def world(engine: str, mode: str) -> Iterator[str]:
    """Set up Django on an empty database, with the dispatcher of that name; yield the versions it runs on."""
    with contextlib.ExitStack() as stack:
        os.environ["DJANGO_SETTINGS_MODULE"] = "benchmarks.settings"
        os.environ["BENCHMARK_DISPATCHER"] = mode
        os.environ["DATABASE_URL"] = stack.enter_context(_database(engine))
        versions = []
        if mode == "redis":
            server = stack.enter_context(running_redis("valkey"))
            os.environ["BENCHMARK_REDIS_URL"] = server.url
            versions.append(server.version)
        import django
        from django.core.management import call_command
        from django.db import connection, connections

        django.setup()
        call_command("migrate", verbosity=0)
        version = ".".join(map(str, connection.get_database_version()))
        versions = [f"{connection.display_name} {version}", *versions, f"Python {sys.version.split()[0]}"]
        try:
            yield ", ".join([*versions, f"Django {django.get_version()}", f"{os.cpu_count()} cores"])
        finally:
            connections.close_all()


@contextlib.contextmanager
def _database(engine: str) -> Iterator[str]:
    if engine == "postgres":
        with embedded_postgres() as url:
            yield url
    elif engine == "sqlite":
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            yield f"sqlite:///{folder}/jobs.sqlite3"
    else:
        import pymysql

        url, name = mysql_url(), f"bench_{os.getpid()}"
        from urllib.parse import urlsplit

        parts = urlsplit(url)
        server = pymysql.connect(
            host=parts.hostname, port=parts.port or 3306, user=parts.username, password=parts.password or ""
        )
        with server.cursor() as cursor:
            cursor.execute(f"CREATE DATABASE {name} CHARACTER SET utf8mb4")
            try:
                yield f"{url.rstrip('/')}/{name}"
            finally:
                cursor.execute(f"DROP DATABASE {name}")


def runjobs(
    *options: str, workers: int = 1, **environment: str
) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    """See python(); runs runjobs with these options."""
    return python("django", "runjobs", *options, workers=workers, **environment)


@contextlib.contextmanager
def python(*command: str, workers: int = 1, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a module as a process; it, or this many children of it, have registered when the block begins."""
    from django_jobs.models import Worker

    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        try:
            while Worker.objects.filter(stopped_at=None).count() < workers:
                if process.poll() is not None:
                    output.seek(0)
                    raise SystemExit(f"{command[0]} ended with {process.returncode}:\n{output.read().decode()}")
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)
