"""Processes that are woken through Redis: what users of other systems met with one, and how they end."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from django.db import transaction

from django_jobs.models import JobExecution, Worker
from django_jobs.states import Status
from tests.acc import jobs
from tests.acc.models import Thing
from tests.cases.test_cron_processes import EACH_SECOND, assert_each_tick_once, pass_ticks
from tests.cases.test_stopping import became, canary, seconds_to_end
from tests.forwarder import Forwarder
from tests.redis_servers import RedisServer, use_cache
from tests.support import Ledger, Runjobs, assert_consistent, manage, wait_for
from tests.test_example_project import Shop

if TYPE_CHECKING:
    from pytest_django import Settings

pytestmark = pytest.mark.subprocess

Start = Callable[..., Runjobs]

REDIS = {"DISPATCHER": {"BACKEND": "redis", "OPTIONS": {"CACHE": "redis"}}}
SELDOM = 20
SOON = 2.0
# A worker that has just had work looks again after 5, 15, 40 ms and ever less often. After a rest of so many seconds
# what starts within AT_ONCE was not found that way, or it would be by chance.
REST, AT_ONCE = 1.5, 0.15


@pytest.fixture
def through_redis(settings: Settings) -> None:
    """Have pushes of this process be hinted through Redis."""
    settings.DJANGO_JOBS = {**settings.DJANGO_JOBS, **REDIS}


def start_one(runjobs: Start, url: str, *args: str, poll: float = SELDOM, **extra: str) -> Runjobs:
    process = runjobs(*args, jobs={**REDIS, "POLL_INTERVAL": poll}, REDIS_URL=url, **extra).wait_ready()
    wait_for(lambda: "wake-up: redis at 127.0.0.1:" in process.output, 10, "it says how it is woken")
    return process


def latency(ledger: Ledger, **options: Any) -> float:
    """Return the seconds from a push, to a worker that has rested, to its start."""
    time.sleep(REST)
    began = time.time()
    row = jobs.mark.push(**options)
    wait_for(lambda: ledger.ends(row.pk), SELDOM + 5, "it ran")
    return ledger.starts(row.pk)[0].time - began


def await_wake_ups(ledger: Ledger) -> None:
    """Wait until a push starts at once; until then each is found by polling."""
    wait_for(lambda: latency(ledger) < AT_ONCE, 3 * SELDOM, "a push starts at once")


def cpu_seconds(process: Runjobs) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.usefixtures("through_redis")
class TestTransactions:
    """Enqueue inside an atomic block talks to the broker at once, so that a worker starts before the commit, and a
    block that is rolled back leaves a live job. Sources: RealOrangeOne/django-tasks-rq#11, rq/django-rq#187."""

    def test_a_worker_is_told_after_the_commit_and_never_of_what_was_rolled_back(
        self, runjobs: Start, valkey: RedisServer, ledger: Ledger
    ) -> None:
        process = start_one(runjobs, valkey.url)
        await_wake_ups(ledger)
        before = self.told(valkey)
        with contextlib.suppress(KeyError), transaction.atomic():
            lost = jobs.see_thing.push(thing_id=Thing.objects.create(name="rolled back").pk)
            assert self.told(valkey) == before
            raise KeyError
        with transaction.atomic():
            thing = Thing.objects.create(name="committed")
            seen = jobs.see_thing.push(thing_id=thing.pk)
            with contextlib.suppress(KeyError), transaction.atomic():
                undone = jobs.see_thing.push(thing_id=thing.pk)
                raise KeyError
            assert self.told(valkey) == before
        assert wait_for(lambda: ledger.ends(seen.pk), SOON, "it runs at once and finds the thing")
        assert self.told(valkey) == before + 1
        canary(ledger, process)
        assert self.kept(valkey) == []
        for row in (lost, undone):
            assert ledger.starts(row.pk) == []
            assert not JobExecution.objects.filter(pk=row.pk).exists()
        assert "ERROR" not in process.output
        assert_consistent()

    @staticmethod
    def told(server: RedisServer) -> int:
        """How many hints it was ever sent."""
        with server.client() as client:
            commands: Any = client.info("commandstats")
        return int(commands["cmdstat_zadd"]["calls"])

    @staticmethod
    def kept(server: RedisServer) -> list[str]:
        """The queues with something in them."""
        with server.client() as client:
            return list(client.scan_iter("*queue:*"))


@pytest.mark.slow
@pytest.mark.sqlite
@pytest.mark.postgres
@pytest.mark.usefixtures("through_redis")
def test_after_restarts_and_killed_connections_a_worker_is_woken_as_before(
    runjobs: Start, own_valkey: RedisServer, ledger: Ledger
) -> None:
    """After Redis restarts the worker logs a reconnect and never consumes again, until it is restarted by hand.

    Sources: celery/celery#8091, celery/celery#9054, celery/celery#10205."""
    process = start_one(runjobs, own_valkey.url, poll=SELDOM)
    await_wake_ups(ledger)
    for _ in range(3):
        own_valkey.kill()
        burnt, began = cpu_seconds(process), time.monotonic()
        time.sleep(2)
        assert (cpu_seconds(process) - burnt) / (time.monotonic() - began) < 0.05
        own_valkey.start()
    for kind in ("normal", "pubsub"):
        with own_valkey.client() as client:
            client.execute_command("CLIENT", "KILL", "TYPE", kind)
    rows = [jobs.mark.push() for _ in range(5)]
    # Whoever has lost the connection looks when it is there again.
    wait_for(lambda: all(ledger.ends(row.pk) for row in rows), SELDOM / 2, "all ran, and not by polling")
    await_wake_ups(ledger)
    assert statistics.median(latency(ledger) for _ in range(3)) < AT_ONCE
    assert process.process.poll() is None


@pytest.mark.slow(30)
@pytest.mark.sqlite
@pytest.mark.postgres
def test_schedulers_fire_each_tick_once_whatever_happens_between_them_and_redis(
    runjobs: Start, own_valkey: RedisServer, ledger: Ledger
) -> None:
    """An exception while taking the leader lock is swallowed and every cron job runs twice; losing the lock, or not
    getting it, kills the scheduler. Here there is neither leader nor lock.

    Sources: sibson/redbeat#208, sibson/redbeat#230, voiio/dramatiq-crontab#118, codingjoe/django-crontask#63."""
    cable = Forwarder(("127.0.0.1", own_valkey.port))
    url = f"redis://127.0.0.1:{cable.port}/0"
    with shaken(cable):
        first = start_one(runjobs, url, poll=0.2, **EACH_SECOND)
        before = pass_ticks(2)
        # One that starts while the other one is there.
        second = start_one(runjobs, url, poll=0.2, **EACH_SECOND)
        third = start_one(runjobs, url, poll=0.2, **EACH_SECOND)
        with own_valkey.client() as client:
            client.flushall()
        pass_ticks(1)
        first.kill()
        # Frozen for twice as long as it takes to be called dead.
        second.freeze()
        pass_ticks(6)
        second.kill(signal.SIGCONT)
        own_valkey.kill()
        pass_ticks(2)
    assert second.process.poll() is third.process.poll() is None
    # Without the third one, it is the thawed one that goes on.
    assert third.stop() == 0
    pass_ticks(2)
    assert_each_tick_once(ledger, before)
    assert second.stop() == 0
    assert "Traceback" not in second.output + third.output


@contextlib.contextmanager
def shaken(cable: Forwarder) -> Iterator[None]:
    """Let the cable fall silent, be cut and mended again and again while the block runs; it ends up mended."""
    over = threading.Event()

    def shake() -> None:
        for pause in itertools.cycle((0.2, 0.7, 0.4)):
            if over.wait(pause):
                return
            cable.hush()
            over.wait(pause)
            cable.cut()
            over.wait(pause)
            cable.mend()

    shaker = threading.Thread(target=shake)
    shaker.start()
    try:
        yield
    finally:
        over.set()
        shaker.join()


@pytest.mark.slow
@pytest.mark.sqlite
@pytest.mark.postgres
@pytest.mark.parametrize("state", ["there", "gone", "black hole"])
def test_an_idle_process_ends_at_once_whatever_redis_does(
    runjobs: Start, own_valkey: RedisServer, ledger: Ledger, state: str
) -> None:
    """Threads that are no daemons keep the process alive after SIGTERM. Source: knifecake/steady-queue#16."""
    if state == "gone":
        own_valkey.kill()
    elif state == "black hole":
        own_valkey.send(signal.SIGSTOP)
    ends = []
    for number in (signal.SIGTERM, signal.SIGINT):
        process = start_one(runjobs, own_valkey.url, "--concurrency", "2", poll=0.2)
        row = became(jobs.mark.push(), Status.OK)
        assert ledger.ends(row.pk)
        ends.append(seconds_to_end(process, number, within=5))
        assert process.process.returncode == 0
    assert min(ends) < 1.5


@pytest.mark.slow
@pytest.mark.sqlite
def test_no_output_page_or_row_holds_the_password_of_redis(
    runjobs: Start, ledger: Ledger, settings: Settings, client: Any, django_user_model: Any
) -> None:
    """Monitoring output contains the password of Redis. Source: rq/django-rq, unreleased changelog of 2026."""
    url = "redis://:s3cret@127.0.0.1:1/0"
    use_cache(settings, url)
    settings.DJANGO_JOBS = {**settings.DJANGO_JOBS, **REDIS}
    process = start_one(runjobs, url, "--verbosity", "3", poll=0.2)
    row = became(jobs.mark.push(), Status.OK)
    wait_for(lambda: "redis hints failed" in process.output, 20, "the fault is told")
    asked = manage("runjobs", "--check", "--verbosity", "3", REDIS_URL=url)
    client.force_login(django_user_model.objects.create_superuser("mia"))
    pages = [
        client.get(f"/admin/django_jobs/{path}").content.decode()
        for path in ("jobexecution/", f"jobexecution/{row.pk}/change/", "jobstate/", "worker/")
    ]
    assert process.stop() == 0
    rows = [*JobExecution.objects.values(), *Worker.objects.values()]
    for text in (process.output, asked.stdout + asked.stderr, *pages, str(rows)):
        assert text
        assert "s3cret" not in text


@pytest.mark.sqlite
def test_the_example_project_is_woken_through_the_server_that_redis_url_names(tmp_path: Path) -> None:
    shop = Shop(tmp_path)
    shop.environment["REDIS_URL"] = "redis://127.0.0.1:1/0"
    assert shop.ask("from shop.jobs import send_receipt\nanswer = send_receipt.mode") == "queue"


@pytest.mark.usefixtures("through_redis")
def test_a_cancel_reaches_a_handler_in_another_process_at_once(
    runjobs: Start, valkey: RedisServer, ledger: Ledger
) -> None:
    process = start_one(runjobs, valkey.url)
    await_wake_ups(ledger)
    spent = []
    for _ in range(5):
        row = jobs.slow.push(s=30, heed=True)
        wait_for(lambda row=row: ledger.starts(row.pk), SOON, "it runs")
        began = time.monotonic()
        row.cancel()
        wait_for(lambda row=row: ledger.ends(row.pk), 20, "it ends")
        spent.append(time.monotonic() - began)
        became(row, Status.CANCELLED)
    # A look once a second would take half of one.
    assert statistics.median(spent) < 0.25
    assert process.process.poll() is None
