"""The base of all pages: nothing can be edited; reads are bounded and go to the database of the jobs."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.core.paginator import Paginator
from django.db import models
from django.utils.html import format_html
from django.utils.text import capfirst

from django_jobs import clock
from django_jobs.admin.banner import outages
from django_jobs.models import jobs_alias
from django_jobs.reading.figures import COUNTED

if TYPE_CHECKING:
    from datetime import datetime

    from django.http import HttpRequest
    from django.http.response import HttpResponse

    ModelAdmin = admin.ModelAdmin[Any]
    BasePaginator = Paginator[Any]
else:
    # At run time they take no parameters.
    ModelAdmin = admin.ModelAdmin
    BasePaginator = Paginator


class BoundedPaginator(BasePaginator):
    """A paginator that stops counting at 10,000 rows: a full count of a large table takes seconds."""

    @cached_property
    def _counted(self) -> int:
        rows: models.QuerySet[Any] = self.object_list  # type: ignore[assignment]
        return rows.order_by().values("pk")[: COUNTED + 1].count()

    @cached_property
    def count(self) -> int:
        """The number of rows, at most 10,000."""
        return min(self._counted, COUNTED)

    @property
    def has_more(self) -> bool:
        """Whether there are more rows than were counted."""
        return self._counted > COUNTED


class ReadOnlyAdmin(ModelAdmin):
    """Pages without forms: whatever changes a row is an action or a button that calls a service."""

    paginator = BoundedPaginator
    show_full_result_count = False
    # Facets would cost one scan per filter choice.
    show_facets = admin.ShowFacets.NEVER
    list_per_page = 100
    list_max_show_all = 200

    class Media:
        css = {"all": ["django_jobs/admin.css"]}

    def get_queryset(self, request: HttpRequest) -> models.QuerySet[Any]:
        # The database that services write to, not a replica: after a button the page has to show its effect.
        return super().get_queryset(request).using(jobs_alias())

    def may(self, request: HttpRequest, permission: str) -> bool:
        """Whether the user has this permission for executions, `<permission>_jobexecution`."""
        return request.user.has_perm(f"{self.opts.app_label}.{permission}_jobexecution")

    def message_user(self, request: HttpRequest, message: Any, *args: Any, **kwargs: Any) -> None:
        text = str(message)
        # Django capitalizes the first letter of a message, but a job's name has to be shown as it is.
        shown = text if capfirst(text) == text else format_html("<span>{}</span>", text)
        super().message_user(request, shown, *args, **kwargs)

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        # A callable, so that the query is made only if the page is really rendered.
        context = {"outages": outages, "title": capfirst(self.opts.verbose_name_plural), **(extra_context or {})}
        return super().changelist_view(request, context)


def now(row: models.Model) -> datetime:
    """Return the time of the database that this row came from, which is asked at most once a minute."""
    return clock.now(row._state.db or jobs_alias())
