"""Old and new code side by side, as in a deploy without an outage: a job added, renamed, removed, a cron changed."""

from __future__ import annotations

import signal
from datetime import datetime, timedelta

import pytest

from django_jobs import clock
from django_jobs.models import JobExecution, JobState
from django_jobs.states import Status
from tests.cases.test_stopping import Start, became, pending
from tests.support import Ledger, assert_consistent, wait_for

pytestmark = [pytest.mark.subprocess, pytest.mark.slow]

CODE = {"DJANGO_SETTINGS_MODULE": "tests.cases.deployed.settings"}


def ran_by(ledger: Ledger, row: JobExecution) -> list[str]:
    """Return the versions whose handlers came to their end."""
    return [entry.tag for entry in ledger.ends(row.pk)]


def test_a_rolling_deploy_loses_nothing_and_doubles_nothing(runjobs: Start, ledger: Ledger) -> None:
    """A worker of the old code takes what only the new one knows, and fails it; both fire; what ran is lost.

    Sources: rails/solid_queue#382, jobrunr/jobrunr#490, RealOrangeOne/django-tasks#190.
    """
    old = runjobs(**CODE, DEPLOYED="old").wait_ready()
    before = [pending("deployed.renamed"), pending("deployed.removed")]
    for row in before:
        assert ran_by(ledger, became(row, Status.OK)) == ["old"]
    long = pending("deployed.long", max_attempts=3)
    wait_for(lambda: ledger.starts(long.pk), 20, "the old code runs the long one")

    new = runjobs(**CODE, DEPLOYED="new").wait_ready()
    added, removed, renamed, since = (
        pending(f"deployed.{name}") for name in ("added", "removed", "renamed", "renamed_since")
    )
    assert ran_by(ledger, became(added, Status.OK)) == ran_by(ledger, became(since, Status.OK)) == ["new"]
    assert ran_by(ledger, became(removed, Status.OK)) == ["old"]
    assert ran_by(ledger, became(renamed, Status.OK)) in (["old"], ["new"])

    wait_for(lambda: JobState.objects.get(job_name="deployed.tick").schedule.endswith("*/2 UTC"), 20, "it took over")
    swapped_at = clock.now("default")
    old.kill(signal.SIGTERM)
    assert old.wait() == 0
    assert ran_by(ledger, became(long, Status.OK)) == ["new"]
    long.refresh_from_db()
    assert long.attempt == 1
    assert [entry.tag for entry in ledger.starts(long.pk)] == ["old", "new"]

    left, renamed = pending("deployed.removed"), pending("deployed.renamed")
    assert ran_by(ledger, became(renamed, Status.OK)) == ["new"]
    wait_for(lambda: len(ticks(swapped_at)) >= 2, 20, "the new code ticks")
    found = ticks()
    assert len(found) == len(set(found))
    assert all(tick.second % 2 == 0 for tick in ticks(swapped_at))
    late = JobExecution.objects.filter(job_name="deployed.tick")
    assert all(row.created_at - row.tick_at < timedelta(seconds=5) for row in late)
    left.refresh_from_db()
    # Not lost: it waits for somebody who knows it.
    assert left.status in {Status.PENDING, Status.SCHEDULED}
    assert (left.attempt, left.error) == (0, "")
    assert new.stop() == 0
    assert_consistent()


def ticks(since: datetime | None = None) -> list[datetime]:
    rows = JobExecution.objects.filter(job_name="deployed.tick").order_by("tick_at")
    return list((rows if since is None else rows.filter(tick_at__gt=since)).values_list("tick_at", flat=True))
