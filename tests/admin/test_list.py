from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
from django.db import connections
from django.test.utils import CaptureQueriesContext

from django_jobs import registry
from django_jobs.admin import base
from django_jobs.definition import job
from django_jobs.fields import uuid7
from django_jobs.models import jobs_alias
from django_jobs.reading import listing
from tests.admin.support import Admin, ids_shown, page, read
from tests.factories import JobExecutionFactory, QueueStateFactory

pytestmark = pytest.mark.django_db


def queries(admin: Admin, **query: str) -> list[str]:
    with CaptureQueriesContext(connections[jobs_alias()]) as captured:
        assert admin.list(**query).status_code == 200
    return [each["sql"] for each in captured.captured_queries]


def test_the_newest_execution_comes_first(admin: Admin) -> None:
    rows = [JobExecutionFactory(ok=True), JobExecutionFactory(pending=True), JobExecutionFactory(failed=True)]

    assert ids_shown(admin.list()) == [row.pk for row in reversed(rows)]


def test_no_query_parameter_changes_the_order(admin: Admin) -> None:
    rows = [JobExecutionFactory() for _ in range(3)]

    assert ids_shown(admin.list(o="1.-2")) == [row.pk for row in reversed(rows)]


def test_the_list_reads_no_column_that_can_be_large(admin: Admin) -> None:
    JobExecutionFactory(failed=True, payload={"x": "y"}, logs=[{"message": "m"}], result=1)

    statements = " ".join(queries(admin))

    for column in ("payload", "logs", "errors", "result", "progress", "context"):
        assert f'"{column}"' not in statements
        assert f"`{column}`" not in statements


def test_the_list_costs_less_than_twenty_queries_however_many_rows_it_shows(admin: Admin) -> None:
    queries(admin)
    few = len(queries(admin))
    for _ in range(30):
        JobExecutionFactory(running=True, key=str(uuid7()))

    assert len(queries(admin)) == few < 20


def test_no_query_counts_or_lists_distinct_values_of_the_whole_table(admin: Admin) -> None:
    """With millions of rows the list takes seconds.

    Sources: HearthSim/HSReplay.net#86, PostHog/posthog PR#20862, dimagi/commcare-hq PR#19064.
    """
    JobExecutionFactory()

    statements = [each for each in queries(admin) if "jobexecution" in each]

    assert statements
    assert not [each for each in statements if "DISTINCT" in each]
    assert all("LIMIT" in each for each in statements if "COUNT(" in each)


def test_counting_stops_at_a_bound_and_the_page_says_so(admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "COUNTED", 3)
    for _ in range(5):
        JobExecutionFactory()

    assert "3+ executions (filter the list to find older ones)" in read(admin.list()).words


def test_up_to_the_bound_the_count_is_exact(admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "COUNTED", 3)
    for _ in range(3):
        JobExecutionFactory()

    assert "3 executions" in read(admin.list()).words
    assert "3+" not in read(admin.list()).words


def test_a_page_number_out_of_range_leads_back_to_the_list(admin: Admin) -> None:
    assert admin.list(p="99").status_code == 200


@pytest.mark.parametrize(
    ("given", "badge"),
    [
        ({"pending": True}, "pending"),
        ({"scheduled": True}, "scheduled in 1 min"),
        ({"parked": True}, "parked paused"),
        ({"status": "scheduled", "parked_reason": "unknown"}, "parked no worker knows the job"),
        ({"status": "scheduled", "parked_reason": "other"}, "parked other"),
        ({"running": True}, "running"),
        ({"ok": True}, "ok"),
        ({"failed": True}, "error"),
        ({"cancelled": True}, "cancelled"),
    ],
)
def test_the_badge_tells_where_a_row_stands(admin: Admin, given: dict[str, Any], badge: str) -> None:
    row = JobExecutionFactory(**given)
    shown = read(admin.list())

    # By now some of the minute has passed.
    assert f"{badge} acc.mark" in re.sub(r"in \d+ s", "in 1 min", shown.words)
    kind = "parked" if row.parked_reason else row.status
    assert {"class": f"dj-badge dj-{kind}"} in shown.named("span")


def test_the_list_says_why_a_row_failed_unless_its_job_is_sensitive(admin: Admin) -> None:
    with registry.isolated():
        job(name="acc.secret", sensitive=True)(lambda: None)
        JobExecutionFactory(failed=True, error=f"ValueError: <b>no\nprinter {'x' * 200}")
        JobExecutionFactory(failed=True, error="ValueError: 4111", job_name="acc.secret")

        words = read(admin.list()).words

    assert "ValueError: <b>no printer xxx" in words
    assert "x" * 100 not in words
    assert "4111" not in words


def test_a_running_row_with_a_mark_is_shown_as_cancelling(admin: Admin) -> None:
    row = JobExecutionFactory(running=True)
    type(row).objects.update(cancel_requested_at=row.updated_at)

    assert {"class": "dj-badge dj-cancelling"} in read(admin.list()).named("span")


def test_the_columns_are_words_a_person_knows(admin: Admin) -> None:
    row = JobExecutionFactory(
        ok=True, priority=50, key="order-42", attempt=2, max_attempts=6, queue="mail", triggered_by_name="ann"
    )
    type(row).objects.update(
        started_at=row.completed_at - timedelta(minutes=2, seconds=5), created_at=row.updated_at - timedelta(hours=3)
    )
    words = read(admin.list()).words

    for word in ("acc.mark", "2 / 6", "3 h", "2 min 5 s", "mail", "high", "order-42", "ann"):
        assert word in words


def test_a_queue_and_a_priority_as_usual_go_without_saying(admin: Admin) -> None:
    JobExecutionFactory(job_name="acc.slow")
    JobExecutionFactory(queue="mail", priority=-50, key="order-7")
    text = admin.list().rendered_content

    notes = re.findall(r'<span class="dj-note">(.*?)</span>', text)
    assert notes == ["queue mail", "low priority", "key order-7"]


def test_a_tick_was_pushed_by_the_clock(admin: Admin) -> None:
    row = JobExecutionFactory(triggered_by_name="system")
    assert "system" in read(admin.list()).words
    type(row).objects.update(tick_at=row.created_at)

    words = read(admin.list()).words
    assert "cron" in words
    assert "system" not in words


def test_a_priority_without_a_word_is_a_number(admin: Admin) -> None:
    JobExecutionFactory(priority=-7)

    assert "-7" in read(admin.list()).words


def test_a_status_filter_shows_only_that_status(admin: Admin) -> None:
    JobExecutionFactory(ok=True)
    row = JobExecutionFactory(failed=True)

    assert ids_shown(admin.list(status="error")) == [row.pk]


def test_parked_rows_can_be_asked_for(admin: Admin) -> None:
    JobExecutionFactory(scheduled=True)
    row = JobExecutionFactory(parked=True)

    assert ids_shown(admin.list(status="parked")) == [row.pk]


@pytest.mark.medium
def test_filters_without_an_index_look_at_the_newest_rows_and_say_so(
    admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, *_rest = [JobExecutionFactory(queue="mail", failed=True), *(JobExecutionFactory() for _ in range(3))]
    row = JobExecutionFactory(queue="mail")
    monkeypatch.setattr(listing, "WINDOW", 3)

    assert ids_shown(admin.list(queue="mail")) == [row.pk]
    assert "from the newest" in read(admin.list(queue="mail")).words
    assert ids_shown(admin.list(queue="mail", status="error")) == [old.pk]
    assert "found among" not in read(admin.list(queue="mail", status="error")).words


@pytest.mark.medium
@pytest.mark.parametrize("name", ["status", "job_name", "queue", "organization_id"])
def test_a_filter_takes_any_value(admin: Admin, name: str) -> None:
    JobExecutionFactory()

    for value in ("nobody", "", "a\0b", "é", "<b>", "x" * 3000):
        assert ids_shown(admin.list(**{name: value})) == []


def test_the_job_filter_offers_registered_names_and_accepts_others(admin: Admin) -> None:
    row = JobExecutionFactory(job_name="shop.gone")
    JobExecutionFactory()

    assert "acc.slow" in read(admin.list()).words
    assert ids_shown(admin.list(job_name="shop.gone")) == [row.pk]


def test_the_queue_filter_offers_the_queues_of_jobs_and_settings(admin: Admin, settings: Any) -> None:
    settings.DJANGO_JOBS = {"QUEUES": ["reports"]}
    with registry.isolated():

        @job(name="shop.mail", queue="mail")
        def mail() -> None:
            pass

        words = read(admin.list()).words
        row = JobExecutionFactory(queue="mail")
        JobExecutionFactory()

        assert "By queue All default mail reports" in words
        assert ids_shown(admin.list(queue="mail")) == [row.pk]


def test_organizations_are_filtered_by_the_address_only(admin: Admin) -> None:
    row = JobExecutionFactory(organization_id="acme")
    JobExecutionFactory(organization_id="other")

    assert "By organization" not in read(admin.list()).words
    assert ids_shown(admin.list(organization_id="acme")) == [row.pk]


def test_the_address_cannot_ask_about_hidden_columns(admin: Admin) -> None:
    for lookup in ("payload__card", "logs__icontains", "error__contains", "result", "key__startswith"):
        assert admin.list(**{lookup: "4"}).status_code == 400


def test_a_foreign_parameter_leads_back_to_the_list(admin: Admin) -> None:
    assert admin.list(utm_source="mail").status_code == 302


def test_a_search_finds_a_whole_key(admin: Admin) -> None:
    row = JobExecutionFactory(key="order-42")
    JobExecutionFactory(key="order-421")
    JobExecutionFactory(key="order-42", organization_id="acme")

    assert ids_shown(admin.list(q=" order-42 ")) == [row.pk]


def test_a_search_within_an_organization_finds_its_key(admin: Admin) -> None:
    JobExecutionFactory(key="order-42")
    row = JobExecutionFactory(key="order-42", organization_id="acme")

    assert ids_shown(admin.list(q="order-42", organization_id="acme")) == [row.pk]


def test_a_search_finds_an_id_and_its_beginning(admin: Admin) -> None:
    JobExecutionFactory(id="00000000-0000-7000-8000-000000000001")
    row = JobExecutionFactory()
    text = str(row.pk)

    for term in (text, text.upper(), row.pk.hex, text[:13], text[:20], text[:-1]):
        assert ids_shown(admin.list(q=term)) == [row.pk]


def test_a_key_that_looks_like_an_id_is_found_as_a_key(admin: Admin) -> None:
    row = JobExecutionFactory(key="01a229aa")
    JobExecutionFactory(id="01a229aa-0000-7000-8000-000000000001")

    assert ids_shown(admin.list(q="01a229aa")) == [row.pk]


def test_a_search_takes_any_term(admin: Admin) -> None:
    for term in ("a\0b", "%", "é", "<b>", "x" * 3000, "0123", "zzzzzzzz"):
        assert admin.list(q=term).status_code == 200


def test_the_bounds_of_a_beginning_hold_every_id_that_begins_so() -> None:
    pk = uuid7()

    for length in range(6, 33):
        bounds = listing.id_bounds(pk.hex[:length])
        assert bounds is not None
        assert bounds[0] <= pk <= bounds[1]
    assert listing.id_bounds(pk.hex) == (pk, pk)


def test_the_list_says_how_many_finished_rows_are_kept(admin: Admin, settings: Any) -> None:
    settings.DJANGO_JOBS = {"KEEP": {"ok": 7, "error": None, "cancelled": 0, "max_age": 86400}}

    words = read(admin.list()).words

    assert "Kept of each job: the newest 7 ok, all error, 0 cancelled, for at most 1 days" in words


def test_nothing_is_added_or_changed_by_hand(admin: Admin) -> None:
    row = JobExecutionFactory()

    assert admin.get("/admin/django_jobs/jobexecution/add/").status_code == 403
    assert admin.client.post(page(row), {"status": "ok"}).status_code == 403


def test_without_view_permission_there_is_no_list(as_user: Any) -> None:
    assert as_user("cancel").list().status_code == 403


def test_with_view_permission_there_is_a_list_without_actions(as_user: Any) -> None:
    JobExecutionFactory()
    viewer = as_user("view")

    assert not read(viewer.list()).named("select")


def test_a_list_of_states_is_no_admin_page(admin: Admin) -> None:
    QueueStateFactory()

    assert admin.get("/admin/django_jobs/queuestate/").status_code == 404
