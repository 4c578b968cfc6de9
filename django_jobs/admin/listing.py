"""The list of executions: which columns are read, in which order, how it is filtered and searched."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.contrib import admin
from django.contrib.admin.views.main import SEARCH_VAR, ChangeList
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_jobs import registry
from django_jobs.conf import get_settings
from django_jobs.models import JobExecution
from django_jobs.querysets import ExecutionQuerySet
from django_jobs.states import Status

if TYPE_CHECKING:
    from collections.abc import Iterable

    from django.http import HttpRequest


# Neither payload, logs, errors nor results: of a hundred rows they can be megabytes.
COLUMNS = (
    "id",
    "job_name",
    "queue",
    "status",
    "rank",
    "key",
    "organization_id",
    "attempt",
    "max_attempts",
    "scheduled_at",
    "tick_at",
    "parked_reason",
    "created_at",
    "started_at",
    "completed_at",
    "cancel_requested_at",
    "triggered_by_name",
)


# No index serves some filters: they look at the newest rows of the asked status, however large the table.
WINDOW = 50_000


class ExecutionChangeList(ChangeList):
    """Newest first, by the primary key: the ids are ordered by time."""

    # Did a filter look at the newest rows only?
    is_cut = False

    def get_ordering(self, request: HttpRequest, queryset: Any) -> list[Any]:
        return ["-id"]

    def get_queryset(self, request: HttpRequest, exclude_parameters: Any = None) -> Any:
        rows = super().get_queryset(request, exclude_parameters)
        self.is_cut = any(getattr(spec, "is_cut", False) for spec in self.filter_specs)
        return rows.only(*COLUMNS)


class _ValueFilter(admin.SimpleListFilter):
    """A filter for one column by equality, whose choices come from the code, never from the table."""

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
    """A filter for a column that no index serves."""

    is_cut = False

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        if self.value() is not None and not request.GET.get(SEARCH_VAR):
            rows = of_status(JobExecution.objects.using(queryset.db), request.GET.get("status"))
            edge = rows.order_by("-pk").values_list("pk", flat=True)[WINDOW : WINDOW + 1].first()
            if edge is not None:
                self.is_cut = True
                queryset = queryset.filter(pk__gt=edge)
        return super().queryset(request, queryset)


class StatusFilter(admin.SimpleListFilter):
    """Where a row stands; parked rows can be asked for by themselves."""

    title = gettext_lazy("status")
    parameter_name = "status"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [*Status.choices, ("parked", _("parked"))]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        return of_status(queryset, self.value())


def of_status(rows: ExecutionQuerySet, value: str | None) -> ExecutionQuerySet:
    """Return the rows with this value of the status filter; all of them for None."""
    if value is None:
        return rows
    if value == "parked":
        return rows.parked()
    return rows.filter(status=value) if value in Status.values else rows.none()


class JobFilter(_ValueFilter):
    """The jobs this process knows, and whatever name the address asks for."""

    title = gettext_lazy("job")
    parameter_name = "job_name"

    def choices_known(self) -> Iterable[str]:
        return (job.name for job in registry.all_jobs())


class QueueFilter(_WindowFilter):
    """The queues that jobs or the settings name."""

    title = gettext_lazy("queue")
    parameter_name = "queue"

    def choices_known(self) -> Iterable[str]:
        return {"default", *(job.queue for job in registry.all_jobs()), *(get_settings().queues or ())}


class OrganizationFilter(_WindowFilter):
    """Only on request of the address: organizations are the project's, and may be thousands."""

    title = gettext_lazy("organization")
    parameter_name = "organization_id"

    def choices_known(self) -> Iterable[str]:
        return ()


FILTERS = (StatusFilter, JobFilter, QueueFilter, OrganizationFilter)


def search(rows: ExecutionQuerySet, term: str, organization_id: str | None) -> ExecutionQuerySet:
    """Return the rows whose key is exactly `term`, else those whose id is, or begins with, it; by index in any case."""
    term = term.strip()
    keyed = rows.with_key(organization_id, term)
    bounds = id_bounds(term)
    if bounds is None or keyed.order_by().values("pk")[:1].exists():
        return keyed
    return rows.filter(pk__gte=bounds[0], pk__lte=bounds[1])


def id_bounds(term: str) -> tuple[UUID, UUID] | None:
    """Return the lowest and highest id that begin with `term`; None when it is too short or no id at all."""
    digits = term.replace("-", "").lower()
    if not re.fullmatch(r"[0-9a-f]{6,32}", digits):
        return None
    # Version and variant stay those of a time-ordered id: MariaDB sorts ids of other versions differently.
    low, high = list("0" * 12 + "7" + "0" * 3 + "8" + "0" * 15), list("f" * 12 + "7" + "f" * 3 + "b" + "f" * 15)
    low[: len(digits)] = high[: len(digits)] = digits
    return UUID("".join(low)), UUID("".join(high))


def lookup_is_allowed(lookup: str) -> bool:
    """Say whether the address may filter by this; one on payload or logs would reveal, bit by bit, what is masked."""
    fields = {field.name for field in JobExecution._meta.get_fields()} | {"pk"}
    return lookup in {each.parameter_name for each in FILTERS} or lookup.split("__", maxsplit=1)[0] not in fields
