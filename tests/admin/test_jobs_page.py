"""The page of jobs tells what the code and the tables know of each, at a bounded cost, and runs one now."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from django.contrib.admin.models import ADDITION, LogEntry
from django.db import connections
from django.test.utils import CaptureQueriesContext
from django.utils.safestring import mark_safe

from django_jobs import clock, registry
from django_jobs.admin import overview
from django_jobs.admin.jobs import PER_PAGE
from django_jobs.definition import job
from django_jobs.models import JobExecution, JobState, jobs_alias
from django_jobs.reading import figures as counting
from django_jobs.reading.figures import UNKNOWN
from django_jobs.states import Status
from tests.admin.support import LIST, Admin, page, read, said
from tests.cases.routers import Elsewhere
from tests.factories import JobExecutionFactory, JobStateFactory, WorkerFactory

# Rendering pages takes its time; the loop of work has the list and its actions.
pytestmark = [pytest.mark.django_db, pytest.mark.medium]

JOBS = "/admin/django_jobs/jobstate/"


@pytest.fixture(autouse=True)
def shop() -> Iterator[SimpleNamespace]:
    """Three jobs, which are all there are: a cron one, one that takes nothing and one that takes an id."""
    WorkerFactory()
    with registry.isolated(empty=True):

        @job(name="shop.nightly", cron="0 3 * * *", timezone="Asia/Tokyo", priority="high", timeout=90, retry=2)
        def nightly() -> None:
            """Sweep the floor."""

        @job(name="shop.count", aliases=["shop.tally"])
        def count(limit: int = 3) -> None: ...

        @job(name="shop.receipt")
        def receipt(order_id: int) -> None: ...

        yield SimpleNamespace(nightly=nightly, count=count, receipt=receipt)


def run(person: Admin, name: str, query: str = "") -> Any:
    return person.client.post(f"{JOBS}{name}/run/{query}")


def words(person: Admin, **query: str) -> str:
    return read(person.get(JOBS, **query)).words


def line(person: Admin, name: str) -> Any:
    response = person.get(JOBS)
    assert response.status_code == 200
    (found,) = [each for each in response.context["overview"].lines if each.job.name == name]
    return found


def figures(person: Admin, name: str) -> dict[str, str]:
    found = line(person, name)
    return {str(count.word): str(count.figure) for count in [*found.live, *found.kept]}


def test_each_registered_job_has_a_line_in_words_a_person_knows(admin: Admin) -> None:
    text = words(admin)

    for part in (
        "shop.nightly Sweep the floor. cron 0 3 * * * Asia/Tokyo",
        "high priority at most 1 min 30 s 2 retries",
        "shop.count database normal priority no time limit 0 retries",
        "shop.receipt database",
        "3 jobs",
    ):
        assert part in text
    assert "Unregistered names" not in text


def test_the_index_of_the_admin_and_the_list_of_executions_lead_to_the_page(as_user: Callable[..., Admin]) -> None:
    person = as_user("view")

    for url in ("/admin/", "/admin/django_jobs/", LIST):
        assert JOBS in [link.get("href") for link in read(person.get(url)).named("a")]


def test_the_page_is_for_those_who_may_look_at_executions(as_user: Callable[..., Admin]) -> None:
    stranger = as_user("trigger", name="ben")

    assert as_user("view").get(JOBS).status_code == 200
    assert stranger.get(JOBS).status_code == 403
    assert JOBS not in stranger.get("/admin/django_jobs/").content.decode()


def test_the_next_run_is_shown_in_local_time(admin: Admin, settings: Any) -> None:
    settings.USE_TZ, settings.TIME_ZONE = True, "Europe/Paris"
    before = clock.now(jobs_alias())
    found = line(admin, "shop.nightly")

    # 03:00 in Tokyo, which has no summer time.
    assert (found.facts.next_run.hour, found.facts.next_run.minute) == (18, 0)
    assert before < found.facts.next_run <= clock.now(jobs_alias()) + timedelta(days=1)
    assert re.search(r"20\d\d-\d\d-\d\d (19:00:00 CET|20:00:00 CEST) in ", words(admin))
    assert line(admin, "shop.receipt").facts.next_run is None


@pytest.mark.medium
def test_executions_are_counted_by_what_they_are(admin: Admin) -> None:
    for given, number in {"ok": 3, "failed": 2, "cancelled": 1, "pending": 2, "running": 1, "scheduled": 2}.items():
        for _ in range(number):
            JobExecutionFactory(job_name="shop.count", **{given: True})
    JobExecutionFactory(job_name="shop.count", parked=True)
    JobExecutionFactory(job_name="shop.count", parked=True, parked_reason=UNKNOWN)
    JobExecutionFactory(job_name="shop.receipt", ok=True)

    assert figures(admin, "shop.count") == {
        "ok": "3", "error": "2", "cancelled": "1", "pending": "2", "running": "1", "scheduled": "2", "parked": "1",
        "parked: no worker knows the job": "1",
    }  # fmt: skip
    assert figures(admin, "shop.receipt") == {"ok": "1"}
    assert figures(admin, "shop.nightly") == {}


def test_rows_under_an_alias_count_for_the_job(admin: Admin) -> None:
    JobExecutionFactory(job_name="shop.tally", ok=True)
    JobExecutionFactory(job_name="shop.tally", parked=True, parked_reason=UNKNOWN)
    JobExecutionFactory(job_name="shop.count", ok=True)

    assert figures(admin, "shop.count") == {"ok": "2", "parked: no worker knows the job": "1"}
    assert "Unregistered names" not in words(admin)


def test_a_figure_links_to_the_list_of_just_these_rows(admin: Admin) -> None:
    row = JobExecutionFactory(job_name="shop.count", failed=True)
    renamed = JobExecutionFactory(job_name="shop.tally", failed=True)
    JobExecutionFactory(job_name="shop.count", ok=True)
    JobExecutionFactory(job_name="shop.receipt", failed=True)
    found = line(admin, "shop.count")
    (failed,) = [count for count in found.kept if count.word == Status.ERROR.label]

    assert failed.url == f"{LIST}?job_name=shop.count&status=error"
    assert [each.pk for each in admin.get(failed.url).context["cl"].result_list] == [renamed.pk, row.pk]
    assert found.url == f"{LIST}?job_name=shop.count"


def test_counting_stops_at_a_bound_and_says_so(admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "COUNTED", 3)
    for _ in range(4):
        JobExecutionFactory(job_name="shop.count", ok=True)
    for _ in range(3):
        JobExecutionFactory(job_name="shop.count", failed=True)
        JobExecutionFactory(job_name="shop.receipt", ok=True)

    assert figures(admin, "shop.count") == {"ok": "3+", "error": "3"}
    assert figures(admin, "shop.receipt") == {"ok": "3"}


def test_live_rows_are_counted_together_up_to_the_bound(admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    """One job's flood may hide another's few rows: then no number pretends to be exact."""
    monkeypatch.setattr(counting, "COUNTED", 3)
    JobExecutionFactory(job_name="shop.receipt")
    for _ in range(3):
        JobExecutionFactory(job_name="shop.count")

    assert figures(admin, "shop.count") == {"pending": "3+"}
    assert figures(admin, "shop.receipt") == {"pending": "1+"}

    JobExecutionFactory(job_name="shop.count")

    assert figures(admin, "shop.receipt") == {"pending": "0+"}


def statements(person: Admin) -> list[str]:
    with CaptureQueriesContext(connections[jobs_alias()]) as captured:
        assert person.get(JOBS).status_code == 200
    return [each["sql"] for each in captured.captured_queries]


@pytest.mark.medium
def test_one_bounded_statement_counts_for_the_whole_page(admin: Admin) -> None:
    for each in registry.all_jobs():
        JobExecutionFactory(job_name=each.name, ok=True)
        JobStateFactory(job_name=each.name)
    few = statements(admin)
    (counting,) = [each for each in few if "COUNT(" in each]

    # Each of the counts has its own end.
    assert counting.count("COUNT(") == counting.count("LIMIT 10001")
    assert len([each for each in few if "jobexecution" in each]) == 2

    for number in range(PER_PAGE + 5):
        made: Any = job(name=f"shop.more{number:02}", aliases=[f"shop.old{number:02}"])(lambda: None)
        JobExecutionFactory(job_name=made.name, failed=True)

    assert len(statements(admin)) == len(few) < 12


@pytest.mark.medium
def test_many_jobs_are_shown_page_by_page(admin: Admin) -> None:
    for number in range(PER_PAGE):
        job(name=f"shop.more{number:02}")(lambda: None)

    first, second = read(admin.get(JOBS)), read(admin.get(JOBS, p="2"))

    assert ("shop.receipt" in first.words, "shop.receipt" in second.words) == (False, True)
    assert [link["href"] for link in first.named("a") if link.get("href") == "?p=2"] == ["?p=2"]
    assert run(admin, "shop.nightly", "?p=2").url == f"{JOBS}?p=2"


def test_the_last_run_is_the_one_that_ended_last_with_its_outcome(admin: Admin) -> None:
    now = clock.now(jobs_alias())
    JobExecutionFactory(job_name="shop.count", ok=True, now=now - timedelta(hours=1))
    row = JobExecutionFactory(job_name="shop.tally", failed=True, now=now - timedelta(minutes=5))
    JobExecutionFactory(job_name="shop.count", ok=True, now=now - timedelta(hours=2))
    found = line(admin, "shop.count")

    assert found.last == row
    assert "error 5 min" in words(admin)
    assert page(row) in [link.get("href") for link in read(admin.get(JOBS)).named("a")]
    assert line(admin, "shop.receipt").last is None


def test_skipped_ticks_are_shown_with_their_reason(admin: Admin) -> None:
    JobStateFactory(job_name="shop.nightly", skips=4, last_skip_at=clock.now(jobs_alias()), last_skip_reason="overlap")

    assert re.search(
        r"skipped 4, last 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d \w+: an earlier one was still live", words(admin)
    )


def test_a_paused_job_says_so(admin: Admin) -> None:
    JobStateFactory(job_name="shop.count", paused=True)

    assert "shop.count paused" in words(admin)
    assert line(admin, "shop.nightly").is_paused is False


def test_run_now_triggers_a_cron_job_in_the_name_of_who_pressed(admin: Admin) -> None:
    response = run(admin, "shop.nightly")

    row = JobExecution.objects.get()
    assert (response.status_code, response.url) == (302, JOBS)
    assert (row.job_name, row.status, row.triggered_by_name) == ("shop.nightly", Status.PENDING, "mia")
    assert f'>shop.nightly was queued. <a href="{page(row)}">Show the execution</a><' in said(response)
    (entry,) = LogEntry.objects.all()
    assert (entry.object_id, entry.action_flag, entry.user) == (str(row.pk), ADDITION, admin.user)
    assert entry.get_change_message() == "Run now."


def test_run_now_of_a_paused_job_says_that_it_waits(admin: Admin, shop: SimpleNamespace) -> None:
    shop.nightly.pause()
    response = run(admin, "shop.nightly")
    assert "shop.nightly was queued; the job is paused and waits for a resume. <a" in said(response)


def test_run_now_pressed_twice_says_which_execution_already_lives(admin: Admin) -> None:
    run(admin, "shop.nightly")
    row = JobExecution.objects.get()

    shown = read(admin.client.post(f"{JOBS}shop.nightly/run/", follow=True))

    assert "was not triggered" in shown.words
    assert page(row) in [link.get("href") for link in shown.named("a")]
    assert JobExecution.objects.count() == LogEntry.objects.count() == 1


def test_run_now_pushes_a_job_that_can_do_without_parameters(admin: Admin) -> None:
    run(admin, "shop.count")

    row = JobExecution.objects.get()
    assert (row.job_name, row.payload, row.triggered_by_name) == ("shop.count", {"limit": 3}, "mia")


def test_a_job_with_parameters_has_no_button_and_refuses(admin: Admin) -> None:
    assert line(admin, "shop.receipt").has_button is False

    response = run(admin, "shop.receipt")

    assert "order_id" in said(response)
    assert not JobExecution.objects.exists()


def test_a_job_that_is_gone_is_a_message(admin: Admin) -> None:
    response = run(admin, "shop.gone")

    assert (response.status_code, response.url) == (302, JOBS)
    assert "No job is called 'shop.gone'" in said(response)


def test_run_now_is_for_those_who_may_look_and_trigger(as_user: Callable[..., Admin]) -> None:
    looking = as_user("view", "retry", "cancel", name="ann")

    assert "Run now" not in [button.get("aria-label", "")[:7] for button in read(looking.get(JOBS)).named("button")]
    assert run(looking, "shop.nightly").status_code == 403
    assert run(as_user("trigger", name="ben"), "shop.nightly").status_code == 403
    assert not JobExecution.objects.exists()

    both = as_user("view", "trigger")
    assert "Run shop.nightly now" in [button.get("aria-label") for button in read(both.get(JOBS)).named("button")]
    assert run(both, "shop.nightly").status_code == 302
    assert JobExecution.objects.get().triggered_by_name == "mia"


def test_looking_at_the_page_runs_nothing(admin: Admin, shop: SimpleNamespace) -> None:
    """A job can be called, and templates call what they can."""
    ran: list[int] = []

    @job(name="shop.alive")
    def alive() -> None:
        ran.append(1)

    assert "shop.alive" in words(admin)
    assert admin.get(f"{JOBS}shop.alive/run/").status_code == 405
    assert ran == []
    assert not JobExecution.objects.exists()


def test_names_that_nobody_registered_are_listed_with_their_rows(admin: Admin) -> None:
    for _ in range(2):
        JobExecutionFactory(job_name="shop.gone", parked=True, parked_reason=UNKNOWN)
    # Not a problem of names: one is paused, and of the other it is not known yet.
    JobExecutionFactory(job_name="shop.other", parked=True)
    JobExecutionFactory(job_name="shop.young")
    shown = read(admin.get(JOBS))

    assert "Unregistered names" in shown.words
    assert "shop.gone 2" in shown.words
    assert "shop.other" not in shown.words
    assert "shop.young" not in shown.words
    assert f"{LIST}?job_name=shop.gone&status=parked" in [link.get("href") for link in shown.named("a")]


def test_the_list_of_unregistered_names_has_an_end(admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "LISTED", 2)
    for name in ("a", "b", "c"):
        JobExecutionFactory(job_name=name, parked=True, parked_reason=UNKNOWN)

    response = admin.get(JOBS)

    assert [name for name, _count in response.context["overview"].nameless] == ["a", "b"]
    assert "There are more names." in read(response).words


MARKUP = """"'></pre></script><svg><b><img src=x onerror=1>"""


@pytest.mark.parametrize("attack", [MARKUP, mark_safe(MARKUP)], ids=["plain", "marked as safe"])
def test_no_markup_of_descriptions_names_or_people_is_let_through(as_user: Callable[..., Admin], attack: str) -> None:
    job(name="shop.hostile", description=attack)(lambda: None)
    JobExecutionFactory(job_name=attack, parked=True, parked_reason=UNKNOWN)
    JobStateFactory(
        job_name="shop.hostile",
        paused=True,
        paused_by_name=attack,
        skips=1,
        last_skip_at=clock.now(jobs_alias()),
        last_skip_reason=attack[:16],
    )

    shown = read(as_user("all", name=attack).client.post(f"{JOBS}shop.hostile/run/", follow=True))

    assert shown.text.count(attack) >= 2
    assert not shown.named("b")
    assert not [image for image in shown.named("img") if image.get("src") == "x"]
    assert not [tag for tag, attributes in shown.tags if any(name.startswith("on") for name in attributes)]
    assert not [tag for tag, attributes in shown.tags if "style" in attributes or tag == "style"]
    assert all(script.get("src") for script in shown.named("script"))


def test_without_jobs_the_page_says_how_to_make_one(admin: Admin) -> None:
    with registry.isolated(empty=True):
        assert "No job is registered. Decorate a function with @job" in words(admin)


def test_there_are_no_pages_of_single_job_states(admin: Admin) -> None:
    JobState.objects.create(job_name="shop.count")

    for rest in ("add/", "shop.count/change/", "shop.count/delete/", "shop.count/history/"):
        assert admin.get(f"{JOBS}{rest}").status_code == 404


@pytest.mark.django_db(databases=["default", "other"])
def test_the_page_follows_the_router(admin: Admin, settings: Any) -> None:
    settings.DATABASE_ROUTERS = [Elsewhere()]
    row = JobExecutionFactory(job_name="shop.count", failed=True)
    JobStateFactory(job_name="shop.count", paused=True)
    assert row._state.db == "other"

    assert figures(admin, "shop.count") == {"error": "1"}
    assert line(admin, "shop.count").last == row
    assert line(admin, "shop.count").is_paused
    run(admin, "shop.nightly")
    assert JobExecution.objects.using("other").filter(job_name="shop.nightly").count() == 1


def test_the_page_stands_below_the_app_as_its_neighbours_do(admin: Admin) -> None:
    jobs, purge = read(admin.get(JOBS)), read(admin.get(f"{JOBS}purge/"))

    assert "Home Jobs Jobs" in jobs.words
    assert {"href": "/admin/django_jobs/"} in jobs.named("a")
    assert "Home Jobs Jobs Purge executions of unknown jobs" in purge.words
    assert {"href": JOBS} in purge.named("a")


def test_a_plus_sign_is_explained_where_one_is_shown(admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "A plus sign" not in read(admin.get(JOBS)).words

    monkeypatch.setattr(counting, "COUNTED", 3)
    for _ in range(4):
        JobExecutionFactory(pending=True)

    assert "A plus sign says that there may be more" in read(admin.get(JOBS)).words
