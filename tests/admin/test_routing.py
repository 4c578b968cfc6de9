from __future__ import annotations

from typing import Any

import pytest
from django.contrib.admin.models import LogEntry

from django_jobs.models import JobExecution
from tests.admin.support import Admin, ids_shown, page, read, said
from tests.cases.routers import Elsewhere
from tests.factories import JobExecutionFactory


class FromReplica:
    """Reads go to a second database that has nothing yet."""

    def db_for_read(self, model: Any, **hints: Any) -> str | None:
        return "other" if model._meta.app_label == "django_jobs" else None

    def db_for_write(self, model: Any, **hints: Any) -> str | None:
        return None


@pytest.mark.django_db(databases=["default", "other"])
def test_the_pages_follow_the_router(admin: Admin, settings: Any) -> None:
    settings.DATABASE_ROUTERS = [Elsewhere()]
    row = JobExecutionFactory(failed=True)
    assert row._state.db == "other"

    assert ids_shown(admin.list()) == [row.pk]
    assert ids_shown(admin.list(q=str(row.pk))) == [row.pk]
    assert "ValueError: boom" in read(admin.detail(row)).words
    assert said(admin.press(row, "retry")) == "Queued again."
    assert said(admin.act("cancel_selected", row)).endswith("1 cancelled.")
    assert said(admin.act("delete_selected", row, post="yes")).endswith("1 deleted.")
    assert not JobExecution.objects.using("other").exists()
    assert LogEntry.objects.using("default").filter(object_id=str(row.pk)).count() == 3


@pytest.mark.django_db(databases=["default", "other"])
def test_the_pages_show_what_the_verbs_wrote_and_not_a_late_replica(admin: Admin, settings: Any) -> None:
    row = JobExecutionFactory(failed=True)
    settings.DATABASE_ROUTERS = [FromReplica()]

    assert ids_shown(admin.list()) == [row.pk]
    assert admin.detail(row).status_code == 200
    assert admin.client.post(page(row, "delete"), {"post": "yes"}).status_code == 302
    assert not JobExecution.objects.using("default").exists()
