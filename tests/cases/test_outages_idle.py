"""A process that has nothing to do when its connections go goes on working without help."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

import pytest
from django.db import DatabaseError, connection, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from django_jobs.execution import connections as connections_of_runs
from django_jobs.execution.executor import execute
from django_jobs.execution.outcomes import Ok, Outcome
from django_jobs.loop import Loop
from django_jobs.models import JobExecution
from django_jobs.states import Status
from tests.acc import jobs
from tests.acc.models import Thing
from tests.cases.test_stopping import Start, became, canary
from tests.execution.runs import run_of
from tests.forwarder import forwarded_database
from tests.support import Ledger, assert_consistent, wait_for

pytestmark = [pytest.mark.postgres, pytest.mark.mysql]

SESSIONS = {
    "postgresql": (
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        " AND backend_type = 'client backend'"
    ),
    "mysql": "SELECT id FROM information_schema.processlist WHERE db = DATABASE() AND id <> CONNECTION_ID()",
}


def sessions() -> set[int]:
    """The sessions on this database but our own."""
    with connection.cursor() as cursor:
        cursor.execute(SESSIONS[connection.vendor])
        return {pid for (pid,) in cursor.fetchall()}


def end_sessions() -> int:
    """Have the server end every session on this database but our own, as a restart does; return how many."""
    end = "SELECT pg_terminate_backend(%s)" if connection.vendor == "postgresql" else "KILL %s"
    found = sessions()
    with connection.cursor() as cursor:
        for pid in found:
            try:
                cursor.execute(end, [pid])
            except DatabaseError as error:
                # MySQL and MariaDB: it went by itself meanwhile.
                if error.args[0] != 1094:
                    raise
    return len(found)


@pytest.mark.subprocess
@pytest.mark.slow
def test_a_worker_whose_sessions_the_server_ended_goes_on_as_if_nothing_had_been(
    runjobs: Start, ledger: Ledger
) -> None:
    """The database restarts while the worker idles: it dies, or lives on and never fetches again.

    Sources: element-hq/matrix-authentication-service#2625, procrastinate-org/procrastinate#1116, PR#1425.
    """
    process = runjobs().wait_ready()
    canary(ledger, process)
    rows: list[JobExecution] = []
    for number in range(3):
        assert end_sessions() > 0
        ended_at = time.monotonic()
        rows += jobs.atomic_thing.push_many([{"name": f"{number}.{n}"} for n in range(5)])
        for row in rows[-5:]:
            became(row, Status.OK, 6)
        assert time.monotonic() - ended_at < 5
    for row in rows:
        row.refresh_from_db()
        assert (row.attempt, row.rescues) == (1, 0)
        assert len(ledger.starts(row.pk)) == 1
    assert Thing.objects.count() == len(rows)
    assert process.process.poll() is None
    assert "Traceback" not in process.output
    canary(ledger, process)
    assert_consistent()


@pytest.mark.subprocess
@pytest.mark.slow
def test_after_an_outage_jobs_run_and_ticks_fire_within_5_seconds_and_the_log_stayed_short(
    runjobs: Start, ledger: Ledger
) -> None:
    """See above; and the log of the time in between floods the disk.

    Sources: element-hq/matrix-authentication-service#2625, procrastinate-org/procrastinate#1116, PR#1425.
    """
    with forwarded_database() as (cable, url):
        process = runjobs(DATABASE_URL=url, ACC_CRON="* * * * * *").wait_ready()
        wait_for(lambda: ledger.ends(tag="tick"), 10, "a tick fired")
        told = len(process.output)
        cable.cut()
        wait_for(lambda: "failed and will try again" in process.output[told:], 10, "it tells of the outage")
        before = len(process.output.splitlines())
        # Each tries again several times.
        time.sleep(6)
        lines = process.output.splitlines()[before:]
        # Eight threads look at the database; each tells that it lost its connection, and that it gets no other one.
        assert len(lines) <= 8 * 2, "\n".join(lines)
        told_once = {line.partition(" WARNING ")[2] for line in lines}
        assert len(lines) == len(told_once), "\n".join(lines)
        assert process.process.poll() is None
        row = jobs.atomic_thing.push(name="after")
        ticks = len(ledger.ends(tag="tick"))
        cable.mend()
        mended_at = time.monotonic()
        became(row, Status.OK, 6)
        wait_for(lambda: len(ledger.ends(tag="tick")) > ticks, 6, "a tick fired")
        assert time.monotonic() - mended_at < 5.2
        assert row.attempt == 1
        assert process.process.poll() is None
        canary(ledger, process)
        assert process.stop() == 0
    assert "Traceback" not in process.output
    assert_consistent()


@pytest.mark.subprocess
@pytest.mark.slow
@pytest.mark.parametrize("age", ["None", "600"])
def test_sessions_that_the_server_ends_for_idleness_fail_no_job(age: str, runjobs: Start, ledger: Ledger) -> None:
    """After a long idle time each new task fails on a dead connection, since no request cycle cleans up.

    Sources: Koed00/django-q#76, procrastinate-org/procrastinate#1134, #1335.
    """
    # Nearly every thread of the process is silent for longer than the server's second.
    lazy: dict[str, Any] = {"POLL_INTERVAL": 2, "HEARTBEAT_INTERVAL": 2, "WORKER_LOST_AFTER": 10}
    extra = {"DJANGO_SETTINGS_MODULE": "tests.cases.idle_settings", "CONN_MAX_AGE": age}
    process = runjobs(jobs=lazy, **extra).wait_ready()
    canary(ledger, process)
    for number in range(3):
        idle = sessions()
        # All but those that are used each second.
        wait_for(lambda idle=idle: len(idle - sessions()) >= 2, 10, "the server has ended sessions")
        names = [f"{number}.{n}" for n in range(5)]
        for row in jobs.atomic_thing.push_many([{"name": name} for name in names]):
            became(row, Status.OK, 10)
            assert (row.attempt, row.errors) == (1, [])
        assert Thing.objects.filter(name__in=names).count() == 5
    assert process.process.poll() is None
    assert "Traceback" not in process.output
    assert_consistent()


@pytest.mark.django_db(transaction=True)
def test_a_thread_tries_its_connections_when_it_did_not_use_them_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """See above, in one thread and without the waiting."""
    found: list[bool] = []

    def look() -> None:
        found.append(Thing.objects.exists())

    def run_twice() -> list[Outcome]:
        connection.settings_dict["CONN_MAX_AGE"] = None
        first = execute(run_of(look, manage_connections=True))
        held.set()
        assert ended.wait(10)
        return [first, execute(run_of(look, manage_connections=True))]

    held, ended = threading.Event(), threading.Event()
    age = connection.settings_dict["CONN_MAX_AGE"]
    monkeypatch.setattr(connections_of_runs, "UNUSED", 0.0)
    with ThreadPoolExecutor(1) as threads:
        outcomes = threads.submit(run_twice)
        assert held.wait(10)
        assert end_sessions() > 0
        ended.set()
        assert outcomes.result(10) == [Ok(), Ok()]
        threads.submit(connections.close_all).result(10)
    connection.settings_dict["CONN_MAX_AGE"] = age
    assert found == [False, False]


@pytest.mark.django_db(transaction=True)
def test_a_loop_that_waits_long_keeps_no_connection() -> None:
    """A connection over a gateway that forgot it hangs for a quarter of an hour. Same sources."""
    wrappers: list[BaseDatabaseWrapper] = []

    def tick(now: datetime | None = None) -> float:
        Thing.objects.exists()
        # The object behind the name is the thread's own.
        wrappers.append(connections["default"])
        return 1.0 if len(wrappers) == 1 else 3600.0

    loop = Loop(tick, name="rare")
    loop.start()
    wait_for(lambda: wrappers, 10, "it ticked")
    first = wrappers[0].connection
    assert first is not None
    loop.wake()
    wait_for(lambda: len(wrappers) == 2 and wrappers[1].connection is None, 10, "its connection is closed")
    loop.stop()
    assert loop.join(10)
