"""NOTIFY between real processes, over a fork and over a restart of the server."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from django.db import connections
from pytest_django import DjangoDbBlocker

from django_jobs.dispatchers.postgres import channel
from django_jobs.dispatchers.postgres.channel import Message
from django_jobs.dispatchers.postgres.listener import Listener
from django_jobs.states import Status
from tests.acc import jobs
from tests.cases.test_stopping import Start, became
from tests.engines import PostgresServer, database_settings, embedded_postgres_server
from tests.support import ROOT, Ledger, child_environment, wait_for

pytestmark = [pytest.mark.postgres, pytest.mark.subprocess, pytest.mark.slow]

# So rare that nothing below is the merit of a poll.
SELDOM = {"POLL_INTERVAL": 60}


def listens() -> bool:
    with connections["default"].cursor() as cursor:
        cursor.execute(
            "SELECT FROM pg_stat_activity WHERE application_name = %s AND datname = current_database() "
            "AND query LIKE 'LISTEN%%'",
            [channel.APPLICATION_NAME],
        )
        return cursor.rowcount > 0


def test_an_idle_process_starts_at_once_what_another_one_pushes(runjobs: Start, ledger: Ledger) -> None:
    process = runjobs("--worker", jobs=SELDOM).wait_ready()
    wait_for(listens, 10, "it listens")
    waits = []
    for _ in range(10):
        # Past the looks that follow a wake-up.
        time.sleep(0.2)
        pushed_at = time.time()
        row = jobs.mark.push()
        wait_for(lambda row=row: ledger.starts(row.pk), 20, "it runs")  # type: ignore[misc]
        waits.append(ledger.starts(row.pk)[0].time - pushed_at)
    # Generous: other tests run beside this one.
    assert sorted(waits)[5] < 0.25, waits
    assert process.stop() == 0


def test_a_cancel_reaches_a_handler_in_another_process_at_once(runjobs: Start, ledger: Ledger) -> None:
    runjobs("--worker").wait_ready()
    waits = []
    for _ in range(5):
        row = jobs.slow.push(s=60, heed=True)
        wait_for(lambda row=row: ledger.starts(row.pk), 10, "it runs")  # type: ignore[misc]
        time.sleep(0.1)
        asked_at = time.monotonic()
        row.cancel(by="a person")
        became(row, Status.CANCELLED, 5)
        waits.append(time.monotonic() - asked_at)
    # Without the hint it takes half a second in the mean, and up to one.
    assert sorted(waits)[3] < 0.5, waits


FORKING = """
import os, threading, time
import django
django.setup()
from django.db import connections
from django_jobs.dispatchers import get_dispatcher
from tests.acc import jobs

heard = threading.Event()
subscription = get_dispatcher().subscribe(None, heard.set)
while subscription.problem() is not None:
    time.sleep(0.01)
jobs.mark.push()
jobs.mark.push()
connections.close_all()
time.sleep(0.2)
heard.clear()
child = os.fork()
if not child:
    mine = threading.Event()
    own = get_dispatcher().subscribe(None, mine.set)
    while own.problem() is not None:
        time.sleep(0.01)
    jobs.mark.push()
    jobs.mark.push()
    own.close()
    os._exit(0 if mine.wait(20) else 1)
assert os.waitpid(child, 0)[1] == 0
assert heard.wait(20)
assert subscription.problem() is None
heard.clear()
jobs.mark.push()
assert heard.wait(20)
subscription.close()
print("all heard")
"""


@pytest.mark.usefixtures("transactional_db")
def test_parent_and_child_each_have_a_listener_of_their_own_after_a_fork() -> None:
    done = subprocess.run(
        # That threads do not survive a fork is what this is about.
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKING],
        cwd=ROOT,
        env=child_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("all heard\n", "", 0)


@pytest.fixture
def server(django_db_blocker: DjangoDbBlocker) -> Iterator[PostgresServer]:
    """A server of its own behind the alias "restarted", with a table of the name that counts."""
    with embedded_postgres_server() as started, django_db_blocker.unblock():
        pattern = connections["default"].settings_dict
        connections.settings["restarted"] = {**pattern, **database_settings("postgres", started.url)}
        try:
            with connections["restarted"].cursor() as cursor:
                cursor.execute("CREATE TABLE django_jobs_jobexecution ()")
            yield started
        finally:
            connections["restarted"].close()
            del connections["restarted"]
            del connections.settings["restarted"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT], ids=["restart", "crash"])
def test_a_listener_survives_the_end_of_its_server(server: PostgresServer, number: int) -> None:
    heard, caught_up = threading.Event(), threading.Semaphore(0)

    def hear(message: Message) -> None:
        heard.set()

    listener = Listener(name="a", using="restarted", via="restarted", hear=hear, catch_up=caught_up.release)
    try:
        assert caught_up.acquire(timeout=10)
        server.stop(number)
        wait_for(lambda: str(listener.problem()).startswith("the listening connection is lost"), 20, "it noticed")
        server.start()
        assert caught_up.acquire(timeout=15)
        wait_for(lambda: listener.problem() is None, 20, "it listens again")
        connections["restarted"].close()
        channel.send(connections["restarted"], Message(sender="b", cancel=True))
        assert heard.wait(20)
        assert not caught_up.acquire(blocking=False)
    finally:
        listener.stop()
