"""Do everything that is due now and nothing more, for `runjobs --once`."""

from __future__ import annotations

import time
from collections.abc import Callable

from django_jobs import clock, concurrency, registry
from django_jobs.loop import Loop
from django_jobs.models import JobExecution
from django_jobs.runtime.parts import Parts
from django_jobs.runtime.worker import Worker

LOOK_EVERY = 0.05


def run_once(parts: Parts, over: Callable[[float], bool]) -> bool:
    """Fire due ticks, stage, sweep, rescue, run until nothing is left, trim; return whether it got to the end.

    `over` waits up to the given number of seconds and returns whether to stop early.
    """
    if parts.scheduler is not None:
        parts.scheduler.tick()
    while parts.stage.tick() == 0.0:
        if over(0):
            return False
    if parts.sweep is not None:
        parts.sweep.tick()
    parts.rescue.suspect()
    if parts.worker is not None:
        parts.worker.start()
        stage = Loop(parts.stage.tick, name="stage")
        staged_until = time.monotonic()
        while _has_work(parts, parts.worker):
            if over(LOOK_EVERY):
                return False
            # While something runs, other rows become due, jobs are paused, and the database may be away for a moment.
            if time.monotonic() >= staged_until:
                staged_until = time.monotonic() + stage.turn()
    if parts.trim is not None:
        for _ in parts.trim.portions(clock.now(parts.using)):
            if over(0):
                return False
    return True


def _has_work(parts: Parts, worker: Worker) -> bool:
    """Whether something runs here or could run; judged by the rows, since a claim may be under way."""
    claimed = worker.claimed
    if not worker.is_idle or parts.stage.tick() == 0.0:
        return True
    parts.stage.look_for_queues(clock.now(parts.using))
    rows = JobExecution.objects.using(parts.using)
    # Of a job at its limit nothing starts before other runs end: here, which is seen below, or in another process.
    full = concurrency.full(concurrency.jobs(), using=parts.using)
    names = registry.names() - parts.stage.paused_jobs - full
    if rows.pending().filter(queue__in=worker.served_queues(), job_name__in=names).exists():
        worker.wake()
        return True
    # In the order of a row's life, so that no row slips through by moving on between two looks.
    if rows.of_worker(parts.liveness.worker_id).exists():
        return True
    # A run that began and ended meanwhile may have been what kept its job at its limit.
    return worker.claimed != claimed or parts.stage.has_due(worker.served)
