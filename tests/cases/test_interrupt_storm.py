"""Thousands of exceptions sent to handlers that are just ending hit nothing else and leave nothing held."""

from __future__ import annotations

import gc
import io
import logging
import random
import sys
import threading
import time
from collections import Counter

import pytest
from django.db import connection, transaction

from django_jobs import JobContext, registry
from django_jobs.definition import job
from django_jobs.exceptions import Cancelled
from django_jobs.execution import logs
from django_jobs.execution.gate import Sent
from django_jobs.execution.outcomes import Aborted, Lost, Ok
from django_jobs.execution.pool import Pool
from django_jobs.execution.run import Run
from tests.acc.models import Thing
from tests.cases.test_outages_idle import SESSIONS
from tests.execution.runs import row_of
from tests.support import wait_for

INTERRUPTS = 2000


@pytest.mark.slow(25)
# A connection that was just being made is known to nobody: Python closes it as it goes, and would warn of that.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.django_db(transaction=True)
def test_interrupts_at_the_end_of_runs_hit_no_other_run_and_leave_no_lock_handler_or_connection_held() -> None:
    """An exception for a thread arrives when it pleases: in the next job, between a lock and its release.

    Source: Bogdanp/dramatiq#211.
    """
    stream = logging.StreamHandler(io.StringIO())
    logger = logging.getLogger("tests.storm")
    logger.addHandler(stream)
    logger.propagate = False
    logger.setLevel(logging.INFO)
    arrived = threading.Semaphore(0)
    ended: dict[bool, list[Run]] = {True: [], False: []}
    over = threading.Semaphore(0)

    def on_ended(run: Run) -> None:
        ended[run.execution.payload["aim"]].append(run)
        over.release()

    def handler(ctx: JobContext, aim: bool, steps: int) -> None:
        if aim:
            arrived.release()
        # What handlers do that holds something: lines, queries, transactions, code of ours.
        match steps % 4:
            case 0:
                logger.info("step %d", steps)
            case 1:
                Thing.objects.exists()
            case 2:
                with transaction.atomic():
                    Thing.objects.exists()
            case 3:
                with ctx.shield():
                    ctx.progress(steps)
        for _ in range(steps):
            _step()

    with registry.isolated():
        defined = job(name="tests.storm")(handler)
    pool = Pool(2, on_ended=on_ended, on_free=lambda: None)
    pool.start()
    interval = sys.getswitchinterval()
    sent: Counter[Sent] = Counter()
    # An exception that lands in a finalizer is reported and forgotten; here that would be a warning.
    gc.disable()
    sys.setswitchinterval(1e-4)
    try:
        while sent[Sent.YES] < INTERRUPTS:
            number = sum(sent.values())
            assert number < 10 * INTERRUPTS
            aimed = Run(row_of(defined.name, {"aim": True, "steps": random.randrange(60)}), defined)
            pool.submit([aimed])
            assert arrived.acquire(timeout=10)
            time.sleep(random.random() * 3e-4)
            aimed.signal.set("cancelled")
            while (told := aimed.gate.interrupt(Cancelled)) is Sent.LATER:
                time.sleep(0)
            sent[told] += 1
            # Side by side with what follows, as in a worker: this one must know nothing of it.
            pool.submit([Run(row_of(defined.name, {"aim": False, "steps": number}), defined)])
            for _ in range(2):
                assert over.acquire(timeout=10)
            if number % 200 == 0:
                gc.collect()
    finally:
        sys.setswitchinterval(interval)
        gc.enable()
        pool.stop(5)
    print(dict(sent))
    assert {type(run.outcome) for run in ended[False]} == {Ok}
    assert not any(run.gate.sent for run in ended[False])
    assert {type(run.outcome) for run in ended[True]} <= {Ok, Aborted}
    assert not any(isinstance(run.outcome, Lost) for run in ended[True])
    # Nothing is held: of ours, of logging, of the database.
    assert not any(run.gate.lock.locked() for runs in ended.values() for run in runs)
    assert logs._making.acquire(timeout=1)
    logs._making.release()
    for lock in (stream.lock, logging._lock):  # type: ignore[attr-defined]
        assert lock is not None and lock.acquire(timeout=1)
        lock.release()
    logger.removeHandler(stream)
    wait_for(lambda: not [t for t in threading.enumerate() if "slot" in t.name], 10, "every slot has ended")
    gc.collect()
    if connection.vendor in SESSIONS:
        wait_for(lambda: sessions() == 0, 10, "every session has ended")


def sessions() -> int:
    """Return how many sessions there are on this database besides our own."""
    with connection.cursor() as cursor:
        cursor.execute(SESSIONS[connection.vendor])
        return len(cursor.fetchall())


def _step() -> int:
    return sum(range(3))
