"""Measure how fast a worker drains a queue and how fast push writes, each beside its floor in the same round.

    make bench                                           # DATABASE_URL if that is PostgreSQL, else an embedded one
    make bench ARGS="--jobs 20000 --rounds 5 --history 500000 --future 100000 --paused 100000"

The floor of a drain is a hand-written loop over the same table: claim ten rows with one UPDATE, delete them with one
DELETE, a commit each. The floor of push is `Model.objects.create()` of the same row. Rates are per second: the median
over the rounds, with the smallest and the largest; ratios are of medians of the same rounds. Commits are durable.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.engines import embedded_postgres  # noqa: E402

Rates = dict[str, list[float]]


@contextlib.contextmanager
def database() -> Iterator[None]:
    """Set DATABASE_URL to a PostgreSQL server: the one it names, or one started for this."""
    if os.environ.get("DATABASE_URL", "").startswith("postgres"):
        yield
        return
    with embedded_postgres() as url:
        os.environ["DATABASE_URL"] = url
        yield


class Bench:
    """The measurements, on one migrated database of their own."""

    def __init__(self, jobs: int) -> None:
        from django.db import connection

        from benchmarks.jobs import noop
        from django_jobs.models import JobExecution

        self.jobs = jobs
        self.noop = noop
        self.connection = connection
        self.model = JobExecution
        self.table = JobExecution._meta.db_table

    def execute(self, statement: str, parameters: list[object] | None = None) -> None:
        """Run one statement."""
        with self.connection.cursor() as cursor:
            cursor.execute(statement, parameters)

    def clear(self) -> None:
        """Empty the table."""
        self.execute(f"TRUNCATE {self.table}")

    def fill(self) -> None:
        """Put the jobs into the queue and let the planner know."""
        from django_jobs import clock, transitions

        now = clock.now("default")
        for start in range(0, self.jobs, 5000):
            numbers = range(start, min(start + 5000, self.jobs))
            rows = [self.model(job_name=self.noop.name, payload={"number": number}) for number in numbers]
            transitions.insert(rows, now=now, using="default")
        self.execute(f"VACUUM ANALYZE {self.table}")
        self.execute("CHECKPOINT")

    def add_history(self, finished: int, future: int, paused: int) -> None:
        """Add finished and future rows beside the work, and rows of a paused job ahead of it."""
        self.execute(
            f"""
            INSERT INTO {self.table} (id, job_name, queue, status, rank, payload, key, context, attempt, max_attempts,
                run_no, scheduled_at, parked_reason, created_at, updated_at, hinted_at, completed_at, error, errors,
                logs, triggered_by, triggered_by_name, cancelled_by, cancelled_by_name, retried_by, retried_by_name,
                rescues)
            SELECT gen_random_uuid(), 'benchmark.history', 'default',
                CASE WHEN n <= %s THEN 'error' ELSE 'scheduled' END, CASE WHEN n <= %s THEN 0 ELSE -100 END,
                '{{}}', '', '{{}}', 1, 1, 1,
                now() + CASE WHEN n <= %s THEN interval '30 days' ELSE interval '-1 day' END,
                CASE WHEN n <= %s THEN '' ELSE 'paused' END, now(), now(), now(), CASE WHEN n <= %s THEN now() END,
                'ValueError: boom', '[]', '[]', '', '', '', '', '', '', 0
            FROM generate_series(1, %s) AS n
            """,
            [finished, *[finished + future] * 3, finished, finished + future + paused],
        )

    def claim_and_delete(self) -> float:
        """Return the rate of the hand-written loop."""
        claim = (
            f"UPDATE {self.table} SET status = 'running', attempt = attempt + 1, started_at = now() WHERE id IN ("
            f"SELECT id FROM {self.table} WHERE status = 'pending' AND queue = 'default' "
            "ORDER BY rank, scheduled_at, id LIMIT 10 FOR UPDATE SKIP LOCKED) RETURNING id, payload"
        )
        self.fill()
        started = time.perf_counter()
        with self.connection.cursor() as cursor:
            while True:
                cursor.execute(claim)
                ids = [row[0] for row in cursor.fetchall()]
                if not ids:
                    return self.jobs / (time.perf_counter() - started)
                cursor.execute(f"DELETE FROM {self.table} WHERE id = ANY(%s)", [ids])

    def drain(self, slots: int) -> float:
        """Return the rate of a worker with this many slots."""
        self.fill()
        answer = subprocess.run(
            [sys.executable, "-m", "benchmarks.worker", str(slots), str(self.jobs)],
            cwd=ROOT,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        if left := self.model.objects.filter(job_name=self.noop.name).exclude(status="ok").count():
            raise SystemExit(f"{left} jobs did not end as ok")
        self.model.objects.filter(job_name=self.noop.name).delete()
        return self.jobs / float(answer.stdout)

    def pair(self, one: Callable[[int], object], other: Callable[[int], object], calls: int) -> tuple[float, float]:
        """Return the rates of two calls, in turns of fifty, so that fluctuations of the machine affect both."""
        spent = [0.0, 0.0]
        for start in range(0, calls, 50):
            for which, call in enumerate((one, other)):
                begun = time.perf_counter()
                for number in range(start, start + 50):
                    call(number)
                spent[which] += time.perf_counter() - begun
        return calls / spent[0], calls / spent[1]

    def create_and_push(self, calls: int) -> tuple[float, float]:
        """Return the rates of `Model.objects.create()` and of push()."""
        from django_jobs import clock

        name, now = self.noop.name, clock.now("default")

        def create(number: int) -> object:
            return self.model.objects.create(
                job_name=name,
                status="pending",
                payload={"number": number},
                scheduled_at=now,
                created_at=now,
                updated_at=now,
                hinted_at=now,
            )

        self.clear()
        return self.pair(create, lambda number: self.noop.push(number=number), calls)


def measure(bench: Bench, rounds: int, *, history: bool) -> Rates:
    """Take every measurement once a round."""
    rates: Rates = {}

    def add(name: str, rate: float) -> None:
        rates.setdefault(name, []).append(rate)
        sys.stderr.write(f"  {name}: {rate:,.0f}/s\n")

    for number in range(rounds):
        sys.stderr.write(f"round {number + 1} of {rounds}{', with history' if history else ''}\n")
        if not history:
            create, push = bench.create_and_push(2000)
            add("create", create)
            add("push", push)
            bench.clear()
        add("floor", bench.claim_and_delete())
        add("10 slots", bench.drain(10))
        add("32 slots", bench.drain(32))
    return rates


def line(name: str, rates: list[float], floor: list[float], target: float) -> str:
    """Return one row of the table."""
    middle = statistics.median(rates)
    ratio = middle / statistics.median(floor)
    spread = f"{min(rates):,.0f} to {max(rates):,.0f}"
    return (
        f"| {name} | {middle:,.0f}/s | {spread} | {ratio:.2f} | {target:.2f} | {'yes' if ratio >= target else 'NO'} |"
    )


def report(empty: Rates, full: Rates | None) -> str:
    """Return the table."""
    lines = [
        "| measured | median | spread | of its floor | target | reached |",
        "|---|---|---|---|---|---|",
        line("claim-and-delete loop, batches of 10 (floor)", empty["floor"], empty["floor"], 1.0),
        line("drain, 10 slots", empty["10 slots"], empty["floor"], 0.6),
        line("drain, 32 slots", empty["32 slots"], empty["floor"], 1.2),
        line("Model.objects.create() (floor)", empty["create"], empty["create"], 1.0),
        line("push()", empty["push"], empty["create"], 0.85),
    ]
    if full is not None:
        lines += [
            line("loop beside history (floor: the loop on an empty table)", full["floor"], empty["floor"], 0.0),
            line("drain, 10 slots, beside history (floor: empty)", full["10 slots"], empty["10 slots"], 0.9),
            line("drain, 32 slots, beside history (floor: empty)", full["32 slots"], empty["32 slots"], 0.9),
        ]
    return "\n".join(lines)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--history", type=int, default=500_000, help="finished rows beside the work; 0 leaves that part out"
    )
    parser.add_argument("--future", type=int, default=100_000, help="scheduled rows beside the work")
    parser.add_argument("--paused", type=int, default=100_000, help="rows of a paused job, of the highest priority")
    options = parser.parse_args()
    os.environ["DJANGO_SETTINGS_MODULE"] = "benchmarks.settings"
    with database():
        import django
        from django.core.management import call_command
        from django.db import connection

        django.setup()
        call_command("migrate", verbosity=0)
        bench = Bench(options.jobs)
        bench.clear()
        empty, full = measure(bench, options.rounds, history=False), None
        if options.history:
            bench.clear()
            bench.add_history(options.history, options.future, options.paused)
            full = measure(bench, options.rounds, history=True)
        with connection.cursor() as cursor:
            cursor.execute("SELECT version()")
            server = " ".join(cursor.fetchone()[0].split()[:2])
        connection.close()
    sys.stdout.write(
        f"{server}, Python {sys.version.split()[0]}, Django {django.get_version()}, {os.cpu_count()} cores; "
        f"{options.jobs:,} jobs a drain, {options.rounds} rounds\n\n{report(empty, full)}\n"
    )


if __name__ == "__main__":
    main()
