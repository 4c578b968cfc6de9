from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from django_jobs import clock, registry
from django_jobs.definition import job
from django_jobs.models import jobs_alias
from tests.admin.support import LIST, WORKERS, Admin, read
from tests.factories import JobExecutionFactory, WorkerFactory

pytestmark = pytest.mark.django_db

NO_WORKER = "No worker has been seen for two minutes, so no job runs. Start one: manage.py runjobs"
ONLY_DIRECT = (
    "No worker has been seen for two minutes: web processes run what they push, but retries, delayed jobs, and "
    "whatever they leave unfinished must wait. Start one: manage.py runjobs"
)
NO_SCHEDULER = "No scheduler has been seen for two minutes, so no cron job fires. Start one: manage.py runjobs"


@pytest.fixture(autouse=True)
def cron_job() -> Iterator[None]:
    with registry.isolated():

        @job(name="shop.nightly", cron="0 3 * * *")
        def nightly() -> None:
            pass

        yield


def ago(**time: float) -> Any:
    return clock.now(jobs_alias()) - timedelta(**time)


@pytest.mark.parametrize("url", [LIST, WORKERS])
def test_without_any_process_both_lists_say_what_is_missing_and_the_mend(admin: Admin, url: str) -> None:
    words = read(admin.get(url)).words

    assert NO_WORKER in words
    assert NO_SCHEDULER in words


@pytest.mark.parametrize("url", [LIST, WORKERS])
def test_with_a_process_of_all_roles_there_is_no_banner(admin: Admin, url: str) -> None:
    WorkerFactory()

    assert "Start one" not in read(admin.get(url)).words


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({"roles": ["worker"]}, [NO_SCHEDULER]),
        ({"roles": ["scheduler", "sweep"]}, [NO_WORKER]),
        ({"roles": ["direct"]}, [ONLY_DIRECT, NO_SCHEDULER]),
        ({"dead": True}, [NO_WORKER, NO_SCHEDULER]),
    ],
)
def test_each_role_counts_for_itself(admin: Admin, given: dict[str, Any], missing: list[str]) -> None:
    WorkerFactory(**given)

    words = read(admin.list()).words

    assert [text for text in (NO_WORKER, ONLY_DIRECT, NO_SCHEDULER) if text in words] == missing


@pytest.mark.parametrize(("age", "is_missed"), [(110, False), (130, True)])
def test_a_process_is_missed_after_two_minutes(admin: Admin, age: float, is_missed: bool) -> None:
    WorkerFactory(heartbeat_at=ago(seconds=age))

    assert (NO_WORKER in read(admin.list()).words) is is_missed


def test_a_process_that_ended_a_moment_ago_is_not_missed_yet(admin: Admin) -> None:
    WorkerFactory(stopped=True)

    assert "Start one" not in read(admin.list()).words


def test_without_cron_jobs_no_scheduler_is_missed(admin: Admin) -> None:
    with registry.isolated(empty=True):
        words = read(admin.list()).words

    assert NO_WORKER in words
    assert NO_SCHEDULER not in words


def test_the_banner_is_for_those_who_may_look(as_user: Callable[..., Admin]) -> None:
    assert as_user("cancel").list().status_code == 403
    assert NO_WORKER in read(as_user("view", name="ben").list()).words


def test_the_workers_list_tells_who_is_alive_silent_and_stopped(admin: Admin) -> None:
    alive = WorkerFactory(host="a", pid=12345, queues=["mail", "reports"], roles=["worker"], slots=8)
    WorkerFactory(host="b", dead=True)
    WorkerFactory(host="c", stopped=True)
    WorkerFactory(host="d", queues=["-bulk", "-slow"])
    JobExecutionFactory(running=True, worker=alive)
    JobExecutionFactory(ok=True, worker=alive)

    shown = read(admin.get(WORKERS))

    for kind in ("alive", "silent", "stopped"):
        assert {"class": f"dj-badge dj-{kind}"} in shown.named("span")
    for text in ("12345", "mail, reports", "1 / 8", "0 / 10", "any", "any except bulk, slow", "2 h"):
        assert text in shown.words


def test_the_page_of_a_worker_shows_the_jobs_it_knows(admin: Admin) -> None:
    worker = WorkerFactory(stopped=True, names=["acc.mark", "acc.slow"], memory=123_000_000)

    words = read(admin.get(f"{WORKERS}{worker.pk}/change/")).words

    for text in ("acc.mark, acc.slow", "123 MB", "shutdown", "0.1.0", "stopped"):
        assert text in words


def test_workers_are_looked_at_only(as_user: Callable[..., Admin], admin: Admin) -> None:
    worker = WorkerFactory()

    assert as_user("view", name="a").get(WORKERS).status_code == 403
    assert as_user(name="b", worker=True).get(WORKERS).status_code == 200
    assert admin.client.post(f"{WORKERS}{worker.pk}/delete/", {"post": "yes"}).status_code == 403
    assert admin.get(f"{WORKERS}add/").status_code == 403


@pytest.mark.medium
def test_the_workers_list_costs_the_same_however_many_there_are(
    admin: Admin, django_assert_max_num_queries: Any
) -> None:
    for _ in range(20):
        WorkerFactory()

    with django_assert_max_num_queries(12):
        admin.get(WORKERS)
