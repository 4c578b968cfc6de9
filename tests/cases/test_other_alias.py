"""The executions live in a database of their own, and connections end after each use."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import close_old_connections, connections

from django_jobs import job, registry
from django_jobs.models import JobExecution, JobState
from django_jobs.runtime.scheduler import MAX_DELAY, Scheduler
from django_jobs.signals import job_pushed
from django_jobs.states import Status
from tests.acc import jobs
from tests.cases.routers import Elsewhere
from tests.cases.test_stopping import Start, became, canary
from tests.support import Ledger, assert_consistent, wait_for

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


@pytest.fixture(autouse=True)
def _elsewhere(transactional_db: None, settings: Any) -> Iterator[None]:
    settings.DATABASE_ROUTERS = [Elsewhere()]
    ages = {alias: connections[alias].settings_dict["CONN_MAX_AGE"] for alias in ("default", "other")}
    for alias in ages:
        connections[alias].settings_dict["CONN_MAX_AGE"] = 0
    yield
    for alias, age in ages.items():
        connections[alias].settings_dict["CONN_MAX_AGE"] = age


def test_a_tick_fires_once_whatever_is_done_to_connections_meanwhile() -> None:
    """Housekeeping closes the connection of the scheduler's transaction: the slot is not stored, and fires again.

    Source: django-q2/django-q2#293.
    """
    noon = datetime(2027, 3, 1, 12, tzinfo=UTC)
    swept: list[bool] = []

    def sweep(**kwargs: Any) -> None:
        close_old_connections()
        swept.append(connections["other"].in_atomic_block)

    def daily() -> None: ...

    job_pushed.connect(sweep)
    try:
        with registry.isolated(empty=True):
            job(name="tests.daily", cron="0 12 * * *")(daily)
            scheduler = Scheduler(using="other")
            scheduler.tick(noon - timedelta(hours=1))
            delays = []
            for second in range(0, 120, 10):
                sweep()
                delays.append(scheduler.tick(noon + timedelta(seconds=second)))
    finally:
        job_pushed.disconnect(sweep)
    (row,) = JobExecution.objects.all()
    assert row._state.db == "other"
    assert row.tick_at == noon
    assert JobState.objects.get().last_tick_at == noon
    assert delays[-1] == MAX_DELAY
    assert len(swept) == 13


@pytest.mark.subprocess
@pytest.mark.slow
def test_a_process_works_with_its_executions_in_another_database(runjobs: Start, ledger: Ledger) -> None:
    """See above, with every part at work."""
    process = runjobs(ACC_CRON="* * * * * *", DJANGO_SETTINGS_MODULE="tests.cases.elsewhere_settings").wait_ready()
    rows = [jobs.slow.push(s=0.5), jobs.boom_retry.push(), jobs.async_mark.push(), jobs.atomic_thing.push(name="made")]
    became(rows[0], Status.OK)
    became(rows[1], Status.ERROR)
    became(rows[2], Status.OK)
    wait_for(lambda: len(ledger.ends(tag="tick")) >= 4, 20, "it ticked")
    ticks = JobExecution.objects.exclude(tick_at=None)
    assert ticks.count() == ticks.values("tick_at").distinct().count()
    canary(ledger, process)
    assert process.stop() == 0
    assert "closed" not in process.output
    assert_consistent()
