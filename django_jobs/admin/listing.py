"""The list of executions in the admin: its order, its filters, and the lookups that a URL may use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.contrib.admin.views.main import SEARCH_VAR, ChangeList
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_jobs import registry
from django_jobs.models import JobExecution
from django_jobs.reading.listing import COLUMNS, PARKED, edge, of_status
from django_jobs.reading.queues import named_queues
from django_jobs.states import Status

if TYPE_CHECKING:
    from collections.abc import Iterable

    from django.http import HttpRequest


class ExecutionChangeList(ChangeList):
    """Newest first, by the primary key: the ids are ordered by time."""

    # Did a filter search the newest rows only?
    is_cut = False

    def get_ordering(self, request: HttpRequest, queryset: Any) -> list[Any]:
        return ["-id"]

    def get_queryset(self, request: HttpRequest, exclude_parameters: Any = None) -> Any:
        rows = super().get_queryset(request, exclude_parameters)
        self.is_cut = any(getattr(spec, "is_cut", False) for spec in self.filter_specs)
        return rows.only(*COLUMNS, "error")


class _ValueFilter(admin.SimpleListFilter):
    """A filter for equality on one column, with choices that come from the code, never from the table."""

    def choices_known(self) -> Iterable[str]:
        raise NotImplementedError

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        known, asked = set(self.choices_known()), self.value()
        return [(name, name or "-") for name in sorted(known if asked is None else known | {asked})]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        value = self.value()
        if value is None:
            return queryset
        # PostgreSQL refuses NUL in a parameter, and no row holds one.
        return queryset.none() if "\0" in value else queryset.filter(**{str(self.parameter_name): value})


class _WindowFilter(_ValueFilter):
    """A filter on a column without an index: it searches the newest rows only."""

    is_cut = False

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        if self.value() is not None and not request.GET.get(SEARCH_VAR):
            above = edge(request.GET.get("status"), using=queryset.db)
            if above is not None:
                self.is_cut = True
                queryset = queryset.filter(pk__gt=above)
        return super().queryset(request, queryset)


class StatusFilter(admin.SimpleListFilter):
    """The status of a row, with parked rows as a choice of their own."""

    title = gettext_lazy("status")
    parameter_name = "status"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [*Status.choices, (PARKED, _("parked"))]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        return of_status(queryset, self.value())


class JobFilter(_ValueFilter):
    """The jobs this process knows, each with the rows under its old names, and whatever name the URL asks for."""

    title = gettext_lazy("job")
    parameter_name = "job_name"

    def choices_known(self) -> Iterable[str]:
        return (job.name for job in registry.all_jobs())

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        job = registry.find(self.value() or "")
        if job is None or job.name != self.value():
            return super().queryset(request, queryset)
        return queryset.filter(job_name__in=job.names)


class QueueFilter(_WindowFilter):
    """The queues that jobs or the settings name."""

    title = gettext_lazy("queue")
    parameter_name = "queue"

    def choices_known(self) -> Iterable[str]:
        return named_queues()


class OrganizationFilter(_WindowFilter):
    """Only by URL, without choices: organizations belong to the project, and there may be thousands."""

    title = gettext_lazy("organization")
    parameter_name = "organization_id"

    def choices_known(self) -> Iterable[str]:
        return ()


FILTERS = (StatusFilter, JobFilter, QueueFilter, OrganizationFilter)


def lookup_is_allowed(lookup: str) -> bool:
    """Whether a URL may filter by this lookup; one on payload or logs would reveal, bit by bit, what is masked."""
    fields = {field.name for field in JobExecution._meta.get_fields()} | {"pk"}
    return lookup in {each.parameter_name for each in FILTERS} or lookup.split("__", maxsplit=1)[0] not in fields
