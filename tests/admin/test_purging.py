"""The page that purges the executions of unknown jobs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.admin.models import DELETION, LogEntry

from django_jobs.admin import purging
from django_jobs.models import JobExecution
from django_jobs.runtime import purge
from tests.admin.support import Admin, read, said
from tests.factories import JobExecutionFactory, WorkerFactory

# Rendering pages takes its time; the loop of work has the list and its actions.
pytestmark = [pytest.mark.django_db, pytest.mark.medium]

JOBS = "/admin/django_jobs/jobstate/"
PURGE = f"{JOBS}purge/"


def test_the_page_lists_what_is_left_and_deletes_what_is_chosen(admin: Admin) -> None:
    JobExecutionFactory(job_name="old.gone", ok=True)
    JobExecutionFactory(job_name="old.gone", parked=True)
    JobExecutionFactory(job_name="old.gone")
    JobExecutionFactory(job_name="old.kept", failed=True)
    assert PURGE in [link.get("href") for link in read(admin.get(JOBS)).named("a")]
    assert "old.gone 1 1 1" in read(admin.get(PURGE)).words

    response = admin.client.post(PURGE, {"job": ["old.gone"]})

    assert (response.url, said(response)) == (PURGE, "2 deleted.")
    assert sorted(JobExecution.objects.values_list("job_name", "status")) == [
        ("old.gone", "pending"),
        ("old.kept", "error"),
    ]
    entry = LogEntry.objects.get()
    assert (entry.action_flag, entry.object_id, entry.get_change_message()) == (DELETION, "old.gone", "Purged.")


def test_to_choose_nothing_is_answered_with_what_to_do(admin: Admin) -> None:
    assert said(admin.client.post(PURGE)) == "Choose at least one name."


def test_a_name_that_is_known_by_now_is_left_alone(admin: Admin) -> None:
    JobExecutionFactory(job_name="new.one", ok=True)
    WorkerFactory(names=["new.one"])

    response = admin.client.post(PURGE, {"job": ["new.one", "acc.mark"]})

    assert said(response).startswith("0 deleted, 2 names left alone")
    assert JobExecution.objects.count() == 1
    assert not LogEntry.objects.exists()


def test_what_one_request_purges_has_an_end_and_says_so(admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(purging, "BUDGET", -1.0)
    monkeypatch.setattr(purge, "BATCH", 1)
    for name in ("old.a", "old.a", "old.b"):
        JobExecutionFactory(job_name=name, ok=True)

    response = admin.client.post(PURGE, {"job": ["old.a", "old.b"]})

    assert said(response) == "1 deleted. There are more: repeat the action for the rest."
    assert JobExecution.objects.count() == 2


@pytest.mark.medium
@pytest.mark.parametrize("permissions", [("view", "trigger", "retry", "cancel", "delete", "pause"), ("purge",)])
def test_to_purge_is_for_those_who_may_look_and_purge(as_user: Callable[..., Admin], permissions: Any) -> None:
    JobExecutionFactory(job_name="old.gone", ok=True)
    person = as_user(*permissions)

    assert person.get(PURGE).status_code == 403
    assert person.client.post(PURGE, {"job": ["old.gone"]}).status_code == 403
    assert JobExecution.objects.count() == 1
    if "view" in permissions:
        assert PURGE not in person.get(JOBS).content.decode()


def test_no_markup_of_a_name_is_let_through(admin: Admin) -> None:
    JobExecutionFactory(job_name="\"'><blink onload=1>", ok=True)
    shown = read(admin.get(PURGE))
    assert "blink" not in [tag for tag, _attributes in shown.tags]
    assert "<blink onload=1>" in shown.text
