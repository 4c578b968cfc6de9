"""What is promised, kept by real processes that are killed, frozen, asked to stop or cut off."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from django.db import DatabaseError, connection

from django_jobs.models import JobExecution, Worker
from django_jobs.states import Status
from tests.acc import jobs
from tests.acc.models import Thing
from tests.forwarder import forwarded_database
from tests.support import Ledger, Runjobs, assert_consistent, became, wait_for

pytestmark = pytest.mark.subprocess

Start = Callable[..., Runjobs]

# A killed process is found after 2 to 3 s.
HASTY = {"HEARTBEAT_INTERVAL": 0.5, "WORKER_LOST_AFTER": 2}
# Statements are looked at on their way.
PLAIN = {"PGSSLMODE": "disable", "PGGSSENCMODE": "disable"}
DEFAULTS: dict[str, Any] = {
    "POLL_INTERVAL": 1,
    "HEARTBEAT_INTERVAL": 10,
    "WORKER_LOST_AFTER": 45,
    "SWEEP_CRON": "* * * * *",
    "DRAIN_TIMEOUT": 20,
    "INTERRUPT_GRACE": 5,
}


def began(ledger: Ledger, *rows: JobExecution, times: int = 1) -> None:
    """Wait until the handlers of all rows began, each so often."""
    wait_for(lambda: all(len(ledger.starts(row.pk)) >= times for row in rows), 20, "the handlers began")


def canary(ledger: Ledger, process: Runjobs) -> None:
    """Check that this process, the only one that works, still does."""
    became(jobs.mark.push(tag="canary"), Status.OK, 15)
    assert ledger.ends(tag="canary")[-1].pid == process.pid


def assert_no_success_without_its_end(ledger: Ledger, rows: Iterable[JobExecution]) -> None:
    ended = {(entry.row_id, entry.attempt) for entry in ledger.ends()}
    for row in rows:
        row.refresh_from_db()
        assert row.status != Status.OK or (str(row.pk), row.attempt) in ended, f"{row} is ok, but did not end"


# Killed


def test_what_a_killed_worker_ran_runs_again_with_retry_and_is_an_error_without(runjobs: Start, ledger: Ledger) -> None:
    """A worker is killed hard: its row stays in progress for ever, or runs again though nothing allowed that.

    Sources: RealOrangeOne/django-tasks#46, ricwo/pq#23, karakeep-app/liteque#4.
    """
    victim = runjobs("--worker", jobs=HASTY).wait_ready()
    # The second run sleeps as long as the first.
    again = jobs.slow_retry.push(s=1.2)
    over = jobs.slow.using(key="K").push(s=30)
    began(ledger, again, over)
    victim.kill()
    victim.wait()
    rescuer = runjobs("--worker", jobs=HASTY).wait_ready()
    became(over, Status.ERROR)
    became(again, Status.OK)
    assert (again.attempt, again.rescues) == (2, 1)
    assert [(entry.attempt, entry.pid) for entry in ledger.starts(again.pk)] == [(1, victim.pid), (2, rescuer.pid)]
    assert [entry.attempt for entry in ledger.ends(again.pk)] == [2]
    assert over.completed_at is not None
    assert over.error.startswith("WorkerLost: ")
    assert f"{socket.gethostname()} pid {victim.pid}" in over.error
    assert len(ledger.starts(over.pk)) == 1
    assert jobs.slow.using(key="K", delay=3600).push(s=0).created is True
    canary(ledger, rescuer)
    assert_consistent()


@pytest.mark.slow(50)
def test_with_the_settings_as_they_are_a_killed_workers_job_runs_again_within_a_minute(
    runjobs: Start, ledger: Ledger
) -> None:
    victim = runjobs("--worker", jobs=DEFAULTS).wait_ready()
    row = jobs.gate_retry.push(path="/nowhere/at/all", s=600)
    began(ledger, row)
    rescuer = runjobs("--worker", jobs=DEFAULTS).wait_ready()
    victim.kill()
    killed_at = time.monotonic()
    victim.wait()
    wait_for(lambda: len(ledger.starts(row.pk)) == 2, 65, "the job runs again")
    assert time.monotonic() - killed_at < 60
    assert ledger.starts(row.pk)[1].pid == rescuer.pid
    assert_consistent()


def test_an_atomic_job_that_is_killed_has_no_effects_and_after_its_retry_has_them_once(
    runjobs: Start, ledger: Ledger, tmp_path: Path
) -> None:
    victim = runjobs("--worker", jobs=HASTY).wait_ready()
    gate = tmp_path / "gate"
    row = jobs.atomic_gate.push(name="made", path=str(gate), s=300)
    wait_for(lambda: ledger.entries("MADE", row.pk), 20, "the thing is there, in a transaction that never commits")
    victim.kill()
    victim.wait()
    assert not Thing.objects.exists()
    gate.touch()
    rescuer = runjobs("--worker", jobs=HASTY).wait_ready()
    became(row, Status.OK)
    assert [thing.name for thing in Thing.objects.all()] == ["made"]
    assert [entry.attempt for entry in ledger.starts(row.pk)] == [1, 2]
    canary(ledger, rescuer)
    assert_consistent()


# Asked to stop


def test_a_stop_hands_back_what_has_retry_and_ends_what_has_none(
    runjobs: Start, ledger: Ledger, tmp_path: Path
) -> None:
    """A platform's stop drops what is in flight, or marks it ok although it was cut short.

    Sources: coleifer/huey#239, #571, #796, procrastinate#307, rq/rq#507.
    """
    brief = {"DRAIN_TIMEOUT": 0.4, "INTERRUPT_GRACE": 0.4}
    gate = tmp_path / "gate"
    first = runjobs("--worker", jobs=brief).wait_ready()
    # Handlers that never look at the signal, and handlers that return as soon as it is set.
    with_retry = [jobs.slow_retry.push(s=2), jobs.gate_retry.push(path=str(gate))]
    without = [jobs.slow.push(s=30), jobs.gate.push(path=str(gate)), jobs.slow.push(s=30, heed=True)]
    began(ledger, *with_retry, *without)
    assert first.stop(10) == 0, first.output
    for row in with_retry:
        row.refresh_from_db()
        assert (row.status, row.attempt) == (Status.PENDING, 0)
    for row in without:
        row.refresh_from_db()
        assert row.status == Status.ERROR
        assert "interrupted by shutdown" in row.error
        assert row.completed_at is not None
    assert_no_success_without_its_end(ledger, [*with_retry, *without])
    assert_consistent()

    gate.touch()
    second = runjobs("--worker", jobs=brief).wait_ready()
    for row in with_retry:
        became(row, Status.OK)
        assert row.attempt == 1
        assert ledger.ends(row.pk)[-1].pid == second.pid
    assert all(len(ledger.starts(row.pk)) == 1 for row in without)
    assert_no_success_without_its_end(ledger, with_retry)
    canary(ledger, second)
    assert_consistent()


@pytest.mark.parametrize("heed", [True, False])
def test_a_cancel_reaches_a_handler_in_another_process_within_two_seconds(
    heed: bool, runjobs: Start, ledger: Ledger
) -> None:
    """Without notifications a cancel of a running job has no effect at all. Source: river 0.40.0 changelog."""
    process = runjobs("--worker", jobs={"INTERRUPT_GRACE": 0.2}).wait_ready()
    row = jobs.slow_retry.push(s=30, heed=heed)
    began(ledger, row)
    row.cancel(by="a person")
    became(row, Status.CANCELLED, 2.5)
    assert len(ledger.ends(row.pk)) == int(heed)
    assert (row.cancelled_by_name, row.attempt) == ("a person", 1)
    canary(ledger, process)
    assert_consistent()


# Frozen


def test_a_worker_that_was_frozen_overwrites_nothing_and_goes_on_working(
    runjobs: Start, ledger: Ledger, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    frozen = runjobs("--worker", jobs=HASTY).wait_ready()
    # Thawed after its second, the first run raises, and would be retried.
    row = jobs.gate_retry.push(path=str(gate), s=1)
    began(ledger, row)
    frozen.freeze()
    gate.touch()
    rescuer = runjobs("--worker", jobs=HASTY).wait_ready()
    became(row, Status.OK)
    assert [(entry.attempt, entry.pid) for entry in ledger.ends(row.pk)] == [(2, rescuer.pid)]
    gate.unlink()
    before = JobExecution.objects.filter(pk=row.pk).values().get()

    frozen.kill(signal.SIGCONT)
    registered = Worker.objects.filter(pid=frozen.pid)
    wait_for(lambda: registered.filter(heartbeat_at__gt=before["completed_at"]).exists(), 10, "the thawed one beats")
    assert rescuer.stop() == 0, rescuer.output
    canary(ledger, frozen)
    # Its second run of anything: what the first one left unwritten would be written by now.
    canary(ledger, frozen)
    assert JobExecution.objects.filter(pk=row.pk).values().get() == before
    assert_consistent()


# Cut off from the database


def outage(
    seconds: float, settings: dict[str, Any], runjobs: Start, ledger: Ledger, tmp_path: Path
) -> list[JobExecution]:
    """Cut two workers under load off from the database for so long; check what came of it."""
    gate = tmp_path / "gate"
    with forwarded_database() as (cable, url):
        workers = [runjobs("--worker", jobs=settings, DATABASE_URL=url).wait_ready() for _ in range(2)]
        # Through the whole outage in both processes, also jobs without retry.
        patient = [made.push(path=str(gate), s=300) for made in [jobs.gate, jobs.gate_retry] * 3]
        # They end while nothing can be written.
        during = [jobs.slow.push(s=1.5) for _ in range(4)]
        began(ledger, *patient, *during)
        assert {entry.pid for entry in ledger.starts()} == {worker.pid for worker in workers}
        cable.cut()
        time.sleep(seconds)
        assert len(ledger.ends()) == len(during)
        cable.mend()
        after = jobs.mark.push_many([{"tag": str(n)} for n in range(20)])
        for row in [*during, *after]:
            became(row, Status.OK, 30)
        # Time in which a wrong rescue would happen.
        time.sleep(settings["WORKER_LOST_AFTER"] + settings["HEARTBEAT_INTERVAL"])
        gate.touch()
        rows = [*patient, *during, *after]
        for row in rows:
            became(row, Status.OK, 30)
            assert (row.attempt, row.rescues) == (1, 0), row.error
            assert len(ledger.starts(row.pk)) == len(ledger.ends(row.pk)) == 1
        for worker in workers:
            assert worker.process.poll() is None, worker.output
        assert workers[1].stop() == 0, workers[1].output
        canary(ledger, workers[0])
    assert_consistent()
    return rows


@pytest.mark.postgres
@pytest.mark.mysql
def test_an_outage_rescues_no_healthy_run_and_records_each_end_once(
    runjobs: Start, ledger: Ledger, tmp_path: Path
) -> None:
    outage(3, {**HASTY, "CONCURRENCY": 5}, runjobs, ledger, tmp_path)


@pytest.mark.postgres
@pytest.mark.mysql
@pytest.mark.slow(120)
def test_with_the_settings_as_they_are_an_outage_of_a_minute_rescues_no_healthy_run(
    runjobs: Start, ledger: Ledger, tmp_path: Path
) -> None:
    outage(60, {**DEFAULTS, "CONCURRENCY": 5}, runjobs, ledger, tmp_path)


# The connection is lost after the server did its work, and before its answer came


@pytest.mark.postgres
@pytest.mark.mysql
def test_an_atomic_job_whose_commit_went_unanswered_is_not_run_again(runjobs: Start, ledger: Ledger) -> None:
    with forwarded_database() as (cable, url):
        process = runjobs("--worker", DATABASE_URL=url, **PLAIN).wait_ready()
        cable.swallow_answer(after=b"acc_thing", at=b"COMMIT")
        row = jobs.atomic_thing.push(name="made")
        assert cable.swallowed.wait(10)
        became(row, Status.OK)
        canary(ledger, process)
        row.refresh_from_db()
        assert (row.status, row.attempt, row.errors) == (Status.OK, 1, [])
        assert len(ledger.starts(row.pk)) == Thing.objects.count() == 1
        wait_for(lambda: f"ok acc.atomic_thing {row.pk}" in process.output, 10, "its end is told")
        assert process.output.count(f"ok acc.atomic_thing {row.pk}") == 1
    assert_consistent()


@pytest.mark.postgres
@pytest.mark.mysql
def test_an_end_whose_write_went_unanswered_is_recorded_and_told_once(runjobs: Start, ledger: Ledger) -> None:
    with forwarded_database() as (cable, url):
        process = runjobs("--worker", DATABASE_URL=url, **PLAIN).wait_ready()
        cable.swallow_answer(after=b"attempt = attempt - ", at=b"COMMIT")
        row = jobs.boom_retry.push()
        assert cable.swallowed.wait(10)
        became(row, Status.ERROR)
        canary(ledger, process)
        assert [entry.attempt for entry in ledger.starts(row.pk)] == [1, 2, 3]
        assert [entry["attempt"] for entry in row.errors] == [1, 2, 3]
        wait_for(lambda: f"acc.boom_retry {row.pk} attempt 3/3" in process.output, 10, "its end is told")
        for attempt in (1, 2, 3):
            assert process.output.count(f"acc.boom_retry {row.pk} attempt {attempt}/3") == 1
    assert_consistent()


@pytest.mark.postgres
@pytest.mark.mysql
@pytest.mark.slow(25)
def test_a_row_whose_claim_went_unanswered_is_handed_back_and_runs_once(runjobs: Start, ledger: Ledger) -> None:
    claimed = b"run_no = run_no + 1"
    row = jobs.mark.push()
    with forwarded_database() as (cable, url):
        cable.swallow_answer(after=claimed, at=b"COMMIT" if connection.vendor == "mysql" else claimed)
        process = runjobs("--worker", DATABASE_URL=url, **PLAIN).wait_ready()
        assert cable.swallowed.wait(10)
        row.refresh_from_db()
        assert row.status == Status.RUNNING
        became(row, Status.OK, 40)
        assert (row.attempt, len(ledger.starts(row.pk)), len(ledger.ends(row.pk))) == (1, 1, 1)
        canary(ledger, process)
    assert_consistent()


# Again and again, under load


def load(ledger: Ledger, meanwhile: Callable[[], None], *, times: int, every: float) -> list[JobExecution]:
    """Push jobs all the time and do something in between, so often; return the rows once all are final."""
    rows: list[JobExecution] = []
    for _ in range(times):
        until = time.monotonic() + every
        while time.monotonic() < until:
            rows += jobs.slow.push_many([{"s": 0.01}] * 5)
            rows += jobs.slow_retry.push_many([{"s": 0.01}] * 4 + [{"s": 0.2}])
            time.sleep(0.05)
        meanwhile()
    # The reply to a claim may have been lost: such rows are handed back after 10 to 20 s.
    wait_for(lambda: not JobExecution.objects.live().exists(), 60, "all are final")
    assert JobExecution.objects.count() == len(rows)
    assert_no_success_without_its_end(ledger, rows)
    return rows


def end_connections() -> None:
    """End all connections of others, as a failover of the server does."""
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            return
        cursor.execute("SELECT id FROM information_schema.processlist WHERE db = DATABASE() AND id <> CONNECTION_ID()")
        for (number,) in cursor.fetchall():
            # It may have ended by itself.
            with contextlib.suppress(DatabaseError):
                cursor.execute(f"KILL {number}")


@pytest.mark.slow
@pytest.mark.postgres
@pytest.mark.mysql
def test_connections_that_end_under_load_cost_no_run_and_no_word_of_one(runjobs: Start, ledger: Ledger) -> None:
    workers = [runjobs("--worker").wait_ready() for _ in range(2)]
    rows = load(ledger, end_connections, times=20, every=0.3)
    assert {(row.status, row.attempt, row.rescues) for row in rows} == {(Status.OK, 1, 0)}
    assert len(ledger.starts()) == len(ledger.ends()) == len(rows)
    assert workers[1].stop() == 0
    canary(ledger, workers[0])
    told = [line.split(" attempt ")[0].split()[-1] for worker in workers for line in worker.output.splitlines()]
    times = Counter(told)
    assert {times[str(row.pk)] for row in rows} == {1}
    assert_consistent()


@pytest.mark.slow
def test_processes_that_are_killed_again_and_again_lose_nothing(runjobs: Start, ledger: Ledger) -> None:
    workers = [runjobs("--worker", jobs=HASTY).wait_ready() for _ in range(2)]

    def replace() -> None:
        workers.pop(0).kill()
        workers.append(runjobs("--worker", jobs=HASTY))

    rows = load(ledger, replace, times=5, every=1.5)
    starts = Counter(entry.row_id for entry in ledger.starts())
    for row in rows:
        if row.job_name == "acc.slow_retry":
            assert row.status == Status.OK
        else:
            assert row.status == Status.OK or "WorkerLost" in row.error
            assert starts[str(row.pk)] <= 1
    assert sum(row.rescues for row in rows) > 0
    assert_consistent()


@pytest.mark.slow
def test_deploys_in_a_row_burn_no_attempt_and_fail_no_job(runjobs: Start, ledger: Ledger) -> None:
    """A job in flight at a deploy waits out a back-off, burns an attempt or stays running for ever.

    Sources: riverqueue/river PR#1290, dabapps/django-db-queue PR#44.
    """
    workers = [runjobs("--worker").wait_ready()]

    def replace() -> None:
        workers.append(runjobs("--worker").wait_ready())
        assert workers.pop(0).stop() == 0

    rows = load(ledger, replace, times=5, every=0.5)
    assert {(row.status, row.attempt, row.rescues) for row in rows} == {(Status.OK, 1, 0)}
    assert len(ledger.starts()) == len(ledger.ends()) == len(rows)
    canary(ledger, workers[0])
    assert_consistent()


# Many at once


@pytest.mark.slow
def test_eight_processes_run_each_of_five_hundred_jobs_once(runjobs: Start, ledger: Ledger) -> None:
    """A claim that reads first and writes then lets two consumers take the same row.

    Sources: coleifer/huey#253, Koed00/django-q#426.
    """
    processes = [runjobs("--worker") for _ in range(8)]
    wait_for(lambda: Worker.objects.count() == 8, 60, "all have registered")
    priorities = ("low", "normal", "high")
    rows = jobs.mark.push_many([
        jobs.mark.using(priority=priorities[n % 3]).item(tag=priorities[n % 3]) for n in range(500)
    ])  # fmt: skip
    started = time.monotonic()
    wait_for(lambda: JobExecution.objects.filter(status=Status.OK).count() == 500, 60, "all are ok")
    assert time.monotonic() - started < 60
    ids = [entry.row_id for entry in ledger.starts()]
    assert len(ids) == 500
    assert set(ids) == {str(row.pk) for row in rows}
    assert len(ledger.ends()) == 500
    # Not strictly: a process may be held up between its claim and its handlers.
    order = [entry.tag for entry in sorted(ledger.starts(), key=lambda entry: entry.time)]
    high, normal, low = (median(n for n, tag in enumerate(order) if tag == name) for name in reversed(priorities))
    assert high < normal < low
    for process in processes:
        process.kill(signal.SIGTERM)
    for process in processes:
        assert process.wait() == 0, process.output
        assert "Traceback" not in process.output
    assert_consistent()


# Nothing is held while a handler runs

# Transactions that are open, our own aside.
OPEN = {
    "postgresql": (
        "SELECT pid, xact_start FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
        "AND state LIKE 'idle in transaction%'"
    ),
    "mysql": (
        "SELECT p.id, t.trx_started FROM information_schema.innodb_trx t "
        "JOIN information_schema.processlist p ON p.id = t.trx_mysql_thread_id "
        "WHERE p.db = DATABASE() AND p.id <> CONNECTION_ID()"
    ),
}


def open_transactions() -> set[Any]:
    with connection.cursor() as cursor:
        cursor.execute(OPEN[connection.vendor])
        return set(cursor.fetchall())


@pytest.mark.postgres
@pytest.mark.mysql
def test_no_transaction_is_open_while_handlers_run(runjobs: Start, ledger: Ledger, tmp_path: Path) -> None:
    """A job runs inside the transaction of its claim: timeouts kill the connection, vacuum is held back.

    Sources: msolli/proletarian#26, mgcrea/prisma-queue#5.
    """
    process = runjobs().wait_ready()
    gate = tmp_path / "gate"
    rows = [made.push(path=str(gate), s=300) for made in (jobs.gate, jobs.async_gate)]
    began(ledger, *rows)
    for row in rows:
        row.refresh_from_db()
        assert row.status == Status.RUNNING and row.started_at is not None
    seen: set[Any] = set()
    for _ in range(10):
        seen |= open_transactions()
        time.sleep(0.1)
    # Those of heartbeats and the like end, whatever the handlers do.
    wait_for(lambda: not seen & open_transactions(), 30, "none is held")
    assert not ledger.ends()
    gate.touch()
    for row in rows:
        assert became(row, Status.OK).attempt == 1
    canary(ledger, process)
    assert_consistent()


@pytest.mark.sqlite
def test_others_write_while_a_handler_runs(runjobs: Start, ledger: Ledger, tmp_path: Path) -> None:
    """See above: on SQLite an open transaction would keep every other process from writing.

    Sources: msolli/proletarian#26, mgcrea/prisma-queue#5.
    """
    process = runjobs().wait_ready()
    gate = tmp_path / "gate"
    rows = [made.push(path=str(gate), s=300) for made in (jobs.gate, jobs.async_gate)]
    began(ledger, *rows)
    for _ in range(20):
        Thing.objects.create(name="of another process")
    assert not ledger.ends()
    gate.touch()
    for row in rows:
        assert became(row, Status.OK).attempt == 1
    canary(ledger, process)
    assert_consistent()
