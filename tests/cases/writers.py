"""A process that writes while workers run: `python -m tests.cases.writers push|things|trim SECONDS`."""

from __future__ import annotations

import random
import sys
import time

import django


def push(until: float) -> int:
    """Push one and many, now and later, with keys that meet; return how many rows there are to be."""
    from tests.acc import jobs

    made = 0
    while time.monotonic() < until:
        rows = [
            jobs.mark.push(tag="one"),
            jobs.boom_retry.using(delay=random.uniform(0, 2)).push(),
            jobs.mark_retry.using(key=f"key {random.randrange(5)}").push(),
            *jobs.mark.push_many([{"tag": "many"}] * 5),
            *jobs.mark.push_many([jobs.mark.using(delay=1).item(tag="later") for _ in range(5)]),
        ]
        made += sum(row.created is True for row in rows)
        time.sleep(0.05)
    return made


def things(until: float) -> int:
    """Write in transactions that stay open for a second, as a slow request does."""
    from django.db import transaction

    from tests.acc.models import Thing

    made = 0
    while time.monotonic() < until:
        with transaction.atomic():
            Thing.objects.create(name="of a request")
            time.sleep(1)
        made += 1
        time.sleep(0.2)
    return made


def trim(until: float) -> int:
    """Delete finished rows all the time; return how many went."""
    from django_jobs import clock
    from django_jobs.models import jobs_alias
    from django_jobs.runtime.trim import Trim

    gone = 0
    while time.monotonic() < until:
        gone += sum(Trim(using=jobs_alias()).portions(clock.now(jobs_alias())))
        time.sleep(0.02)
    return gone


if __name__ == "__main__":
    django.setup()
    work = {"push": push, "things": things, "trim": trim}[sys.argv[1]]
    print(work(time.monotonic() + float(sys.argv[2])))
