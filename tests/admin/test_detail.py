from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from django_jobs import registry
from django_jobs.definition import job
from django_jobs.models import JobExecution
from django_jobs.options import Keep
from django_jobs.reading import detail, words
from tests.admin.support import Admin, ids_shown, page, read
from tests.factories import JobExecutionFactory, WorkerFactory

# Rendering pages takes its time; the loop of work has the list and its actions.
pytestmark = [pytest.mark.django_db, pytest.mark.medium]


@pytest.fixture
def secret() -> Iterator[str]:
    """The name of a sensitive job."""
    with registry.isolated():

        @job(name="shop.charge", sensitive=True, keep=Keep(ok=3, error=None))
        def charge(card: str) -> None:
            pass

        yield "shop.charge"


def test_the_page_shows_everything_about_an_execution(admin: Admin) -> None:
    worker = WorkerFactory(host="web-7", pid=4711)
    original = JobExecutionFactory(ok=True)
    row = JobExecutionFactory(
        failed=True,
        worker=worker,
        payload={"order_id": 42},
        result={"sent": [1, 2]},
        progress={"done": 40, "total": 120, "note": "halfway"},
        logs=[{"time": "2026-03-29T00:59:58+00:00", "level": "WARNING", "logger": "shop", "message": "slow"}],
        key="order-42",
        organization_id="acme",
        triggered_by_name="ann",
        cancelled_by_name="bob",
        retried_by_name="cat",
        retried_at=original.updated_at,
        copied_from=original.pk,
    )
    shown = read(admin.detail(row))

    for text in (
        '"order_id": 42', '"sent": [', "40 / 120 halfway", "WARNING", "slow", "order-42", "acme", "ann", "bob", "cat",
        "web-7 pid 4711", str(row.pk), "Attempt 1: builtins.ValueError", "Traceback (most recent call last):",
        "Do nothing but tell.",
    ):  # fmt: skip
        assert text in shown.words
    assert {"href": page(original)} in shown.named("a")
    assert {"value": "40", "max": "120"} in shown.named("progress")


def test_errors_are_told_newest_first_with_the_worker_they_happened_on(admin: Admin) -> None:
    errors = [
        {"attempt": n, "exception": "E", "message": f"fault {n}", "worker": w, "failed_at": "2026-01-02T03:04:05+00:00"}
        for n, w in ((1, "web-7 pid 4711"), (2, "somewhere else"), (3, None))
    ]
    words = read(admin.detail(JobExecutionFactory(failed=True, errors=errors))).words

    assert words.index("fault 3") < words.index("fault 2") < words.index("fault 1")
    assert "on web-7 pid 4711" in words
    assert "on somewhere else" in words
    assert "2026-01-02 03:04:05 UTC" in words


def test_history_and_logs_of_any_shape_are_shown(admin: Admin) -> None:
    row = JobExecutionFactory(failed=True, errors=["plain", None, 3, {}], logs=["line", {"level": 3}, {}], progress=[1])

    words = read(admin.detail(row)).words

    assert "plain" in words
    assert "line" in words


def test_a_page_without_a_mistake_asks_for_no_correction(admin: Admin, failed: Any) -> None:
    response = admin.detail(failed)

    assert "Please correct" not in read(response).words
    assert "<title>Error:" not in "".join(response.content.decode().split())


def test_a_sensitive_job_hides_payload_result_and_logs(admin: Admin, secret: str) -> None:
    row = JobExecutionFactory(
        ok=True, job_name=secret, payload={"card": "4711"}, result="4712", logs=[{"message": "4713", "level": "INFO"}]
    )
    words = read(admin.detail(row)).words

    assert words.count("Hidden: the job is sensitive.") == 3
    assert not [number for number in ("4711", "4712", "4713") if number in words.replace(str(row.pk), "")]


def test_the_page_says_how_many_rows_of_the_job_are_kept(admin: Admin, secret: str, settings: Any) -> None:
    settings.DJANGO_JOBS = {}
    words = read(admin.detail(JobExecutionFactory(job_name=secret))).words

    assert "Kept of this job: the newest 3 ok, all error, 1000 cancelled." in words


def test_the_worker_is_named_by_its_id_once_its_row_is_gone(admin: Admin) -> None:
    row = JobExecutionFactory(ok=True)
    from django_jobs.models import Worker

    Worker.objects.all().delete()

    assert str(row.worker_id) in read(admin.detail(row)).words


@pytest.mark.parametrize(
    ("given", "offered"),
    [
        ({"pending": True}, ["cancel"]),
        ({"scheduled": True}, ["cancel", "start"]),
        ({"parked": True}, ["cancel"]),
        ({"running": True}, ["cancel"]),
        ({"ok": True}, ["copy"]),
        ({"failed": True}, ["retry", "copy"]),
        ({"cancelled": True}, ["retry", "copy"]),
    ],
)
def test_buttons_follow_the_state(admin: Admin, given: dict[str, bool], offered: list[str]) -> None:
    row = JobExecutionFactory(**given)

    forms = [
        form for form in read(admin.detail(row)).named("form") if str(form.get("action")).startswith(page(row)[:-7])
    ]

    assert [form["action"] for form in forms] == [page(row, verb) for verb in offered]
    assert {form["method"] for form in forms} == {"post"}


@pytest.mark.parametrize(
    ("permission", "offered"), [("cancel", []), ("retry", ["retry"]), ("trigger", ["copy"]), ("delete", [])]
)
def test_buttons_follow_the_permissions(as_user: Any, failed: Any, permission: str, offered: list[str]) -> None:
    buttons = as_user("view", permission).detail(failed).context["buttons"]

    assert [button["verb"] for button in buttons] == offered


def test_the_delete_link_is_offered_for_finished_rows_only(as_user: Any, failed: Any) -> None:
    person = as_user("view", "delete")

    assert "deletelink" in person.detail(failed).content.decode()
    assert "deletelink" not in person.detail(JobExecutionFactory()).content.decode()


@pytest.mark.medium
def test_an_unknown_job_name_breaks_no_page_and_imports_nothing(admin: Admin) -> None:
    """The list answers 500 once a row names a function that is gone. Source: RealOrangeOne/django-tasks#126."""
    names = ["", "shop.gone", "é.ü", "no.such.module.f", "tests.admin.explosive.f", "a/b?c=1"]
    rows = [JobExecutionFactory(failed=True, job_name=name) for name in names]

    assert read(admin.list()).words.count("not registered here") == len(rows)
    for row in rows:
        assert ids_shown(admin.list(job_name=row.job_name)) == [row.pk]
        assert admin.list(q=row.job_name).status_code == 200
        assert "not registered here" in read(admin.detail(row)).words
        assert admin.press(row, "retry").status_code == 302
    assert admin.act("retry_selected", *rows).status_code == 302
    assert set(JobExecution.objects.values_list("status", flat=True)) == {"error"}


def test_an_id_that_is_none_leads_away_with_a_message(admin: Admin) -> None:
    assert admin.get("/admin/django_jobs/jobexecution/nonsense/change/").status_code == 302


def test_times_are_local_with_the_name_of_their_zone(settings: Any) -> None:
    settings.USE_TZ, settings.TIME_ZONE = True, "Europe/Paris"

    first, second = datetime(2026, 10, 25, 0, 30, tzinfo=UTC), datetime(2026, 10, 25, 1, 30, tzinfo=UTC)

    assert words.moment(first) == "2026-10-25 02:30:00 CEST"
    assert words.moment(second) == "2026-10-25 02:30:00 CET"


def test_without_time_zones_instants_are_shown_as_utc(settings: Any) -> None:
    settings.USE_TZ, settings.TIME_ZONE = False, "Europe/Paris"

    assert words.moment(datetime(2026, 10, 25, 0, 30, tzinfo=UTC)) == "2026-10-25 00:30:00 UTC"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.00 s"), (0.125, "0.12 s"), (9.96, "10.0 s"), (59.6, "1 min"), (185, "3 min 5 s"), (7260, "2 h 1 min"),
     (93_600 * 5, "5 d 10 h"), (-3, "0.00 s"), (3605, "1 h")],
)  # fmt: skip
def test_durations_are_short(seconds: float, text: str) -> None:
    from datetime import timedelta

    assert words.short_duration(timedelta(seconds=seconds)) == text


def test_an_instant_that_is_none_is_left_as_it_is() -> None:
    assert words.parsed_moment("yesterday") == "yesterday"
    assert words.parsed_moment("2026-01-01") == "2026-01-01"


def test_progress_without_a_total_has_no_bar() -> None:
    assert detail.progress({"done": 3, "total": None, "note": ""}) == {
        "text": "3", "note": "", "has_bar": False, "value": "3", "max": "None",
    }  # fmt: skip
    assert detail.progress(None) is None


def test_what_an_execution_does_not_have_is_left_out(admin: Admin) -> None:
    words = read(admin.detail(JobExecutionFactory(pending=True))).words

    assert "Created:" in words
    assert "Pushed by:" in words
    left_out = (
        "Last error",
        "Started:",
        "Completed:",
        "Cancel requested",
        "Cron tick",
        "Retried",
        "Worker:",
        "Copy of",
    )
    assert not [label for label in left_out if label in words]


def test_what_an_execution_has_is_shown(admin: Admin, failed: Any) -> None:
    words = read(admin.detail(failed)).words

    assert not [
        label for label in ("Last error:", "Started:", "Completed:", "Worker:", "Duration:") if label not in words
    ]
