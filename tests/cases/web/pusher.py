"""Behave like one web process in direct mode: push, run what was pushed beside that, end in order.

`python -m tests.cases.web.pusher COUNT` pushes from four threads, with mixed priorities and queues. `… fork` forks in
the middle; the child pushes as well.
"""

from __future__ import annotations

import multiprocessing
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import django

django.setup()

from django.db import connections, transaction  # noqa: E402

from django_jobs.dispatchers import get_dispatcher  # noqa: E402
from tests.acc.jobs import mark, slow  # noqa: E402

PRIORITIES = ("low", "normal", "high", "critical")


def push(count: int) -> None:
    """Push in transactions, each of some rows."""
    left = count
    while left:
        size = min(left, random.choice((1, 1, 2, 10)))
        with transaction.atomic():
            for _ in range(size):
                mark.using(priority=random.choice(PRIORITIES), queue=random.choice(("default", "mail"))).push()
        left -= size
    connections.close_all()


def is_done() -> bool:
    """Whether this process runs nothing and has nothing left to run."""
    runner = get_dispatcher()._here()._runner  # type: ignore[attr-defined]
    return not len(runner._backlog) and runner._engine.is_idle


def push_many(count: int) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(push, [count // 4] * 4))
    wait_until_done()


def wait_until_done() -> None:
    """Go on as a server does: what has not begun when a process ends does not begin there any more."""
    idle = 0
    while idle < 5:
        time.sleep(0.05)
        idle = idle + 1 if is_done() else 0


def child() -> None:
    mark.push()
    wait_until_done()


def fork() -> None:
    slow.push(s=1.0)
    while not get_dispatcher()._here()._runner._engine.running():  # type: ignore[attr-defined]
        time.sleep(0.01)
    # What Django asks of everybody who forks: a connection belongs to one process.
    connections.close_all()
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == 0, process.exitcode
    mark.push()
    wait_until_done()


if __name__ == "__main__":
    if sys.argv[1] == "fork":
        fork()
    else:
        push_many(int(sys.argv[1]))
