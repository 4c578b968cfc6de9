"""Measure what it costs when Redis loses every key while workers drain the queue.

    python -m benchmarks.key_loss                            # an embedded PostgreSQL and Valkey
    python -m benchmarks.key_loss --engine mysql --jobs 10000 --rounds 3

The floor is the same without the losses: the same processes of one `runjobs --processes`, the same jobs of mixed
priorities, pushed in portions while they work. Floor and measurement take turns. Half of the losses come while rows are
pushed, the others while the rest is worked off. Times are from the first push until all rows have ended.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable

from benchmarks.world import ENGINES, runjobs, world

PRIORITIES = ("low", "normal", 7, "high", "critical")
PORTION = 500


def drain(jobs: int, losses: int, lose: Callable[[], object]) -> float:
    """Push the jobs and wait until all have ended; return the seconds."""
    from benchmarks.jobs import noop
    from django_jobs.models import JobExecution

    def wait(left: int) -> None:
        while JobExecution.objects.live().count() > left:
            time.sleep(0.02)

    began = time.monotonic()
    portions = range(0, jobs, PORTION)
    early = losses - losses // 2
    # Spread evenly over the portions.
    after = {portions[len(portions) * number // early] for number in range(early)}
    for first in portions:
        for number, priority in enumerate(PRIORITIES):
            share = range(first + number, min(first + PORTION, jobs), len(PRIORITIES))
            noop.using(priority=priority).push_many([{"number": each} for each in share])
        if first in after:
            lose()
    rest, late = JobExecution.objects.live().count(), losses // 2
    for number in range(late):
        wait(rest * (late - number) // (late + 1))
        lose()
    wait(0)
    spent = time.monotonic() - began
    if JobExecution.objects.exclude(status="ok", attempt=1, run_no=1).exists():
        raise SystemExit("not all jobs ended as ok in their first run")
    return spent


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=ENGINES, default="postgres")
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--losses", type=int, default=10)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    undisturbed, disturbed = [], []
    with (
        world(options.engine, "redis") as servers,
        runjobs("--worker", "--processes", str(options.processes), workers=options.processes),
    ):
        import redis

        with redis.Redis.from_url(os.environ["BENCHMARK_REDIS_URL"]) as client:
            # A warm-up, whose times do not count.
            drain(options.jobs // 10, 0, client.flushall)
            for _ in range(options.rounds):
                undisturbed.append(drain(options.jobs, 0, client.flushall))
                disturbed.append(drain(options.jobs, options.losses, client.flushall))
    sys.stdout.write(f"{servers}; {options.jobs:,} jobs, {options.processes} processes, {options.rounds} rounds\n")
    for name, times in ("undisturbed", undisturbed), (f"every key deleted {options.losses} times", disturbed):
        spread = f"{min(times):.1f} to {max(times):.1f}"
        sys.stdout.write(f"{name}: {statistics.median(times):.1f} s ({spread})\n")
    sys.stdout.write(f"ratio: {statistics.median(disturbed) / statistics.median(undisturbed):.2f}\n")


if __name__ == "__main__":
    main()
