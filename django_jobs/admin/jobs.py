"""The page of jobs: a line for each registered job with schedule, counts and buttons; below them, the queues."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from django.contrib import admin, messages
from django.core.exceptions import BadRequest, PermissionDenied
from django.core.paginator import Paginator
from django.http import HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.utils.decorators import method_decorator
from django.utils.html import format_html
from django.utils.text import capfirst
from django.utils.translation import gettext as _
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from django_jobs import registry
from django_jobs.admin import pausing, purging
from django_jobs.admin.banner import outages
from django_jobs.admin.base import ReadOnlyAdmin
from django_jobs.admin.overview import overview
from django_jobs.exceptions import Conflict, JobsError
from django_jobs.models import JobExecution, JobState, jobs_alias
from django_jobs.reading.waiting import pause_of

if TYPE_CHECKING:
    from django.http import HttpRequest
    from django.http.response import HttpResponse
    from django.urls import URLPattern

    from django_jobs.definition import Job

PER_PAGE = 50


@admin.register(JobState)
class JobsAdmin(ReadOnlyAdmin):
    """Look at the jobs, run one now, pause and resume; the lines come from the registry, not from the table."""

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return self.may(request, "view")

    def has_trigger_permission(self, request: HttpRequest) -> bool:
        return self.may(request, "view") and self.may(request, "trigger")

    def has_pause_permission(self, request: HttpRequest) -> bool:
        return self.may(request, "view") and self.may(request, "pause")

    def has_purge_permission(self, request: HttpRequest) -> bool:
        return self.may(request, "view") and self.may(request, "purge")

    def get_urls(self) -> list[URLPattern]:
        # No page for a single row: all there is to see of a job is in its line.
        wrap, prefix = self.admin_site.admin_view, f"{self.opts.app_label}_{self.opts.model_name}"
        return [
            path("", wrap(self.changelist_view), name=f"{prefix}_changelist"),
            path("<str:name>/run/", wrap(self.run_now), name=f"{prefix}_run"),
            path("purge/", wrap(self.purge), name=f"{prefix}_purge"),
            path("selected/", wrap(self.pause_selected), name=f"{prefix}_selected"),
            path("queue/<str:queue>/", wrap(self.pause_queue), name=f"{prefix}_queue"),
        ]

    def _url(self, name: str, *args: Any, query: dict[str, Any] | None = None) -> str:
        url = reverse(f"admin:{self.opts.app_label}_{name}", args=args, current_app=self.admin_site.name)
        return f"{url}?{urlencode(query)}" if query else url

    @method_decorator(require_safe)
    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Show a page of jobs."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        request.current_app = self.admin_site.name
        list_url = self._url("jobexecution_changelist")
        page = Paginator(registry.all_jobs(), PER_PAGE).get_page(request.GET.get("p"))
        context = {
            **self.admin_site.each_context(request),
            "title": capfirst(self.opts.verbose_name_plural),
            "opts": self.opts,
            "media": self.media,
            "outages": outages,
            "page": page,
            # Added to the URL of each button, so that it leads back to this page.
            "back": f"?p={page.number}" if page.number > 1 else "",
            "overview": overview(
                list(page), using=jobs_alias(), list_url=list_url, may_run=self.has_trigger_permission(request)
            ),
            "executions_url": list_url,
            "may_pause": self.has_pause_permission(request),
            "may_purge": self.has_purge_permission(request),
            **(extra_context or {}),
        }
        return TemplateResponse(request, "admin/django_jobs/jobstate/change_list.html", context)

    @method_decorator(require_POST)
    def run_now(self, request: HttpRequest, name: str) -> HttpResponse:
        """Run a cron job, or a pushed one without required parameters, and go back to the list with a message."""
        if not self.has_trigger_permission(request):
            raise PermissionDenied
        try:
            execution = _start(registry.get(name), request.user)
        except JobsError as error:
            self._tell(request, str(error), error.execution if isinstance(error, Conflict) else None, messages.WARNING)
        else:
            self.log_addition(request, execution, _("Run now."))
            queued, pause = _("%(job)s was queued") % {"job": execution.job_name}, pause_of(execution)
            level = messages.WARNING if pause else messages.SUCCESS
            self._tell(request, "; ".join([queued, *pause]) + ".", execution, level)
        return self._back(request)

    @method_decorator(require_POST)
    def pause_selected(self, request: HttpRequest) -> HttpResponse:
        """Pause or resume the selected jobs, or the one with the button, and go back to the list with a message."""
        verb = self._verb(request)
        # Each once; including names that are no longer registered.
        names = dict.fromkeys(request.POST.getlist("job"))
        if names:
            pausing.apply_to_jobs(self, request, verb, names)
        else:
            self.message_user(request, _("Choose at least one job."), messages.WARNING)
        return self._back(request)

    @method_decorator(require_POST)
    def pause_queue(self, request: HttpRequest, queue: str) -> HttpResponse:
        """Pause or resume a queue, and go back to the list with a message."""
        pausing.apply_to_queue(self, request, self._verb(request), queue)
        return self._back(request)

    @method_decorator(require_http_methods(["GET", "HEAD", "POST"]))
    def purge(self, request: HttpRequest) -> HttpResponse:
        """Show the executions of unknown jobs, or delete those of the selected names and report how many."""
        if not self.has_purge_permission(request):
            raise PermissionDenied
        if request.method == "POST":
            if chosen := set(request.POST.getlist("job")):
                purging.apply(self, request, chosen)
            else:
                self.message_user(request, _("Choose at least one name."), messages.WARNING)
            return HttpResponseRedirect(request.path)
        request.current_app = self.admin_site.name
        context = {
            **self.admin_site.each_context(request),
            "title": _("Purge executions of unknown jobs"),
            "opts": self.opts,
            "media": self.media,
            "leftovers": purging.listed(),
            "back_url": self._url("jobstate_changelist"),
            "executions_url": self._url("jobexecution_changelist"),
        }
        return TemplateResponse(request, "admin/django_jobs/jobstate/purge.html", context)

    def _verb(self, request: HttpRequest) -> pausing.Verb:
        if not self.has_pause_permission(request):
            raise PermissionDenied
        verb = pausing.VERBS.get(request.POST.get("verb", ""))
        if verb is None:
            raise BadRequest
        return verb

    def _back(self, request: HttpRequest) -> HttpResponse:
        number = request.GET.get("p", "")
        return HttpResponseRedirect(
            self._url("jobstate_changelist", query={"p": number} if number.isdecimal() else None)
        )

    def _tell(self, request: HttpRequest, text: str, execution: JobExecution | None, level: int) -> None:
        if execution is not None:
            url = self._url("jobexecution_change", execution.pk)
            text = format_html('{} <a href="{}">{}</a>', text, url, _("Show the execution"))
        self.message_user(request, text, level)


def _start(job: Job[...], user: Any) -> JobExecution:
    return job.trigger(by=user) if job.cron else job.using(by=user).push()
