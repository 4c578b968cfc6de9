"""Do to a few processes all that can happen to them, then check every promise: `python -m tests.chaos --help`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.engines import ENGINES, PostgresServer, database_settings, embedded_postgres_server, mysql_url
from tests.redis_servers import running_redis

if TYPE_CHECKING:
    from tests.chaos.hint_server import HintServer
    from tests.chaos.judgement import Evidence
    from tests.chaos.world import World

SETTINGS: dict[str, Any] = {
    "POLL_INTERVAL": 0.2,
    "HEARTBEAT_INTERVAL": 1,
    "WORKER_LOST_AFTER": 3,
    "SWEEP_CRON": "*/5 * * * * *",
    "TRIM_CRON": "*/7 * * * * *",
    "STALE_THRESHOLD": 5,
    "DRAIN_TIMEOUT": 2,
    "INTERRUPT_GRACE": 0.5,
    # Rows go while all of this happens; the history stays.
    "KEEP": {"ok": 15, "error": 60, "cancelled": 30},
}
REDIS: dict[str, Any] = {
    "DISPATCHER": {"BACKEND": "redis", "OPTIONS": {"CACHE": "redis"}},
    # As it is by default: hints are to be what workers live on.
    "POLL_INTERVAL": 1,
}
DISPATCHERS = ("database", "redis")
SHOWN = 6


@contextlib.contextmanager
def database(engine: str, home: Path) -> Iterator[tuple[dict[str, str], PostgresServer | None]]:
    """Yield what names an empty database in the environment, and its server if it is ours to restart."""
    if engine == "postgres":
        with embedded_postgres_server() as server:
            yield {"DATABASE_URL": server.url}, server
    elif engine == "mysql":
        url, name = os.environ.get("DATABASE_URL") or mysql_url(), f"chaos_django_jobs_{os.getpid()}"
        with mysql_database(url, name):
            yield {"DATABASE_URL": url, "DATABASE_NAME": name}, None
    else:
        yield {"DATABASE_NAME": str(home / "chaos.sqlite3")}, None


@contextlib.contextmanager
def mysql_database(url: str, name: str) -> Iterator[None]:
    execute_on_mysql(url, f"CREATE DATABASE {name} CHARACTER SET utf8mb4")
    try:
        yield
    finally:
        execute_on_mysql(url, f"DROP DATABASE {name}")


def execute_on_mysql(url: str, statement: str) -> None:
    import pymysql

    server = database_settings("mysql", url)
    login = {"user": server["USER"], "password": server["PASSWORD"]}
    with pymysql.connect(host=server["HOST"], port=int(server["PORT"] or 3306), **login) as connection:
        connection.cursor().execute(statement)


@contextlib.contextmanager
def hints(dispatcher: str) -> Iterator[tuple[dict[str, str], dict[str, Any], HintServer | None]]:
    """Yield what names the server of the dispatcher in the environment, the settings for it, and the server."""
    if dispatcher == "database":
        yield {}, {}, None
        return
    from tests.chaos.hint_server import HintServer

    with running_redis("valkey") as server:
        yield {"REDIS_URL": server.url}, REDIS, HintServer(server)


def tell_numbers(world: World, evidence: Evidence) -> None:
    made = [*evidence.made()]
    ends = [life[-1] for life in evidence.lives.values()]
    print(f"pushed: {len(made)} rows of {len(evidence.journal.pushes)} pushes, {sum(evidence.starts.values())} starts")
    print(
        f"orders: {sum(f == 'unknown' for f in evidence.journal.fates.values())} of {len(evidence.journal.fates)} "
        f"of unknown end; cancels asked {sum(evidence.journal.cancels.values())}, "
        f"retries {sum(evidence.journal.retries.values())}"
    )
    print(f"rows: {len(ends)}, of which {sum(end.status is None for end in ends)} were deleted since")
    if waits := [*evidence.waits()]:
        print(f"half of the new rows were claimed within {1000 * statistics.median(waits):.0f} ms")
    print(", ".join(f"{what}: {count}" for what, count in sorted(world.counts.items())), flush=True)


def tell_faults(world: World, evidence: Evidence, verdict: dict[str, list[str]]) -> None:
    """Print what is wrong, what happened to the rows it is about, and what was done to the processes."""
    print("\n".join(world.log))
    for sentence, faults in verdict.items():
        print(f"\nFAULT: {sentence}: {len(faults)}")
        for fault in faults[:SHOWN]:
            print(f"  {fault}")
            for row_id in [row_id for row_id in evidence.lives if row_id in fault]:
                tell_life(evidence, row_id)
    print(f"\nthe processes' own output is in {world.home}")


def tell_life(evidence: Evidence, row_id: str) -> None:
    lines = [
        (entry.time, f"{entry.event}, attempt {entry.attempt}, pid {entry.pid}, tag {entry.tag}")
        for entry in evidence.ledger
        if entry.row_id == row_id
    ]
    for change in evidence.lives[row_id]:
        mark = ", marked" if change.is_marked else ""
        text = f"{change.old_status} -> {change.status}, run {change.run_no}, attempt {change.attempt}{mark}"
        lines.append((change.at, f"{text}, worker {change.worker_id} {change.error[:120]!r}"))
    for at, text in sorted(lines):
        print(f"      {at:.3f}  {text}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--engine", choices=ENGINES, default="postgres")
    parser.add_argument(
        "--dispatcher", choices=DISPATCHERS, default="database", help="redis: on a Valkey of the run's own, struck too"
    )
    parser.add_argument("--seconds", type=float, default=60, help="how long the chaos lasts")
    parser.add_argument("--processes", type=int, default=0, help="how many children each worker has; 0: is one itself")
    parser.add_argument("--seed", type=int, help="repeats the plan of another run")
    parser.add_argument("--home", type=Path, help="where ledger, journal and logs are written and stay")
    options = parser.parse_args()
    seed = random.randrange(10_000) if options.seed is None else options.seed
    shape = f", DISPATCHER={options.dispatcher}"
    shape += f", PROCESSES={options.processes}" if options.processes else ""
    print(f"chaos on {options.engine}, {options.seconds:g} s, SEED={seed}{shape}", flush=True)
    with contextlib.ExitStack() as stack:
        home = options.home or Path(tempfile.mkdtemp(prefix="chaos-"))
        home.mkdir(parents=True, exist_ok=True)
        names, server = stack.enter_context(database(options.engine, home))
        more_names, settings, redis = stack.enter_context(hints(options.dispatcher))
        os.environ.update(
            DJANGO_SETTINGS_MODULE="tests.settings",
            ENGINE=options.engine,
            OTHER_DATABASE_NAME=str(home / "other.sqlite3"),
            DJANGO_JOBS_OVERRIDES=json.dumps(SETTINGS | settings),
            ACC_LEDGER=str(home / "ledger"),
            ACC_CRON="* * * * * *",
            CHAOS_JOURNAL=str(home / "journal"),
            PYTHONUNBUFFERED="1",
            PYTHONFAULTHANDLER="1",
            **names,
            **more_names,
        )
        code = play(seed, options.seconds, home, server=server, redis=redis, processes=options.processes)
    if code == 0 and not options.home:
        shutil.rmtree(home)
    return code


def play(
    seed: int, seconds: float, home: Path, *, server: PostgresServer | None, redis: HintServer | None, processes: int
) -> int:
    import django
    from django.core.management import call_command

    django.setup()
    call_command("migrate", verbosity=0, run_syncdb=True)

    from tests.chaos.judgement import judge
    from tests.chaos.world import World

    world = World(seed=seed, home=home, server=server, redis=redis, processes=processes)
    try:
        world.run(seconds)
    finally:
        world.close()
    evidence = world.evidence()
    verdict = judge(evidence)
    if verdict:
        tell_faults(world, evidence, verdict)
    tell_numbers(world, evidence)
    print(f"SEED={seed}: {'every promise was kept' if not verdict else f'{len(verdict)} sentences do not hold'}")
    return 1 if verdict else 0


if __name__ == "__main__":
    sys.exit(main())
