"""Drain the queue in a process of its own: `python -m benchmarks.worker SLOTS COUNT` prints the seconds it took.

Started by drain.py. The parts are those of `runjobs --worker`; the time runs from the start of the worker's threads to
the commit of the last outcome.
"""

import sys
import time

import django

django.setup()

from benchmarks.jobs import noop  # noqa: E402
from django_jobs.execution.liveness import Liveness  # noqa: E402
from django_jobs.models import jobs_alias  # noqa: E402
from django_jobs.runtime.garbage import rare_collections  # noqa: E402
from django_jobs.runtime.worker import Worker  # noqa: E402
from django_jobs.served import Served  # noqa: E402


def main(slots: int, count: int) -> float:
    """Run `count` jobs in `slots` slots; return the seconds."""
    liveness = Liveness(roles=["worker"], queues=None, names=[noop.name], slots=slots, using=jobs_alias())
    liveness.register()
    worker = Worker(liveness=liveness, served=Served(is_any_but=True), concurrency=slots, using=jobs_alias())
    with rare_collections():
        started = time.perf_counter()
        worker.start()
        while worker.claimed < count or not worker.is_idle:
            time.sleep(0.005)
        elapsed = time.perf_counter() - started
    worker.shutdown(time.monotonic() + 5)
    liveness.retire("done")
    return elapsed


if __name__ == "__main__":
    sys.stdout.write(f"{main(int(sys.argv[1]), int(sys.argv[2])):.6f}\n")
