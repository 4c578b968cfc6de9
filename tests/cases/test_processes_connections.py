"""Connections of processes: none is shared with a fork, and a pool is left to the handlers."""

from __future__ import annotations

import json
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from django.db import connection

from django_jobs.models import JobExecution
from django_jobs.states import Status
from tests.acc import jobs
from tests.acc.models import Thing
from tests.cases.forking.effects import TOGETHER
from tests.encryption import encryption
from tests.factories import JobExecutionFactory
from tests.support import Ledger, Runjobs, assert_consistent, wait_for

pytestmark = [pytest.mark.subprocess, pytest.mark.slow]

Start = Callable[..., Runjobs]
SETTINGS = {"DJANGO_SETTINGS_MODULE": "tests.cases.forking.settings"}
# On SQLite a fork is refused the database.
FORK = pytest.param("fork", marks=[pytest.mark.postgres, pytest.mark.mysql])
# What the threads of one process hold beside the handlers' connections; told in docs/howto/deploy.md.
OWN = 12


def push(name: str, /, **payload: str) -> JobExecution:
    """A row of a job that only the processes know."""
    return JobExecutionFactory(pending=True, job_name=f"forking.{name}", payload=payload)


def all_ended(*rows: JobExecution) -> list[JobExecution]:
    found = JobExecution.objects.filter(pk__in=[row.pk for row in rows])
    wait_for(lambda: not found.live().exists(), 60, "all have ended")
    ended = list(found)
    assert [(row.status, row.error) for row in ended] == [(Status.OK, "")] * len(rows)
    return ended


def sessions() -> int:
    """How many connections there are to this test's database, but for this one."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        return int(cursor.fetchone()[0])


@pytest.mark.postgres
@pytest.mark.parametrize("pool", [False, True, {"min_size": 1, "max_size": 10}], ids=["no pool", "of 4", "of 10"])
def test_no_two_processes_share_a_connection_with_and_without_a_pool(
    pool: object, runjobs: Start, ledger: Ledger
) -> None:
    """The parent opens a connection or a pool and forks: "SSL bad record mac", "unexpected EOF", segfaults.

    Sources: django-commons/django-tasks-scheduler#393, knifecake/steady-queue#48, Koed00/django-q#79.
    """
    before = sessions()
    process = runjobs("--processes", "2", POOL=json.dumps(pool), **SETTINGS).wait_ready(60, workers=3)
    assert ("the pool of the database 'default' has 4 connections for 10 slots" in process.output) == (pool is True)
    assert_each_has_its_own(process, ledger, before)


def assert_each_has_its_own(process: Runjobs, ledger: Ledger, before: int) -> None:
    """Check that rows find two processes whose sessions are their own; end them."""
    # More than one cycle of the sweep, which comes each second.
    tick = jobs.mark.using(delay=2.5).push()
    all_ended(tick)
    # A handler that holds a connection while it sleeps would be needed to see all of them; the rest is there.
    assert sessions() - before <= 3 * OWN + 2 * 10
    rows: list[JobExecution] = []
    backends: dict[str, set[int]] = defaultdict(set)

    def both_ran_some() -> bool:
        # One of them may be fast enough to run fifty alone.
        rows.extend(all_ended(*(push("touching", name=f"thing-{len(rows) + number}") for number in range(50))))
        process_of = {entry.row_id: entry.pid for entry in ledger.starts()}
        for row in rows:
            backends[str(row.result)].add(process_of[str(row.pk)])
        return len(set.union(*backends.values())) == 2

    wait_for(both_ran_some, 60, "both processes run some")
    assert Thing.objects.filter(name__startswith="thing-").count() == len(rows)
    assert all(len(pids) == 1 for pids in backends.values()), backends
    assert process.stop() == 0, process.output
    assert "Traceback" not in process.output
    assert_consistent()


@pytest.fixture
def encrypted(transactional_db: None, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of processes that talk to the server by TLS alone."""
    with encryption(tmp_path) as front:
        yield {"DATABASE_URL": front.url, "SSLMODE": "require", **SETTINGS}
        assert front.connections > 0


@pytest.mark.postgres
@pytest.mark.openssl
@pytest.mark.parametrize("pool", [False, True], ids=["no pool", "pool"])
def test_no_two_processes_share_an_encrypted_connection(
    pool: bool, encrypted: dict[str, str], runjobs: Start, ledger: Ledger
) -> None:
    """See above: "SSL bad record mac" is what two say who read one stream."""
    before = sessions()
    process = runjobs("--processes", "2", POOL=json.dumps(pool), **encrypted).wait_ready(60, workers=3)
    assert_each_has_its_own(process, ledger, before)


@pytest.mark.postgres
@pytest.mark.openssl
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_job_that_uses_multiprocessing_leaves_encrypted_connections_whole(
    method: str, encrypted: dict[str, str], runjobs: Start, ledger: Ledger
) -> None:
    assert_multiplying(runjobs("--concurrency", str(TOGETHER), **encrypted).wait_ready(), method)


@pytest.mark.parametrize("method", [FORK, "spawn"])
def test_a_job_that_uses_multiprocessing_leaves_the_worker_whole(method: str, runjobs: Start, ledger: Ledger) -> None:
    """See above: a fork uses the sockets of its parent, or says goodbye on them."""
    assert_multiplying(runjobs("--concurrency", str(TOGETHER), **SETTINGS).wait_ready(), method)


def assert_multiplying(process: Runjobs, method: str) -> None:
    """Check that processes that handlers make by this method, and these handlers, use the database in peace."""
    # By then each thread of the worker has its connection. One that opens it holds locks of OpenSSL, which a fork would
    # keep, as docs/explanation/limits.md says.
    all_ended(jobs.mark.using(delay=2.5).push())
    rows = [push("multiplying", name=f"many-{number}", method=method) for number in range(TOGETHER)]
    rows += [push("touching", name=f"one-{number}") for number in range(20)]
    ended = all_ended(*rows)
    assert [row.result for row in ended if row.job_name == "forking.multiplying"] == [0] * TOGETHER
    assert Thing.objects.filter(name__startswith="many-").count() == 3 * TOGETHER
    assert_whole(process)


def assert_whole(process: Runjobs) -> None:
    assert "lost" not in process.output
    assert "closed" not in process.output
    assert process.stop() == 0, process.output
    assert_consistent()


@pytest.mark.sqlite
def test_on_sqlite_a_fork_is_refused_the_database_and_told_of_spawn(runjobs: Start, ledger: Ledger) -> None:
    """SQLite copies who locks a file into the fork, which hangs on that, or reads what others write just then."""
    process = runjobs("--concurrency", str(TOGETHER), **SETTINGS).wait_ready()
    rows = [push("multiplying", name=f"many-{number}", method="fork") for number in range(TOGETHER)]
    assert [row.result for row in all_ended(*rows)] == [1] * TOGETHER
    assert process.output.count('multiprocessing.get_context("spawn")') == TOGETHER
    assert Thing.objects.filter(name__startswith="many-").count() == 2 * TOGETHER
    all_ended(*(push("touching", name=f"one-{number}") for number in range(20)))
    assert_whole(process)


def test_a_fork_that_collects_garbage_closes_no_connection_of_the_worker(runjobs: Start) -> None:
    """A fork forgets the threads that it does not have, and with them who holds their connections.

    Where the driver is mysqlclient, closing one there says goodbye to the server for the thread that uses it here.
    """
    process = runjobs("--concurrency", "4", **SETTINGS).wait_ready()
    (row,) = all_ended(push("collecting"))
    opened, closed = row.result
    assert opened > 1
    assert closed == 0
    assert_whole(process)


def test_a_process_that_a_handler_forks_can_be_terminated(runjobs: Start) -> None:
    """A fork inherits the signal handlers of the worker, which wait for a request that never comes."""
    process = runjobs(**SETTINGS).wait_ready()
    (row,) = all_ended(push("terminating"))
    assert row.result == -signal.SIGTERM
    assert process.stop() == 0, process.output


@pytest.mark.postgres
def test_handlers_that_use_up_the_pool_do_not_stop_the_heart(runjobs: Start, ledger: Ledger) -> None:
    """Beats that wait for a connection of the pool: the worker is taken for dead and its runs are started again."""
    process = runjobs("--concurrency", "4", POOL=json.dumps({"min_size": 1, "max_size": 1}), **SETTINGS).wait_ready()
    rows = [push("holding", s="6") for _ in range(2)]
    wait_for(lambda: len(ledger.starts()) == 2, 10, "both have begun")
    all_ended(*rows)
    assert len(ledger.starts()) == 2
    assert "declared dead" not in process.output
    assert process.stop() == 0, process.output
