"""Measure how soon an idle runjobs process starts a pushed job, beside its floor, and how soon a cancel arrives.

    python -m benchmarks.latency redis                       # an embedded PostgreSQL and Valkey
    python -m benchmarks.latency redis --engine sqlite --count 300
    python -m benchmarks.latency database                    # NOTIFY on PostgreSQL, polling elsewhere

The floors, taken in turns with the pushes, are the same message between two bare processes (ZADD to BZMPOP, or NOTIFY
to LISTEN), and a durable UPDATE of one row: a worker commits its claim before a handler starts, so nothing can be
faster than both together. Times are from before the call of push() to the first line of the handler, and from the hint,
which comes right after the commit. Pauses between pushes are random, so as not to coincide with polls.
"""

import argparse
import contextlib
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from benchmarks.echo import NAME
from benchmarks.world import ENGINES, MODES, ROOT, runjobs, world

Times = list[float]


class Ear:
    """Receives the times that other processes report."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self._socket.settimeout(30)
        self.port: int = self._socket.getsockname()[1]

    def hear(self) -> float:
        """Wait for the next time."""
        return float(self._socket.recv(64))


@contextlib.contextmanager
def floor(mode: str, engine: str) -> Iterator[Callable[[], float] | None]:
    """Yield a function that returns the seconds of a bare message; None if there is no such message."""
    if mode == "database" and engine != "postgres":
        yield None
        return
    ear = Ear()
    if mode == "redis":
        import redis

        url = os.environ["BENCHMARK_REDIS_URL"]
        client = redis.Redis.from_url(url)

        def send() -> None:
            client.zadd(NAME, {repr(time.monotonic()): 1})
    else:
        import psycopg
        from django.db import connection

        url = psycopg.conninfo.make_conninfo(
            **{
                key: value
                for key, value in connection.get_connection_params().items()
                if key in {"dbname", "user", "password", "host", "port"}
            }
        )
        plain = psycopg.connect(url, autocommit=True)

        def send() -> None:
            plain.execute(f"NOTIFY {NAME}")

    echo = subprocess.Popen([sys.executable, "-m", "benchmarks.echo", mode, url, str(ear.port)], cwd=ROOT)

    def measure() -> float:
        began = time.monotonic()
        send()
        return ear.hear() - began

    try:
        ear.hear()
        yield measure
    finally:
        echo.kill()
        echo.wait()


def starts(count: int, bare: Callable[[], float] | None) -> dict[str, Times]:
    """Return the times of this many pushes, and of as many bare messages."""
    from django.contrib.contenttypes.models import ContentType

    from benchmarks.jobs import beacon
    from django_jobs.dispatchers import get_dispatcher

    found: dict[str, Times] = {
        "floor: the bare message": [],
        "floor: an UPDATE of one row": [],
        "from the call of push": [],
        "from the commit": [],
    }
    row = ContentType.objects.filter(pk=ContentType.objects.create(app_label="floor").pk)
    ear, dispatcher = Ear(), get_dispatcher()
    committed: Times = []
    hint = dispatcher.hint

    def noting(*args: object, **kwargs: object) -> None:
        committed.append(time.monotonic())
        hint(*args, **kwargs)  # type: ignore[arg-type]

    dispatcher.hint = noting  # type: ignore[method-assign]
    for number in range(-10, count):
        time.sleep(random.uniform(0.1, 0.3))
        message = bare() if bare is not None else 0.0
        began = time.monotonic()
        row.update(model=str(number))
        updated = time.monotonic() - began
        began = time.monotonic()
        beacon.push(port=ear.port)
        heard = ear.hear()
        # The first ones are a warm-up.
        if number >= 0:
            found["floor: the bare message"].append(message)
            found["floor: an UPDATE of one row"].append(updated)
            found["from the call of push"].append(heard - began)
            found["from the commit"].append(heard - committed[-1])
    dispatcher.hint = hint  # type: ignore[method-assign]
    if bare is None:
        del found["floor: the bare message"]
    return found


def cancels(count: int) -> Times:
    """Return the times from the call of cancel() until the handler in the other process is told."""
    from benchmarks.jobs import patient

    found, ear = [], Ear()
    for _ in range(count):
        row = patient.push(port=ear.port)
        ear.hear()
        time.sleep(random.uniform(0.1, 0.3))
        began = time.monotonic()
        row.cancel()
        found.append(ear.hear() - began)
    return found


def line(name: str, times: Times) -> str:
    """Return one row of the table."""
    parts = statistics.quantiles(times, n=100, method="inclusive")
    cells = " | ".join(f"{seconds * 1000:.2f}" for seconds in (parts[49], parts[89], parts[98], max(times)))
    return f"| {name} | {cells} |"


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--engine", choices=ENGINES, default="postgres")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--cancels", type=int, default=20)
    options = parser.parse_args()
    with world(options.engine, options.mode) as servers, runjobs("--worker"):
        with floor(options.mode, options.engine) as bare:
            times = starts(options.count, bare)
        times["cancel, to the handler's signal"] = cancels(options.cancels)
    sys.stdout.write(f"{servers}; {options.count} pushes to an idle worker, times in ms\n\n")
    sys.stdout.write("| measured | p50 | p90 | p99 | largest |\n|---|---|---|---|---|\n")
    sys.stdout.write("".join(f"{line(name, found)}\n" for name, found in times.items()))


if __name__ == "__main__":
    main()
