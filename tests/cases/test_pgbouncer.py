"""Behind PgBouncer in transaction mode everything works, only later: no NOTIFY arrives, and that is said once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.contrib.auth import get_user_model
from django.db import connection, connections
from django.test import Client

from django_jobs import clock
from django_jobs.dispatchers.postgres import listener
from django_jobs.models import JobExecution
from django_jobs.runtime.trim import Trim
from django_jobs.states import Status
from tests.acc import jobs
from tests.admin.support import LIST, page
from tests.cases.test_stopping import Start, became, began
from tests.dispatchers.peers import Peer, make_peer
from tests.dispatchers.test_postgres_processes import listens
from tests.factories import JobExecutionFactory
from tests.pgbouncer import PgBouncer, pgbouncer
from tests.support import Ledger, assert_consistent, wait_for

__all__ = ["make_peer"]

pytestmark = [pytest.mark.postgres, pytest.mark.pgbouncer, pytest.mark.slow, pytest.mark.subprocess]

SAID = "no wake-ups arrive, work is found by polling"


@pytest.fixture(params=[True, False], ids=["server-side cursors", "client-side cursors"])
def pooled(request: pytest.FixtureRequest, transactional_db: None) -> Iterator[PgBouncer]:
    """Have this process use its database through PgBouncer; its own transactions are short, too."""
    settings = connections.settings["default"]
    with pgbouncer() as pooler:
        direct = dict(settings)
        connection.close()
        settings |= {"HOST": "127.0.0.1", "PORT": str(pooler.port), "DISABLE_SERVER_SIDE_CURSORS": not request.param}
        try:
            yield pooler
        finally:
            connection.close()
            settings.update(direct)


def behind(pooler: PgBouncer, **extra: str) -> dict[str, str]:
    """Return the environment of a process that knows no other way to the database."""
    cursors = {} if connection.settings_dict["DISABLE_SERVER_SIDE_CURSORS"] else {"SERVER_SIDE_CURSORS": "1"}
    return {"DJANGO_SETTINGS_MODULE": "tests.cases.pooled_settings", "DATABASE_URL": pooler.url, **cursors, **extra}


def assert_nothing_left_behind() -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND database = "
            "(SELECT oid FROM pg_database WHERE datname = current_database())"
        )
        assert cursor.fetchone() == (0,)
        cursor.execute(
            "SELECT query FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in%'"
        )
        assert cursor.fetchall() == []


def test_jobs_run_retry_cancel_tick_and_come_due_behind_a_pooler(
    pooled: PgBouncer, runjobs: Start, ledger: Ledger
) -> None:
    """Behind PgBouncer in transaction mode locks of a session leak, LISTEN hears nothing and cursors vanish.

    Sources: bensheldon/good_job#482, #1573; OCA/queue#539.
    """
    process = runjobs(ACC_CRON="* * * * * *", **behind(pooled)).wait_ready()
    done, failing = jobs.mark.push(tag="one"), jobs.boom_retry.push()
    due = jobs.mark.using(delay=1).push(tag="later")
    running = jobs.slow.push(s=60, heed=True)
    began(ledger, running)
    running.cancel(by="a person")
    became(running, Status.CANCELLED)
    became(failing, Status.ERROR)
    assert failing.attempt == failing.max_attempts > 1
    failing.retry(by="a person")
    wait_for(lambda: len(ledger.starts(failing.pk)) > failing.attempt, 10, "it was tried again")
    for row in (done, due):
        became(row, Status.OK)
    wait_for(lambda: len(ledger.ends(tag="tick")) > 1, 10, "ticks fire")
    wait_for(lambda: SAID in process.output, 20, "it said that no wake-ups arrive")
    assert process.stop() == 0
    assert process.output.count(SAID) == 1
    assert_nothing_left_behind()
    assert_consistent()


def test_a_notify_costs_a_pooler_no_line_in_its_log(pooled: PgBouncer, runjobs: Start) -> None:
    """A LISTEN that stays with a session of the pool is heard by nobody and logged at each NOTIFY."""
    process = runjobs(**behind(pooled)).wait_ready()
    wait_for(lambda: SAID in process.output, 20, "it gave up listening")
    rows = [jobs.mark.push() for _ in range(20)]
    for row in rows:
        became(row, Status.OK)
    assert process.stop() == 0
    assert "not linked" not in pooled.log


@pytest.mark.parametrize("pooled", [False], indirect=True)
def test_a_listener_that_goes_past_the_pooler_hears_what_is_pushed_through_it(
    pooled: PgBouncer, runjobs: Start, ledger: Ledger
) -> None:
    slow = {"POLL_INTERVAL": 30, "DISPATCHER": {"BACKEND": "database", "OPTIONS": {"LISTEN": "direct"}}}
    process = runjobs(jobs=slow, **behind(pooled, DIRECT_URL=django_settings.DATABASE_URL)).wait_ready()
    wait_for(listens, 10, "it listens")
    for _ in range(5):
        row = jobs.mark.push()
        became(row, Status.OK, 10)
    assert process.stop() == 0
    assert SAID not in process.output


@pytest.mark.parametrize("pooled", [False], indirect=True)
def test_wake_ups_come_again_when_the_pooler_gives_out_sessions(
    pooled: PgBouncer,
    make_peer: Callable[..., Peer],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(listener, "PROBE_PATIENCE", 0.5)
    monkeypatch.setattr(listener, "UNHEARD_PAUSE", 0.5)
    with caplog.at_level(logging.WARNING, "django_jobs"):
        peer = make_peer()
        wait_for(lambda: peer.subscription.problem() == listener.UNHEARD, 20, "it hears nothing")
        pooled.change_mode("session")
        connection.close()
        peer.hear_nothing_yet()
        wait_for(lambda: len(caplog.records) == 2, 20, "it said so")
    assert [record.getMessage() for record in caplog.records] == [
        f"{SAID}: {listener.UNHEARD}",
        "wake-ups arrive again",
    ]
    jobs.mark.push()
    assert peer.woken.wait(20)


def test_five_thousand_rows_are_trimmed_and_listed_behind_a_pooler(pooled: PgBouncer, settings: Any) -> None:
    """Server-side cursors vanish between two statements. Same sources."""
    template = JobExecutionFactory(ok=True)
    now = clock.now("default")
    names = [field.column for field in JobExecution._meta.concrete_fields if not field.primary_key]
    columns = ", ".join(f'"{name}"' for name in names)
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO django_jobs_jobexecution (id, {columns}) SELECT gen_random_uuid(), {columns} "
            "FROM django_jobs_jobexecution, generate_series(1, 4999) WHERE id = %s",
            [template.pk],
        )
    client = Client(headers={"accept-language": "en"})
    client.force_login(get_user_model().objects.create_superuser("mia"))
    for url in (LIST, f"{LIST}?status=ok", f"{LIST}?q={template.job_name}", page(template)):
        assert client.get(url).status_code == 200
    settings.DJANGO_JOBS = {**settings.DJANGO_JOBS, "KEEP": {"ok": 10}}
    deadline = time.monotonic() + 30
    deleted = 0
    for portion in Trim(using="default").portions(now):
        deleted += portion
        assert time.monotonic() < deadline
    assert (deleted, JobExecution.objects.count()) == (4990, 10)
    assert_nothing_left_behind()
