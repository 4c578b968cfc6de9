"""Look in the table for live processes, for `runjobs --check`; starts nothing."""

from __future__ import annotations

from collections.abc import Collection
from functools import reduce
from operator import or_

from django_jobs import clock
from django_jobs.models import Worker, jobs_alias
from django_jobs.runtime.fleet import LIMIT
from django_jobs.runtime.startup import ask_database, check_tables
from django_jobs.served import Served

# Seconds; a probe has little time, and comes again.
PATIENCE = 3.0


def missing(*, roles: Collection[str], queues: Collection[str]) -> list[str]:
    """Return the roles and queues that no live process fills or serves; if none are given, whether there is no process.

    A process is live while its last beat is at most WORKER_LOST_AFTER old by the database's clock. Raises
    DatabaseNotReady when the database does not answer within PATIENCE seconds.
    """
    live = ask_database(jobs_alias(), _live, lambda line: None, patience=PATIENCE)
    if not live:
        return ["process of any role"]
    found = [f"process with the role {role}" for role in roles if not any(role in own for own, _ in live)]
    served = reduce(or_, (each for own, each in live if "worker" in own), Served())
    return found + [f"worker that serves the queue {name}" for name in queues if name not in served]


def _live(using: str) -> list[tuple[list[str], Served]]:
    """Return the roles and queues of each live process."""
    check_tables(using)
    fresh = Worker.objects.using(using).fresh(clock.now(using))
    return [(roles, Served.from_row(queues)) for roles, queues in fresh.values_list("roles", "queues")[:LIMIT]]
