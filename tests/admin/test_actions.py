from __future__ import annotations

from collections.abc import Callable
from threading import Barrier, Thread
from typing import Any

import pytest
from django.contrib.admin.models import ADDITION, CHANGE, DELETION, LogEntry
from django.db import connection
from django.test import Client

from django_jobs import registry
from django_jobs.admin import bulk
from django_jobs.admin.executions import ExecutionAdmin
from django_jobs.definition import job
from django_jobs.models import JobExecution
from django_jobs.states import Status
from tests.admin.support import LIST, Admin, page, read, said
from tests.factories import JobExecutionFactory

pytestmark = pytest.mark.django_db


def status(row: JobExecution) -> str:
    row.refresh_from_db()
    return row.status


def entries(row: JobExecution) -> list[tuple[int, str, str]]:
    found = LogEntry.objects.filter(object_id=str(row.pk)).order_by("pk").select_related("user")
    return [(entry.action_flag, entry.user.get_username(), entry.get_change_message()) for entry in found]


def test_the_cancel_button_ends_a_waiting_execution(admin: Admin) -> None:
    row = JobExecutionFactory(scheduled=True)

    response = admin.press(row, "cancel")

    assert (response.status_code, response.url) == (302, page(row))
    assert said(response) == "Cancelled."
    assert status(row) == Status.CANCELLED
    assert row.cancelled_by_name == "mia"
    assert entries(row) == [(CHANGE, "mia", "Cancelled.")]


def test_the_cancel_button_marks_a_running_execution(admin: Admin) -> None:
    row = JobExecutionFactory(running=True)

    response = admin.press(row, "cancel")

    assert said(response) == "Cancellation requested: the handler has been told to stop."
    assert status(row) == Status.RUNNING
    assert row.is_cancelling


def test_the_retry_button_queues_the_same_row_and_keeps_its_history(admin: Admin) -> None:
    row = JobExecutionFactory(failed=True, logs=[{"message": "kept"}])

    response = admin.press(row, "retry")

    assert (response.url, said(response)) == (page(row), "Queued again.")
    assert status(row) == Status.PENDING
    assert (row.retried_by_name, row.completed_at, len(row.errors), row.logs) == ("mia", None, 1, [{"message": "kept"}])
    assert entries(row) == [(CHANGE, "mia", "Retried.")]


def test_the_copy_button_pushes_a_new_row_and_shows_it(admin: Admin) -> None:
    row = JobExecutionFactory(ok=True, payload={"tag": "x"})

    response = admin.press(row, "copy")

    copy = JobExecution.objects.get(copied_from=row.pk)
    assert response.url == page(copy)
    assert (copy.payload, copy.triggered_by_name, copy.status) == ({"tag": "x"}, "mia", Status.PENDING)
    assert status(row) == Status.OK
    assert entries(row) == [(CHANGE, "mia", "Pushed a copy.")]
    assert entries(copy) == [(ADDITION, "mia", f"Pushed as a copy of {row.pk}.")]


def test_the_start_button_makes_a_scheduled_row_due(admin: Admin) -> None:
    row = JobExecutionFactory(scheduled=True)

    response = admin.press(row, "start")

    assert said(response) == "Made due now."
    assert status(row) == Status.PENDING
    assert entries(row) == [(CHANGE, "mia", "Started before its time.")]


@pytest.mark.parametrize(
    ("verb", "given"),
    [("cancel", "ok"), ("retry", "ok"), ("retry", "pending"), ("copy", "running"), ("start", "failed")],
)
def test_a_button_that_does_not_fit_the_state_changes_nothing_and_says_why(admin: Admin, verb: str, given: str) -> None:
    row = JobExecutionFactory(**{given: True})
    before = JobExecution.objects.values().get(pk=row.pk)

    response = admin.press(row, verb)

    assert response.status_code == 302
    assert "cannot be" in said(response)
    assert JobExecution.objects.values().get(pk=row.pk) == before
    assert JobExecution.objects.count() == 1
    assert entries(row) == []


def test_pressing_retry_twice_runs_it_once(admin: Admin, failed: JobExecution) -> None:
    admin.press(failed, "retry")
    response = admin.press(failed, "retry")

    assert "cannot be retried: it is pending" in said(response)
    failed.refresh_from_db()
    assert (failed.max_attempts, JobExecution.objects.count()) == (2, 1)
    assert len(entries(failed)) == 1


@pytest.mark.django_db(transaction=True)
def test_two_people_pressing_retry_at_once_queue_it_once(as_user: Callable[..., Admin], failed: JobExecution) -> None:
    people = [as_user("all", name="mia"), as_user("all", name="ben")]
    barrier, answers = Barrier(2), []

    def press(person: Admin) -> None:
        barrier.wait()
        try:
            answers.append(said(person.press(failed, "retry")))
        finally:
            connection.close()

    threads = [Thread(target=press, args=(person,)) for person in people]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert sorted(answer == "Queued again." for answer in answers) == [False, True]
    assert (status(failed), failed.max_attempts, JobExecution.objects.count()) == (Status.PENDING, 2, 1)


def test_a_retry_whose_key_is_taken_is_refused_with_the_row_in_the_way(admin: Admin) -> None:
    old, twin = JobExecutionFactory(failed=True, key="k"), JobExecutionFactory(pending=True, key="k")

    response = admin.press(old, "retry")

    assert response.status_code == 302
    assert str(twin.pk) in said(response)
    assert status(old) == Status.ERROR


def test_a_bulk_retry_goes_on_past_a_taken_key_and_counts(admin: Admin) -> None:
    old, twin = JobExecutionFactory(failed=True, key="k"), JobExecutionFactory(pending=True, key="k")
    others = [JobExecutionFactory(failed=True), JobExecutionFactory(cancelled=True, key="other")]

    text = said(admin.act("retry_selected", old, *others))

    assert text == f"2 queued again, 1 skipped: 1 × its key 'k' is held by {twin.pk}, which is pending."
    assert [status(row) for row in (old, *others)] == [Status.ERROR, Status.PENDING, Status.PENDING]
    assert entries(old) == []
    assert [entries(row) for row in others] == [[(CHANGE, "mia", "Retried.")]] * 2


def test_a_bulk_cancel_counts_what_it_did_and_why_it_skipped(admin: Admin) -> None:
    live = [JobExecutionFactory(pending=True), JobExecutionFactory(scheduled=True), JobExecutionFactory(running=True)]
    done = [JobExecutionFactory(ok=True), JobExecutionFactory(ok=True), JobExecutionFactory(failed=True)]

    text = said(admin.act("cancel_selected", *live, *done))

    assert text == (
        "3 cancelled (running ones are told to stop), 3 skipped: 2 × it is already ok; 1 × it is already error."
    )
    assert [status(row) for row in live] == [Status.CANCELLED, Status.CANCELLED, Status.RUNNING]
    assert [len(entries(row)) for row in (*live, *done)] == [1, 1, 1, 0, 0, 0]


def test_bulk_reasons_beyond_a_handful_are_counted_together(admin: Admin) -> None:
    pairs = [(JobExecutionFactory(failed=True, key=f"k{n}"), JobExecutionFactory(key=f"k{n}")) for n in range(7)]

    text = said(admin.act("retry_selected", *(old for old, _twin in pairs)))

    assert text.startswith("0 queued again, 7 skipped: ")
    assert text.count("is held by") == 5
    assert text.endswith("2 for other reasons.")


def test_an_action_on_all_rows_has_an_end_and_says_so(admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "LIMIT", 3)
    rows = [JobExecutionFactory() for _ in range(5)]

    text = said(admin.act("cancel_selected", rows[0], select_across="1"))

    assert text == "3 cancelled. There are more: repeat the action for the rest."
    assert [status(row) for row in rows] == [Status.PENDING] * 2 + [Status.CANCELLED] * 3


def test_an_action_ends_in_time_and_says_so(admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "BATCH", 2)
    monkeypatch.setattr(bulk, "BUDGET", -1.0)
    rows = [JobExecutionFactory() for _ in range(5)]

    text = said(admin.act("cancel_selected", *rows))

    assert text == "2 cancelled. There are more: repeat the action for the rest."
    assert JobExecution.objects.filter(status=Status.CANCELLED).count() == 2


def test_deleting_very_many_takes_the_newest_and_says_so(admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "LISTED", 2)
    rows = [JobExecutionFactory(ok=True) for _ in range(3)]

    words = read(admin.act("delete_selected", *rows)).words

    assert "2 at a time. There are more: repeat the action for the rest." in words
    assert [str(row.pk) in words for row in rows] == [False, True, True]


def test_as_many_as_are_listed_can_be_deleted_by_one_form(admin: Admin) -> None:
    # Django refuses a form with more fields than a limit of the settings.
    rows = JobExecutionFactory.create_batch(bulk.LISTED + 1, ok=True)
    listed = read(admin.act("delete_selected", *rows[:2], select_across="1"))
    fields = [field["value"] for field in listed.named("input") if field.get("name") == "_selected_action"]

    response = admin.client.post(
        LIST, {"csrfmiddlewaretoken": "x", "action": "delete_selected", "post": "yes", "_selected_action": fields}
    )

    assert said(response).endswith(f"{bulk.LISTED} deleted.")
    assert JobExecution.objects.count() == 1


def test_an_action_works_batch_after_batch(admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "BATCH", 2)
    rows = [JobExecutionFactory(failed=True) for _ in range(5)]

    assert said(admin.act("retry_selected", *rows)) == "5 queued again."
    assert {status(row) for row in rows} == {Status.PENDING}


def test_an_action_stays_within_the_filters_of_the_list(admin: Admin) -> None:
    mail, other = JobExecutionFactory(queue="mail"), JobExecutionFactory()

    admin.client.post(
        f"{LIST}?queue=mail", {"action": "cancel_selected", "_selected_action": [str(mail.pk)], "select_across": "1"}
    )

    assert (status(mail), status(other)) == (Status.CANCELLED, Status.PENDING)


def test_deleting_many_asks_first_and_lists_only_finished_rows(admin: Admin) -> None:
    live, done = JobExecutionFactory(), JobExecutionFactory(ok=True)

    words = read(admin.act("delete_selected", live, done)).words

    assert "Are you sure" in words
    assert "1 not deleted: not finished, cancel them first." in words
    assert str(done.pk) in words
    assert str(live.pk) not in words
    assert JobExecution.objects.count() == 2


def test_deleting_many_leaves_live_rows_and_says_so(admin: Admin) -> None:
    live, done = JobExecutionFactory(running=True), [JobExecutionFactory(ok=True), JobExecutionFactory(failed=True)]

    text = said(admin.act("delete_selected", live, *done, post="yes"))

    assert text == "2 deleted, 1 skipped: not finished, cancel them first."
    assert list(JobExecution.objects.all()) == [live]
    assert [entries(row) for row in done] == [[(DELETION, "mia", "")]] * 2
    assert entries(live) == []


def test_deleting_only_live_rows_says_that_none_can_be(admin: Admin) -> None:
    response = admin.act("delete_selected", JobExecutionFactory())

    assert said(response) == "1 not deleted: not finished, cancel them first."


def test_one_finished_row_can_be_deleted_and_a_live_one_cannot(admin: Admin, failed: JobExecution) -> None:
    live = JobExecutionFactory()

    assert admin.client.post(page(failed, "delete"), {"post": "yes"}).status_code == 302
    assert admin.client.post(page(live, "delete"), {"post": "yes"}).status_code == 403
    assert list(JobExecution.objects.all()) == [live]
    assert entries(failed) == [(DELETION, "mia", "")]


def test_a_deletion_leads_back_to_the_list_as_it_was_filtered(admin: Admin, failed: JobExecution) -> None:
    response = admin.client.post(f"{page(failed, 'delete')}?_changelist_filters=status%3Derror", {"post": "yes"})

    assert response.url == f"{LIST}?status=error"
    assert "was deleted successfully" in said(response)


def test_a_row_that_is_queued_again_while_it_is_deleted_stays(admin: Admin, monkeypatch: Any) -> None:
    live = JobExecutionFactory()
    monkeypatch.setattr(ExecutionAdmin, "has_delete_permission", lambda *args: True)

    assert admin.client.post(page(live, "delete"), {"post": "yes"}).status_code == 403
    assert list(JobExecution.objects.all()) == [live]
    assert entries(live) == []


@pytest.mark.parametrize(
    ("verb", "permission", "given"),
    [("cancel", "cancel", "pending"), ("retry", "retry", "failed"), ("copy", "trigger", "ok"),
     ("start", "trigger", "scheduled")],
)  # fmt: skip
def test_a_button_needs_its_own_permission_and_the_one_to_view(
    as_user: Callable[..., Admin], verb: str, permission: str, given: str
) -> None:
    row = JobExecutionFactory(**{given: True})
    others = sorted({"delete", "trigger", "retry", "cancel", "pause", "purge"} - {permission})

    assert as_user("view", *others, name="a").press(row, verb).status_code == 403
    assert as_user(permission, name="b").press(row, verb).status_code == 403
    assert JobExecution.objects.filter(status=row.status).count() == 1
    assert as_user("view", permission, name="c").press(row, verb).status_code == 302
    assert len(entries(row)) == 1


@pytest.mark.parametrize(
    ("action", "permission", "given"),
    [
        ("cancel_selected", "cancel", "pending"),
        ("retry_selected", "retry", "failed"),
        ("delete_selected", "delete", "ok"),
    ],
)
def test_an_action_needs_its_own_permission(
    as_user: Callable[..., Admin], action: str, permission: str, given: str
) -> None:
    row = JobExecutionFactory(**{given: True})
    others = sorted({"delete", "trigger", "retry", "cancel", "pause", "purge"} - {permission})

    response = as_user("view", *others, name="a").act(action, row, post="yes")
    assert "No action selected." in said(response)
    assert status(row) == row.status
    as_user("view", permission, name="b").act(action, row, post="yes")
    assert len(entries(row)) == 1


def test_a_message_that_begins_with_the_name_of_a_job_leaves_it_as_it_is(admin: Admin) -> None:
    """Fault: the page wrote Acc.mark, which is no job's name."""
    row = JobExecutionFactory(ok=True, job_name="acc.mark")
    admin.press(row, "cancel")
    shown = read(admin.detail(row)).words
    assert f"acc.mark {row.pk} cannot be cancelled: it is already ok." in shown
    assert "Acc.mark" not in shown


def test_a_button_is_a_post_with_a_token(admin: Admin, failed: JobExecution) -> None:
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(admin.user)

    assert admin.get(page(failed, "retry")).status_code == 405
    assert strict.post(page(failed, "retry")).status_code == 403
    assert status(failed) == Status.ERROR


def test_strangers_are_sent_to_the_login(failed: JobExecution) -> None:
    response = Client().post(page(failed, "retry"))

    assert response.url.startswith("/admin/login/")
    assert status(failed) == Status.ERROR


def test_a_row_that_is_gone_gets_a_message(admin: Admin, failed: JobExecution) -> None:
    JobExecution.objects.all().delete()

    response = admin.press(failed, "retry")

    assert (response.status_code, response.url) == (302, LIST)
    assert said(response) == "This execution does not exist any more."


def test_the_filters_of_the_list_survive_a_button(admin: Admin, failed: JobExecution) -> None:
    query = "?_changelist_filters=status%3Derror"

    action = admin.get(page(failed) + query).context["buttons"][0]["url"]

    assert action == page(failed, "retry") + query
    assert admin.client.post(action).url == page(failed) + query


def test_a_copy_whose_payload_no_longer_fits_is_refused(admin: Admin) -> None:
    with registry.isolated():

        @job(name="shop.strict")
        def strict(order_id: int) -> None:
            pass

        response = admin.press(JobExecutionFactory(ok=True, job_name="shop.strict", payload={"id": 1}), "copy")

    assert response.status_code == 302
    assert "order_id" in said(response)
    assert JobExecution.objects.count() == 1


def test_the_history_tells_who_did_what(admin: Admin, failed: JobExecution) -> None:
    admin.press(failed, "retry")

    words = read(admin.get(page(failed, "history"))).words

    assert "mia" in words
    assert "Retried." in words
