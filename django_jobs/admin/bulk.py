"""Actions on many executions: bounded, through the services, with a history entry per row and counts in the message."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django.contrib import messages
from django.contrib.admin.models import CHANGE, DELETION
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext_lazy

from django_jobs import services
from django_jobs.admin import history
from django_jobs.models import JobExecution, jobs_alias
from django_jobs.querysets import ExecutionQuerySet
from django_jobs.reading.reasons import reasons, short_reason
from django_jobs.runtime.portions import portions
from django_jobs.services import Report
from django_jobs.states import Status

if TYPE_CHECKING:
    from uuid import UUID

    from django.contrib.admin import ModelAdmin
    from django.http import HttpRequest
    from django.utils.functional import _StrPromise

# "Select all" may mean a million rows: one request does no more than this, and its message says so.
LIMIT = 10_000
# The page that confirms a deletion shows a line and sends a field per row, and Django refuses a form of more than 1000.
LISTED = 500
BATCH = 500
# Seconds. Rows with keys are handled one by one, and a proxy usually gives up after half a minute.
BUDGET = 15.0


@dataclass(frozen=True, slots=True)
class Action:
    """A service for many rows, and the words for its outcome."""

    run: Callable[..., Report]
    done: _StrPromise
    log: _StrPromise


CANCEL = Action(
    services.cancel_many, ngettext_lazy("%(n)d cancelled", "%(n)d cancelled", "n"), gettext_lazy("Cancelled.")
)
RETRY = Action(
    services.retry_many, ngettext_lazy("%(n)d queued again", "%(n)d queued again", "n"), gettext_lazy("Retried.")
)


def run(admin: ModelAdmin[Any], request: HttpRequest, chosen: ExecutionQuerySet, action: Action) -> None:
    """Apply the action to the chosen rows, newest first, and report what became of them."""
    rows, is_cut = bounded(chosen, LIMIT)
    done, skipped, was_running = 0, Counter[str](), False
    deadline = time.monotonic() + BUDGET
    for batch in portions(rows, BATCH):
        if done + skipped.total() and time.monotonic() > deadline:
            is_cut = True
            break
        report = action.run(by_ids(row.pk for row in batch), by=request.user)
        left = {row.pk for row, _reason in report.skipped}
        moved = [row for row in batch if row.pk not in left]
        done += report.done
        skipped.update(short_reason(row, reason) for row, reason in report.skipped)
        was_running = was_running or any(row.status == Status.RUNNING for row in moved)
        history.record(request, moved, CHANGE, str(action.log))
    parts = [str(action.done % {"n": done})]
    if was_running and action is CANCEL:
        parts[0] += " " + _("(running ones are told to stop)")
    if skipped:
        parts.append(_("%(n)d skipped: %(why)s") % {"n": skipped.total(), "why": reasons(skipped)})
    _tell(admin, request, parts, is_clean=not skipped, is_cut=is_cut)


def delete(admin: ModelAdmin[Any], request: HttpRequest, chosen: ExecutionQuerySet) -> None:
    """Delete those of the chosen rows that are finished, and report how many were not."""
    rows, is_cut = bounded(chosen, LISTED)
    deleted, kept = 0, 0
    for batch in portions(rows, BATCH):
        ids = [row.pk for row in batch]
        deleted += by_ids(ids).delete_finished()
        # A row that was queued again in the meantime is still there.
        left = set(by_ids(ids).values_list("pk", flat=True))
        kept += len(left)
        history.record(request, [row for row in batch if row.pk not in left], DELETION, "")
    parts = [_("%(n)d deleted") % {"n": deleted}]
    if kept:
        parts.append(_("%(n)d skipped: not finished, cancel them first") % {"n": kept})
    _tell(admin, request, parts, is_clean=not kept, is_cut=is_cut)


def deletable(admin: ModelAdmin[Any], request: HttpRequest, chosen: ExecutionQuerySet) -> ExecutionQuerySet | None:
    """Return the rows whose deletion is to be confirmed (None: there are none), and report how many are left out."""
    rows, is_cut = bounded(chosen, LISTED)
    done = [row.pk for row in rows if row.is_final]
    parts = []
    if live := len(rows) - len(done):
        parts.append(_("%(n)d not deleted: not finished, cancel them first") % {"n": live})
    if parts or is_cut:
        _tell(admin, request, parts or [_("%(n)d at a time") % {"n": LISTED}], is_clean=False, is_cut=is_cut)
    return by_ids(done) if done else None


def _tell(admin: ModelAdmin[Any], request: HttpRequest, parts: list[str], *, is_clean: bool, is_cut: bool) -> None:
    text = ", ".join(parts)
    if is_cut:
        text += ". " + _("There are more: repeat the action for the rest")
    admin.message_user(request, text + ".", messages.SUCCESS if is_clean and not is_cut else messages.WARNING)


def bounded(chosen: ExecutionQuerySet, limit: int) -> tuple[list[JobExecution], bool]:
    """Return at most `limit` of the chosen rows, newest first, and whether there are more."""
    rows = list(chosen.order_by("-pk").only("pk", "job_name", "status")[: limit + 1])
    return rows[:limit], len(rows) > limit


def by_ids(ids: Iterable[UUID]) -> ExecutionQuerySet:
    """Return these rows as a queryset on the database that the services write to."""
    return JobExecution.objects.using(jobs_alias()).filter(pk__in=list(ids))
