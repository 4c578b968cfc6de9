"""The columns of the list of executions and the fields of one execution, each a method of the admin class."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.contrib import admin
from django.urls import reverse
from django.utils.html import escape, format_html, format_html_join
from django.utils.translation import gettext_lazy as _

from django_jobs import registry
from django_jobs.admin.base import now
from django_jobs.admin.formatting import ago, badge
from django_jobs.reading import detail, words
from django_jobs.text import clean_text

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from django_jobs.models import JobExecution


# Facts that most executions do not have, and the columns that hold them: a page of dashes would hide the others.
OPTIONAL = {
    "error": "error",
    "rescues": "rescues",
    "last_worker": "worker_id",
    "took": "started_at",
    "tick": "tick_at",
    "started": "started_at",
    "completed": "completed_at",
    "cancel_asked": "cancel_requested_at",
    "cancelled_by_name": "cancelled_by_name",
    "retried": "retried_at",
    "key": "key",
    "organization_id": "organization_id",
    "copy_of": "copied_from",
}


class ExecutionColumns:
    """Mixed into the admin class; no column reads payload, logs, errors or result."""

    admin_site: admin.AdminSite

    def url(self, pk: Any, verb: str = "change") -> str:
        """Return the URL of an execution's page, or of one of its buttons."""
        return reverse(f"admin:django_jobs_jobexecution_{verb}", args=(pk,), current_app=self.admin_site.name)

    def list_url(self) -> str:
        """Return the URL of the list."""
        return reverse("admin:django_jobs_jobexecution_changelist", current_app=self.admin_site.name)

    def without_empty(self, fieldsets: Any, obj: JobExecution) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Leave out the facts that this execution does not have, and lines of which nothing is left."""
        for name, options in fieldsets:
            lines = [(line,) if isinstance(line, str) else line for line in options["fields"]]
            kept = [tuple(each for each in line if self._has(obj, each)) for line in lines]
            yield name, {**options, "fields": [line for line in kept if line]}

    def _has(self, obj: JobExecution, fact: str) -> bool:
        return fact not in OPTIONAL or bool(getattr(obj, OPTIONAL[fact]))

    @admin.display(description=_("status"))
    def state(self, obj: JobExecution) -> str:
        return badge(obj, now(obj))

    @admin.display(description=_("job"))
    def job(self, obj: JobExecution) -> str:
        if registry.find(obj.job_name):
            return obj.job_name
        return format_html('{} <span class="dj-note">{}</span>', obj.job_name or "?", _("not registered here"))

    @admin.display(description=_("job"))
    def job_in_short(self, obj: JobExecution) -> str:
        # Only what differs from the default: there is no room for more columns beside the filters.
        unusual = [
            _("queue %s") % obj.queue if obj.queue != "default" else "",
            _("%s priority") % words.priority(obj.priority) if obj.priority else "",
            _("key %s") % words.shortened(obj.key) if obj.key else "",
            # Which of many failures is which?
            "" if detail.is_masked(obj) else clean_text(" ".join(obj.error.split()), 100),
        ]
        notes = format_html_join("", '<span class="dj-note">{}</span>', ((note,) for note in unusual if note))
        return format_html("{} {}", self.job(obj), notes)

    @admin.display(description=_("attempt"))
    def tries(self, obj: JobExecution) -> str:
        return f"{obj.attempt} / {obj.max_attempts}"

    @admin.display(description=_("age"))
    def age(self, obj: JobExecution) -> str:
        return ago(obj.created_at, now(obj))

    @admin.display(description=_("duration"))
    def took(self, obj: JobExecution) -> str:
        return words.run_time(obj, now(obj))

    @admin.display(description=_("queue"))
    def queue_name(self, obj: JobExecution) -> str:
        return obj.queue

    @admin.display(description=_("priority"))
    def priority_word(self, obj: JobExecution) -> str:
        return words.priority(obj.priority)

    @admin.display(description=_("pushed by"))
    def who(self, obj: JobExecution) -> str:
        return words.who(obj)

    @admin.display(description=_("description"))
    def description(self, obj: JobExecution) -> str:
        job = registry.find(obj.job_name)
        # escape(), not conditional_escape(): a description that was marked safe is still text here.
        return escape(job.description) if job else words.EMPTY

    @admin.display(description=_("worker"))
    def last_worker(self, obj: JobExecution) -> str:
        if obj.worker_id is None:
            return words.EMPTY
        return detail.worker_name(obj) or str(obj.worker_id)

    @admin.display(description=_("created"))
    def created(self, obj: JobExecution) -> str:
        return words.moment(obj.created_at)

    @admin.display(description=_("due"))
    def due(self, obj: JobExecution) -> str:
        return words.moment(obj.scheduled_at)

    @admin.display(description=_("cron tick"))
    def tick(self, obj: JobExecution) -> str:
        return words.moment(obj.tick_at)

    @admin.display(description=_("started"))
    def started(self, obj: JobExecution) -> str:
        return words.moment(obj.started_at)

    @admin.display(description=_("completed"))
    def completed(self, obj: JobExecution) -> str:
        return words.moment(obj.completed_at)

    @admin.display(description=_("cancel requested"))
    def cancel_asked(self, obj: JobExecution) -> str:
        return words.moment(obj.cancel_requested_at)

    @admin.display(description=_("retried"))
    def retried(self, obj: JobExecution) -> str:
        if obj.retried_at is None:
            return words.EMPTY
        return f"{words.moment(obj.retried_at)} {obj.retried_by_name}"

    @admin.display(description=_("copy of"))
    def copy_of(self, obj: JobExecution) -> str:
        if obj.copied_from is None:
            return words.EMPTY
        return format_html('<a href="{}">{}</a>', self.url(obj.copied_from), obj.copied_from)
