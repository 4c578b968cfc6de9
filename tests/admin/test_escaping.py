"""Whatever a job, its payload or its error says stays text: no tag, no attribute, no script of it reaches the page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.utils.safestring import mark_safe

from django_jobs import registry
from django_jobs.definition import job
from tests.admin.support import LIST, WORKERS, Admin, Page, page, read
from tests.factories import JobExecutionFactory, WorkerFactory

# Rendering pages takes its time; the loop of work has the list and its actions.
pytestmark = [pytest.mark.django_db, pytest.mark.medium]

MARKUP = """"'></pre></script><svg><b><img src=x onerror=1>"""
ATTACKS = [MARKUP, mark_safe(MARKUP)]
STATIC = Path(__file__).parents[2] / "django_jobs" / "static"
TEMPLATES = Path(__file__).parents[2] / "django_jobs" / "templates"


@pytest.fixture(params=ATTACKS, ids=["plain", "marked as safe"])
def attack(request: Any) -> str:
    return request.param


@pytest.fixture
def hostile(attack: str) -> Iterator[Any]:
    worker = WorkerFactory(host=attack, version=attack, roles=[attack], queues=[attack], names=[attack])
    entry = {
        "attempt": attack, "exception": attack, "message": attack, "traceback": attack, "worker": attack,
        "started_at": attack, "failed_at": attack,
    }  # fmt: skip
    with registry.isolated():

        @job(name="shop.hostile", description=attack)
        def hostile() -> None:
            pass

        yield JobExecutionFactory(
            failed=True,
            job_name=hostile.name,
            worker=worker,
            payload={attack: [attack]},
            result={attack: attack},
            progress={"done": attack, "total": attack, "note": attack},
            key=attack,
            organization_id=attack,
            queue=attack,
            error=attack,
            errors=[entry, attack],
            logs=[{"time": attack, "level": attack, "logger": attack, "message": attack}, attack],
            triggered_by_name=attack,
            cancelled_by_name=attack,
            retried_by_name=attack,
        )


def assert_harmless(shown: Page, attack: str) -> None:
    for tag, attributes in shown.tags:
        assert tag != "b"
        # The admin's own icons have classes.
        assert tag != "svg" or attributes.get("class")
        for name, value in attributes.items():
            assert not name.startswith("on")
            assert name != "style"
            assert not str(value).lower().startswith("javascript:")
        if tag == "script":
            assert attributes.get("src"), "an inline script"
        if tag == "img":
            assert attributes["src"] != "x"
    assert not shown.named("style")


@pytest.mark.parametrize("where", ["list", "filtered", "searched", "detail", "history", "delete", "delete_many"])
def test_no_page_of_executions_lets_markup_through(admin: Admin, hostile: Any, attack: str, where: str) -> None:
    """Arguments, errors or logs are printed unescaped.

    Sources: rq/django-rq#479, Parallels/rq-dashboard#526, Bogdanp/django_dramatiq PR#215.
    """
    admin.press(hostile, "copy")
    pages = {
        "list": lambda: admin.list(),
        "filtered": lambda: admin.list(job_name=attack, queue=attack, organization_id=attack, status=attack),
        "searched": lambda: admin.list(q=attack),
        "detail": lambda: admin.detail(hostile),
        "history": lambda: admin.get(page(hostile, "history")),
        "delete": lambda: admin.get(page(hostile, "delete")),
        "delete_many": lambda: admin.act("delete_selected", hostile),
    }
    shown = read(pages[where]())

    assert_harmless(shown, attack)
    if where in {"filtered", "searched", "detail"}:
        assert attack in "".join([shown.text, *(str(v) for _t, a in shown.tags for v in a.values())])


@pytest.mark.medium
def test_a_job_name_with_markup_stays_text(admin: Admin, attack: str) -> None:
    row = JobExecutionFactory(failed=True, job_name=attack)

    shown = [admin.list(), admin.detail(row), admin.client.post(page(row, "retry"), follow=True),
             admin.act("retry_selected", row, follow=True), admin.act("delete_selected", row)]  # fmt: skip
    for response in shown:
        assert attack in read(response).text
        assert_harmless(read(response), attack)


def test_a_user_name_with_markup_stays_text(as_user: Any, attack: str) -> None:
    person = as_user("all", name=attack)
    row = JobExecutionFactory(failed=True)
    person.press(row, "retry")
    person.press(row, "cancel")

    for url in (LIST, page(row), page(row, "history")):
        shown = read(person.get(url))
        assert attack in shown.text
        assert_harmless(shown, attack)


def test_no_page_of_workers_lets_markup_through(admin: Admin, hostile: Any, attack: str) -> None:
    for url in (WORKERS, f"{WORKERS}{hostile.worker_id}/change/"):
        shown = read(admin.get(url))
        assert attack in shown.text
        assert_harmless(shown, attack)


def test_pages_and_styles_are_files_that_a_strict_policy_allows() -> None:
    sources = [*STATIC.rglob("*.*"), *TEMPLATES.rglob("*.html")]

    assert len(sources) > 5
    for source in sources:
        text = source.read_text()
        for forbidden in (
            " style=",
            "<style",
            "<script",
            "javascript:",
            " onclick",
            "|safe",
            "autoescape",
            "url(",
            "@import",
        ):
            assert forbidden not in text, f"{source.name} has {forbidden}"
