"""What is paused now; read by stage, the scheduler, direct mode and the admin, changed by services.pauses."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

from django.db import connections
from django.db.models import IntegerField, Value

from django_jobs import registry
from django_jobs.models import JobState, QueueState

# More than anybody pauses; a bound for the read.
LIMIT = 10_000


class Paused(NamedTuple):
    """What must not start now."""

    # Names whose ticks are skipped as well; all names of each such job, so that a pause survives a rename.
    jobs: frozenset[str]
    queues: frozenset[str]


def paused(using: str) -> Paused:
    """Return what is paused, by one statement."""
    found: tuple[list[str], list[str]] = ([], [])
    with connections[using].cursor() as cursor:
        cursor.execute(*_statement(using))
        for is_job, name in cursor.fetchall():
            found[is_job].append(name)
    return Paused(_with_other_names(found[1]), frozenset(found[0]))


@lru_cache(maxsize=8)
def _statement(using: str) -> tuple[str, tuple[Any, ...]]:
    # Made once: every process runs it each second, and compiling it costs more than running it.
    jobs = JobState.objects.using(using).filter(paused_at__isnull=False).values_list(_is_job(1), "job_name")
    queues = QueueState.objects.using(using).filter(paused_at__isnull=False).values_list(_is_job(0), "queue")
    statement, parameters = jobs.union(queues, all=True)[:LIMIT].query.get_compiler(using).as_sql()
    return statement, tuple(parameters)


def _with_other_names(paused: Iterable[str]) -> frozenset[str]:
    names = set(paused)
    for name in tuple(names):
        if (job := registry.find(name)) is not None:
            names.update(job.names)
    return frozenset(names)


def _is_job(value: int) -> Value:
    return Value(value, output_field=IntegerField())
