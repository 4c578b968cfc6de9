"""The pages of workers: which processes run jobs, for which queues, and whether they are alive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.contrib.admin.views.main import ChangeList
from django.db.models import Count, IntegerField, OuterRef, Subquery
from django.db.models.functions import Coalesce
from django.utils.html import format_html
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, pgettext

from django_jobs.admin.base import ReadOnlyAdmin, now
from django_jobs.admin.formatting import ago
from django_jobs.models import JobExecution, Worker
from django_jobs.querysets import is_fresh
from django_jobs.reading.words import EMPTY, moment, short_duration
from django_jobs.served import Served

if TYPE_CHECKING:
    from django.http import HttpRequest


class WorkerChangeList(ChangeList):
    """The latest heartbeats first, each with the number of running executions that are assigned to the worker."""

    def get_ordering(self, request: HttpRequest, queryset: Any) -> list[Any]:
        return ["-heartbeat_at", "-id"]

    def get_queryset(self, request: HttpRequest, exclude_parameters: Any = None) -> Any:
        owned = (
            JobExecution.objects.running()
            .filter(worker_id=OuterRef("pk"))
            .order_by()
            .values("worker_id")
            .annotate(n=Count("pk"))
            .values("n")
        )
        rows = super().get_queryset(request, exclude_parameters)
        return rows.defer("names").annotate(runs=Coalesce(Subquery(owned, output_field=IntegerField()), 0))


@admin.register(Worker)
class WorkerAdmin(ReadOnlyAdmin):
    """Look at the processes."""

    list_display = ("state", "host", "process", "role_list", "queue_list", "used_slots", "heartbeat", "up")
    list_display_links = ("state", "host")
    readonly_fields = (
        "state", "host", "process", "version", "role_list", "queue_list", "name_list", "slots", "megabytes",
        "started", "beat", "stopped", "stop_reason", "id",
    )  # fmt: skip
    fields = readonly_fields

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[WorkerChangeList]:
        return WorkerChangeList

    @admin.display(description=gettext_lazy("state"))
    def state(self, obj: Worker) -> str:
        if obj.stopped_at is not None:
            kind, word = "stopped", pgettext("worker", "stopped")
        elif is_fresh(obj.heartbeat_at, now(obj)):
            kind, word = "alive", pgettext("worker", "alive")
        else:
            kind, word = "silent", pgettext("worker", "silent")
        return format_html('<span class="dj-badge dj-{}">{}</span>', kind, word)

    @admin.display(description=gettext_lazy("pid"))
    def process(self, obj: Worker) -> str:
        # Plain digits: the thousands of a process id are not to be separated.
        return str(obj.pid)

    @admin.display(description=gettext_lazy("roles"))
    def role_list(self, obj: Worker) -> str:
        return joined(obj.roles)

    @admin.display(description=gettext_lazy("queues"))
    def queue_list(self, obj: Worker) -> str:
        served = Served.from_row(obj.queues)
        if not served.is_any_but:
            return joined(obj.queues)
        return _("any except %(queues)s") % {"queues": joined(sorted(served.names))} if served.names else _("any")

    @admin.display(description=gettext_lazy("jobs it knows"))
    def name_list(self, obj: Worker) -> str:
        return joined(obj.names)

    @admin.display(description=gettext_lazy("runs / slots"))
    def used_slots(self, obj: Any) -> str:
        return f"{obj.runs} / {obj.slots}"

    @admin.display(description=gettext_lazy("heartbeat"))
    def heartbeat(self, obj: Worker) -> str:
        return ago(obj.heartbeat_at, now(obj))

    @admin.display(description=gettext_lazy("up for"))
    def up(self, obj: Worker) -> str:
        return short_duration((obj.stopped_at or obj.heartbeat_at) - obj.started_at)

    @admin.display(description=gettext_lazy("memory"))
    def megabytes(self, obj: Worker) -> str:
        return EMPTY if obj.memory is None else f"{obj.memory / 1e6:.0f} MB"

    @admin.display(description=gettext_lazy("started"))
    def started(self, obj: Worker) -> str:
        return moment(obj.started_at)

    @admin.display(description=gettext_lazy("last heartbeat"))
    def beat(self, obj: Worker) -> str:
        return moment(obj.heartbeat_at)

    @admin.display(description=gettext_lazy("stopped"))
    def stopped(self, obj: Worker) -> str:
        return moment(obj.stopped_at)


def joined(values: Any) -> str:
    """Return a list of names as one string."""
    return ", ".join(map(str, values)) if isinstance(values, list) and values else EMPTY
