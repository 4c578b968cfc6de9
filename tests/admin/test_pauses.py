"""Pause and resume from the page of jobs: by a button, for selected jobs, and for queues."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.contrib.admin.models import CHANGE, LogEntry

from django_jobs import pauses, registry
from django_jobs.definition import job
from django_jobs.models import JobState, QueueState
from django_jobs.reading import figures
from tests.admin.support import LIST, Admin, read, said
from tests.factories import JobExecutionFactory, JobStateFactory, QueueStateFactory, WorkerFactory

# Rendering pages takes its time; the loop of work has the list and its actions.
pytestmark = [pytest.mark.django_db, pytest.mark.medium]

JOBS = "/admin/django_jobs/jobstate/"


@pytest.fixture(autouse=True)
def shop() -> Iterator[None]:
    """Two jobs, which are all there are; one has a limit and a queue of its own."""
    WorkerFactory()
    with registry.isolated(empty=True):
        job(name="shop.count")(lambda: None)
        job(name="shop.mail", queue="mail", concurrency=2)(lambda: None)
        yield


def press(person: Admin, verb: str, *names: str, query: str = "", follow: bool = False) -> Any:
    return person.client.post(f"{JOBS}selected/{query}", {"verb": verb, "job": names}, follow=follow)


def press_queue(person: Admin, verb: str, queue: str, **options: Any) -> Any:
    return person.client.post(f"{JOBS}queue/{queue}/", {"verb": verb}, **options)


def buttons(person: Admin) -> list[str | None]:
    return [button.get("aria-label") for button in read(person.get(JOBS)).named("button")]


def history() -> list[tuple[str, str, str]]:
    entries = LogEntry.objects.order_by("pk")
    assert all(entry.action_flag == CHANGE for entry in entries)
    return [(entry.content_type.model, entry.object_id, entry.get_change_message()) for entry in entries]


def test_a_button_pauses_a_job_in_the_name_of_who_pressed(admin: Admin) -> None:
    response = press(admin, "pause", "shop.count")

    assert (response.status_code, response.url) == (302, JOBS)
    assert said(response) == "1 paused: shop.count."
    state = JobState.objects.get()
    assert (state.job_name, state.paused_by, state.paused_by_name) == ("shop.count", str(admin.user.pk), "mia")
    assert history() == [("jobstate", "shop.count", "Paused.")]


def test_a_paused_job_says_since_when_and_by_whom_and_can_be_resumed(admin: Admin) -> None:
    press(admin, "pause", "shop.count")

    shown = read(admin.get(JOBS))
    assert re.search(r"shop\.count paused since 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d \w+ by mia", shown.words)
    assert "Resume shop.count" in buttons(admin)
    assert "Pause shop.count" not in buttons(admin)

    assert said(press(admin, "resume", "shop.count")) == "1 resumed: shop.count."
    assert pauses.paused("default").jobs == frozenset()
    assert "Pause shop.count" in buttons(admin)
    assert [message for *_, message in history()] == ["Paused.", "Resumed."]


def test_selected_jobs_are_paused_together_with_counts_in_the_message(admin: Admin) -> None:
    JobStateFactory(job_name="shop.mail", paused=True)

    response = press(admin, "pause", "shop.count", "shop.mail", "shop.count")

    assert said(response) == "1 paused: shop.count; 1 was already paused: shop.mail."
    assert pauses.paused("default").jobs == {"shop.count", "shop.mail"}
    assert [name for _, name, _ in history()] == ["shop.count"]


def test_the_boxes_of_the_jobs_belong_to_the_form_of_the_action(admin: Admin) -> None:
    shown = read(admin.get(JOBS))

    (form,) = [form for form in shown.named("form") if form.get("id") == "dj-selected"]
    assert form["action"] == f"{JOBS}selected/"
    boxes = [box for box in shown.named("input") if box.get("type") == "checkbox" and box.get("name") == "job"]
    assert [(box["value"], box["form"], box["aria-label"]) for box in boxes] == [
        ("shop.count", "dj-selected", "Select shop.count"),
        ("shop.mail", "dj-selected", "Select shop.mail"),
    ]


def test_a_message_names_no_more_than_a_few(admin: Admin) -> None:
    names = [f"shop.more{number}" for number in range(7)]
    for name in names:
        job(name=name)(lambda: None)

    assert said(press(admin, "pause", *names)) == f"7 paused: {', '.join(names[:5])}, …."


def test_nothing_selected_is_a_message(admin: Admin) -> None:
    assert said(press(admin, "pause")) == "Choose at least one job."


def test_a_job_that_is_gone_is_a_message_and_the_others_are_done(admin: Admin) -> None:
    response = press(admin, "pause", "shop.gone", "shop.count")

    assert "No job is called 'shop.gone'" in said(response)
    assert "1 paused: shop.count." in said(response)


def test_a_job_that_was_renamed_while_paused_is_shown_and_resumed(admin: Admin) -> None:
    job(name="shop.tally", aliases=["shop.sum"])(lambda: None)
    JobStateFactory(job_name="shop.sum", paused=True)

    assert "shop.tally paused since" in read(admin.get(JOBS)).words
    press(admin, "resume", "shop.tally")
    assert pauses.paused("default").jobs == frozenset()


def test_queues_are_listed_with_what_waits_in_them(admin: Admin, settings: Any) -> None:
    settings.DJANGO_JOBS = {**settings.DJANGO_JOBS, "QUEUES": ["default", "mail", "reports"]}
    for _ in range(3):
        JobExecutionFactory(job_name="shop.mail", queue="mail")
    JobExecutionFactory(job_name="shop.count", queue="odd")
    JobExecutionFactory(job_name="shop.count", queue="mail", ok=True)
    QueueStateFactory(queue="held", paused=True)
    QueueStateFactory(queue="never")

    response = admin.get(JOBS)

    lines = [(line.name, str(line.pending), line.is_paused) for line in response.context["overview"].queues]
    assert lines == [
        ("default", "0", False),
        ("held", "0", True),
        ("mail", "3", False),
        ("odd", "1", False),
        ("reports", "0", False),
    ]
    assert f"{LIST}?queue=mail&status=pending" in [link.get("href") for link in read(response).named("a")]
    assert "held paused since" in read(response).words


def test_what_waits_in_queues_is_counted_up_to_a_bound(admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "COUNTED", 3)
    for _ in range(4):
        JobExecutionFactory(job_name="shop.mail", queue="mail")

    lines = {line.name: str(line.pending) for line in admin.get(JOBS).context["overview"].queues}

    assert lines == {"default": "0+", "mail": "3+"}


def test_a_queue_is_paused_and_resumed_by_its_button(admin: Admin) -> None:
    assert "Pause the queue mail" in buttons(admin)

    assert said(press_queue(admin, "pause", "mail")) == "1 paused: queue mail."
    assert QueueState.objects.get().paused_by_name == "mia"
    assert "Resume the queue mail" in buttons(admin)
    assert "1 was already paused: queue mail." in read(press_queue(admin, "pause", "mail", follow=True)).words
    assert said(press_queue(admin, "resume", "mail")) == "1 resumed: queue mail."
    assert pauses.paused("default").queues == frozenset()
    assert history() == [("queuestate", "mail", "Paused."), ("queuestate", "mail", "Resumed.")]


def test_what_no_queue_can_be_called_is_a_message(admin: Admin) -> None:
    assert "expected at most 100 ASCII letters" in said(press_queue(admin, "pause", "a b"))
    assert not QueueState.objects.exists()


@pytest.mark.parametrize("permissions", [("view", "trigger", "retry", "cancel", "delete", "purge"), ("pause",)])
def test_to_pause_is_for_those_who_may_look_and_pause(as_user: Callable[..., Admin], permissions: Any) -> None:
    person = as_user(*permissions)

    assert press(person, "pause", "shop.count").status_code == 403
    assert press_queue(person, "pause", "mail").status_code == 403
    assert not JobState.objects.exists()
    assert not QueueState.objects.exists()
    if "view" in permissions:
        assert not [label for label in buttons(person) if label and label.startswith("Pause")]
        assert not [box for box in read(person.get(JOBS)).named("input") if box.get("name") == "job"]


def test_who_may_pause_needs_no_other_permission_than_to_look(as_user: Callable[..., Admin]) -> None:
    person = as_user("view", "pause")

    assert "Pause shop.count" in buttons(person)
    assert press(person, "pause", "shop.count").status_code == 302
    assert JobState.objects.get().paused_by_name == "mia"


def test_only_a_button_pauses(admin: Admin) -> None:
    assert admin.get(f"{JOBS}selected/").status_code == 405
    assert admin.get(f"{JOBS}queue/mail/").status_code == 405
    assert press(admin, "stop", "shop.count").status_code == 400
    assert press_queue(admin, "stop", "mail").status_code == 400
    assert not JobState.objects.exists()


def test_a_button_leads_back_to_the_page_of_the_list_it_was_on(admin: Admin) -> None:
    assert press(admin, "pause", "shop.count", query="?p=2").url == f"{JOBS}?p=2"
    assert press(admin, "pause", "shop.count", query="?p=x").url == JOBS


def test_the_limit_of_a_job_is_shown(admin: Admin) -> None:
    assert "0 retries 2 at once" in read(admin.get(JOBS)).words


def test_no_style_and_no_script_is_inline(admin: Admin) -> None:
    press(admin, "pause", "shop.count")
    press_queue(admin, "pause", "mail")

    shown = read(admin.get(JOBS))

    assert not [tag for tag, attributes in shown.tags if any(name.startswith("on") for name in attributes)]
    assert not [tag for tag, attributes in shown.tags if "style" in attributes or tag == "style"]
    assert all(script.get("src") for script in shown.named("script"))
