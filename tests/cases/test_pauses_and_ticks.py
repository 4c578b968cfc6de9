"""What a pause held back does not come at once when it ends, by whatever way it is ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.core.management import call_command
from django.test import Client

from django_jobs import clock, job, registry, services
from django_jobs.models import JobExecution, JobState
from django_jobs.runtime.scheduler import Scheduler

pytestmark = pytest.mark.django_db

JOBS = "/admin/django_jobs/jobstate/selected/"
NAMES = ("acc.hourly", "acc.nightly")


@pytest.fixture(autouse=True)
def _only_the_jobs_of_the_test() -> Iterator[None]:
    with registry.isolated(empty=True):
        job(name="acc.hourly", cron="0 * * * *")(lambda: None)
        job(name="acc.nightly", cron="0 3 * * *", misfire="all", overlap="allow")(lambda: None)
        yield


def by_call(verb: str) -> None:
    for name in NAMES:
        getattr(registry.get(name), verb)(by="ann")


def by_name(verb: str) -> None:
    for name in NAMES:
        getattr(services, f"{verb}_job")(name)


def pressed(verb: str, *chosen: tuple[str, ...]) -> None:
    client = Client()
    client.force_login(get_user_model().objects.get_or_create(username="mia", is_staff=True, is_superuser=True)[0])
    for names in chosen:
        assert client.post(JOBS, {"verb": verb, "job": names}).status_code == 302


def by_buttons(verb: str) -> None:
    pressed(verb, *((name,) for name in NAMES))


def by_selection(verb: str) -> None:
    pressed(verb, NAMES)


def by_command(verb: str) -> None:
    for name in NAMES:
        call_command("jobs", verb, name, "--by", "ann", stdout=StringIO())


@pytest.mark.parametrize("resumed_after_a_look", [True, False], ids=["looked", "nobody looked"])
@pytest.mark.parametrize("way", [by_call, by_name, by_buttons, by_selection, by_command])
def test_a_resumed_schedule_waits_for_its_next_tick(
    way: Callable[[str], None], resumed_after_a_look: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schedule that is enabled after its time has passed runs at once, by one way to enable it and not by the other.

    Sources: celery/django-celery-beat#510, celery/django-celery-beat#383. With no scheduler up meanwhile the tick is
    late by less than its grace, as if it had been missed.
    """
    now = clock.now("default")
    start = now.replace(minute=50, second=0, microsecond=0) + timedelta(days=1)
    start = start.replace(hour=2)
    scheduler = Scheduler(using="default")
    scheduler.tick(start)

    def at(**after: int) -> Any:
        moment = start + timedelta(**after)
        monkeypatch.setattr(clock, "now", lambda using: moment)
        return moment

    at(minutes=1)
    way("pause")
    if resumed_after_a_look:
        scheduler.tick(at(minutes=11))
    at(minutes=15)
    way("resume")
    scheduler.tick(at(minutes=16))
    assert not JobExecution.objects.exists()
    states = {state.job_name: state for state in JobState.objects.all()}
    assert {(state.last_skip_reason, state.skips) for state in states.values()} == {("paused", 1)}
    scheduler.tick(at(minutes=71))
    assert JobExecution.objects.get().job_name == "acc.hourly"
