"""Run rows at once in the thread that pushed them, on its connections; for the immediate dispatcher."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import DatabaseError, connections, transaction

from django_jobs import clock, pauses, registry, signals, transitions
from django_jobs.conf import get_settings
from django_jobs.execution.announcer import announce
from django_jobs.execution.atomic import write_inside
from django_jobs.execution.connections import is_left_open, roll_back
from django_jobs.execution.endings import UNSTORABLE, ending_of
from django_jobs.execution.executor import execute
from django_jobs.execution.keeping import Keeping
from django_jobs.execution.liveness import Liveness
from django_jobs.execution.outcomes import Failed
from django_jobs.execution.run import Run
from django_jobs.loop import Loop
from django_jobs.models import JobExecution, Worker
from django_jobs.states import Status
from django_jobs.transitions import Ending

logger = logging.getLogger("django_jobs.immediate")

ROLE = "immediate"


def run_now(queue: str, ids: Sequence[UUID], *, using: str) -> None:
    """Run these rows one after the other; those that are paused, at their limit or taken by now are left alone.

    Nothing that a handler raises escapes, except a KeyboardInterrupt, once its row is written.
    """
    paused_jobs, paused_queues = pauses.paused(using)
    if queue in paused_queues:
        return
    names = registry.names() - paused_jobs
    with _registered(using) as liveness:
        for pk in ids:
            for row in _claim(pk, queue, names, liveness):
                _run(row, liveness)


@contextlib.contextmanager
def _registered(using: str) -> Iterator[Liveness]:
    """Register as a worker while the block runs, and leave no trace of it."""
    liveness = Liveness(roles=[ROLE], queues=[], names=[], slots=1, using=using)
    liveness.register()
    rests = [get_settings().heartbeat_interval]

    def beat(now: datetime | None = None) -> float:
        # Usually everything is over before the first beat is due.
        return rests.pop() if rests else liveness.tick(now)

    beats = Loop(beat, name="beat")
    # Inside a transaction, such as a test's, no other process or connection sees these rows.
    if not connections[using].in_atomic_block:
        beats.start()
    try:
        yield liveness
    finally:
        beats.stop()
        beats.join()
        Worker.objects.using(using).filter(pk=liveness.worker_id).delete()


def _claim(pk: UUID, queue: str, names: frozenset[str], liveness: Liveness) -> list[JobExecution]:
    using = liveness.using
    options: dict[str, Any] = {
        "queue": queue,
        "ids": [pk],
        "limit": 1,
        "worker_id": liveness.worker_id,
        "now": clock.now(using),
        "using": using,
    }
    limited = registry.limited_names()
    if claimed := transitions.claim(names=sorted(names - limited), **options):
        return claimed
    rows = JobExecution.objects.using(using).pending().filter(pk=pk, job_name__in=names & limited)
    for name in rows.values_list("job_name", flat=True):
        job = registry.get(name)
        # Twice: the first claim ever of a job only makes the row of its state, which serves as the lock.
        for _ in range(2):
            if claimed := transitions.claim_within(job, **options):
                return claimed
    return []


def _run(row: JobExecution, liveness: Liveness) -> None:
    job, using = registry.get(row.job_name), liveness.using
    run = Run(row, job, worker=liveness.label, manage_connections=False)
    if job.atomic:
        write_inside(run, using)
    signals.emit(signals.job_started, job, row)
    with _kept_usable(connections[using], job.name):
        outcome = execute(run)
    now = clock.now(using)
    status = _write(run, now, using)
    if status is not None:
        announce(run, status, now)
        keeping = Keeping(using=using)
        keeping.discard([(run, status)])
        keeping.trim([(run, status)])
    if isinstance(outcome, Failed) and isinstance(outcome.exception, KeyboardInterrupt):
        # Ctrl-C is meant for this process, not only for the job.
        raise outcome.exception


@contextlib.contextmanager
def _kept_usable(connection: Any, culprit: str) -> Iterator[None]:
    """Roll back what a handler left behind: a transaction that is open, or one that a database error made unusable."""
    if not connection.in_atomic_block:
        # One that the caller began without Django is the caller's.
        was_open = connection.connection is not None and is_left_open(connection)
        yield
        if not was_open and connection.connection is not None and is_left_open(connection):
            logger.warning("%s left a transaction open on %r; it is rolled back", culprit, connection.alias)
            roll_back(connection)
        return
    savepoint = connection.savepoint()
    yield
    # PostgreSQL refuses everything after an error; 3 is "in a failed transaction" in both psycopg.
    has_failed = connection.vendor == "postgresql" and connection.connection.info.transaction_status == 3
    if has_failed or connection.needs_rollback:
        connection.needs_rollback = False
        connection.savepoint_rollback(savepoint)
    else:
        connection.savepoint_commit(savepoint)


def _write(run: Run, now: datetime, using: str) -> Status | None:
    """Write how a run ended; return the status that its row got, None if the row no longer belonged to the run."""
    if run.recorded:
        return Status.OK
    ending = ending_of(run, now)
    if ending is None:
        return None
    try:
        return _finish(ending, now, using)
    except DatabaseError as error:
        logger.error("the outcome of %s could not be stored as it is: %s", run.execution, error)  # noqa: TRY400 - one line
        return _finish(transitions.fail(run.execution, error=UNSTORABLE), now, using)


def _finish(ending: Ending, now: datetime, using: str) -> Status | None:
    # A savepoint in the transaction of a test, so that something else can be written if this is refused.
    with transaction.atomic(using=using):
        return transitions.finish([ending], now=now, using=using).get(ending.execution_id)
