"""The pages of executions: a bounded list, one row in full, and the actions that state and permissions allow."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from django.contrib import admin, messages
from django.contrib.admin.actions import delete_selected as django_delete_selected
from django.contrib.admin.templatetags.admin_urls import add_preserved_filters
from django.contrib.admin.utils import unquote
from django.core.exceptions import PermissionDenied
from django.http import HttpResponseRedirect
from django.urls import path
from django.utils.decorators import method_decorator
from django.utils.translation import gettext_lazy as _
from django.views.decorators.http import require_POST

from django_jobs import registry
from django_jobs.admin import bulk, listing
from django_jobs.admin.base import ReadOnlyAdmin
from django_jobs.admin.columns import ExecutionColumns
from django_jobs.admin.operations import OPERATIONS, Operation
from django_jobs.exceptions import JobsError
from django_jobs.models import JobExecution
from django_jobs.reading import detail
from django_jobs.reading.listing import search

if TYPE_CHECKING:
    from django.http import HttpRequest
    from django.http.response import HttpResponse
    from django.urls import URLPattern

    from django_jobs.querysets import ExecutionQuerySet


@admin.register(JobExecution)
class ExecutionAdmin(ExecutionColumns, ReadOnlyAdmin):
    """Look at executions; cancel, retry, copy and start them."""

    list_display = ("state", "job_in_short", "tries", "age", "took", "who")
    list_display_links = ("state", "job_in_short")
    list_filter = listing.FILTERS
    search_fields = ("key",)
    search_help_text = _("A whole key, or an id or its beginning. For keys of an organization, add ?organization_id=…")
    ordering = ("-id",)
    actions = ("cancel_selected", "retry_selected", "delete_selected")
    readonly_fields = (
        "state", "job", "description", "queue_name", "priority_word", "key", "organization_id", "id",
        "tries", "rescues", "took", "last_worker", "error",
        "created", "due", "tick", "started", "completed", "cancel_asked",
        "who", "cancelled_by_name", "retried", "copy_of",
    )  # fmt: skip
    fieldsets = (
        (None, {"fields": (("state", "job"), "description", "error")}),
        # One line each, which the style sheet folds at three: what is left out then leaves no hole.
        (_("Run"), {"fields": (("tries", "took", "last_worker", "queue_name", "priority_word", "rescues"),)}),
        (_("Times"), {"fields": (("created", "due", "started", "completed", "tick", "cancel_asked"),)}),
        (
            _("Origin"),
            {"fields": (("who", "key", "organization_id", "cancelled_by_name", "retried"), "copy_of", "id")},
        ),
    )

    def get_fieldsets(self, request: HttpRequest, obj: JobExecution | None = None) -> Any:
        fieldsets = super().get_fieldsets(request, obj)
        return fieldsets if obj is None else [*self.without_empty(fieldsets, obj)]

    def has_delete_permission(self, request: HttpRequest, obj: JobExecution | None = None) -> bool:
        return self.may(request, "delete") and (obj is None or obj.is_final)

    def has_cancel_permission(self, request: HttpRequest) -> bool:
        return self.may(request, "cancel")

    def has_retry_permission(self, request: HttpRequest) -> bool:
        return self.may(request, "retry")

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[listing.ExecutionChangeList]:
        return listing.ExecutionChangeList

    def lookup_allowed(self, lookup: str, value: Any, request: HttpRequest | None = None) -> bool:
        return listing.lookup_is_allowed(lookup)

    def get_search_results(
        self, request: HttpRequest, queryset: Any, search_term: str
    ) -> tuple[ExecutionQuerySet, bool]:
        if not search_term.strip():
            return queryset, False
        return search(queryset, search_term, request.GET.get("organization_id")), False

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        job = registry.find(request.GET.get("job_name", ""))
        context = {"retention": partial(detail.retention, job), **(extra_context or {})}
        return super().changelist_view(request, context)

    def get_urls(self) -> list[URLPattern]:
        buttons = [
            path(
                f"<path:object_id>/{verb}/",
                self.admin_site.admin_view(partial(self.press, verb=verb)),
                name=f"{self.opts.app_label}_{self.opts.model_name}_{verb}",
            )
            for verb in OPERATIONS
        ]
        return [*buttons, *super().get_urls()]

    @method_decorator(require_POST)
    def press(self, request: HttpRequest, object_id: str, verb: str) -> HttpResponse:
        """Do what the button says and go back to the page with a message; the service makes a double click harmless."""
        operation = OPERATIONS[verb]
        execution = self.get_object(request, unquote(object_id))
        if not (self.has_view_permission(request, execution) and self.may(request, operation.permission)):
            raise PermissionDenied
        if execution is None:
            self.message_user(request, _("This execution does not exist any more."), messages.WARNING)
            return HttpResponseRedirect(self.list_url())
        shown = self._operate(request, operation, execution)
        return HttpResponseRedirect(self._with_filters(request, self.url(shown.pk)))

    def _with_filters(self, request: HttpRequest, url: str) -> str:
        # Going back from the page leads to the list as it was filtered.
        context: dict[str, Any] = {"preserved_filters": self.get_preserved_filters(request), "opts": self.opts}
        return str(add_preserved_filters(context, url))

    def _operate(self, request: HttpRequest, operation: Operation, execution: JobExecution) -> JobExecution:
        try:
            result = operation.run(execution, request.user)
        except JobsError as error:
            self.message_user(request, str(error), messages.WARNING)
            return execution
        self.log_change(request, execution, str(operation.log))
        if result.pk != execution.pk:
            # Without an entry, the history of the new row would doubt that it was made here.
            self.log_addition(request, result, _("Pushed as a copy of %s.") % execution.pk)
        self.message_user(request, operation.done(result), messages.SUCCESS)
        return result

    def render_change_form(self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if (obj := context.get("original")) is not None:
            context |= {**detail.sections(obj), "buttons": self._buttons(request, obj)}
        return super().render_change_form(request, context, *args, **kwargs)

    def _buttons(self, request: HttpRequest, obj: JobExecution) -> list[dict[str, Any]]:
        return [
            {
                "verb": operation.verb,
                "label": operation.label,
                "url": self._with_filters(request, self.url(obj.pk, operation.verb)),
            }
            for operation in OPERATIONS.values()
            if operation.offered(obj) and self.may(request, operation.permission)
        ]

    def delete_model(self, request: HttpRequest, obj: JobExecution) -> None:
        if not bulk.by_ids([obj.pk]).delete_finished():
            # It was queued again after the page was shown; this also rolls back the log entry of the deletion.
            raise PermissionDenied

    def response_delete(self, request: HttpRequest, obj_display: str, obj_id: Any) -> HttpResponse:
        super().response_delete(request, obj_display, obj_id)
        # Django leads whoever may not change rows, so everybody, to the admin's index.
        return HttpResponseRedirect(self._with_filters(request, self.list_url()))

    @admin.action(permissions=["cancel"], description=_("Cancel selected executions"))
    def cancel_selected(self, request: HttpRequest, queryset: ExecutionQuerySet) -> None:
        bulk.run(self, request, queryset, bulk.CANCEL)

    @admin.action(permissions=["retry"], description=_("Retry selected executions"))
    def retry_selected(self, request: HttpRequest, queryset: ExecutionQuerySet) -> None:
        bulk.run(self, request, queryset, bulk.RETRY)

    @admin.action(permissions=["delete"], description=_("Delete selected executions (finished ones only)"))
    def delete_selected(self, request: HttpRequest, queryset: ExecutionQuerySet) -> HttpResponse | None:
        if request.POST.get("post"):
            bulk.delete(self, request, queryset)
            return None
        rows = bulk.deletable(self, request, queryset)
        if rows is None:
            return None
        # Django's own page asks for confirmation.
        return django_delete_selected(self, request, rows)
