"""The page that shows what is left of jobs nobody knows, and deletes what of it is chosen."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from django.contrib import messages
from django.contrib.admin.models import DELETION, LogEntry
from django.utils.translation import gettext as _

from django_jobs.models import JobState, jobs_alias
from django_jobs.runtime.purge import Leftover, leftovers, purge, unregistered

if TYPE_CHECKING:
    from django.contrib.admin import ModelAdmin
    from django.http import HttpRequest

# Names of which the rows are counted for the page; the next ones come once these are purged.
LISTED = 50
# A proxy waits for half a minute, as a rule.
BUDGET = 15.0


def listed() -> list[Leftover]:
    """Return what is left of the first of the names that nobody knows."""
    using = jobs_alias()
    return leftovers(unregistered(using=using)[:LISTED], using=using)


def apply(admin: ModelAdmin[Any], request: HttpRequest, chosen: Collection[str]) -> None:
    """Purge those of these names that nobody knows, with a history entry each, and say how much went."""
    using = jobs_alias()
    deadline = time.monotonic() + BUDGET
    names = [name for name in unregistered(using=using) if name in chosen]
    deleted, done, is_cut = 0, [], False
    for name in names:
        for count in purge([name], using=using, by=request.user):
            deleted += count
            if is_cut := time.monotonic() > deadline:
                break
        done.append(name)
        if is_cut:
            break
    _log(request, done)
    text = _("%(n)d deleted") % {"n": deleted}
    if known := len(chosen) - len(names):
        text += ", " + _("%(n)d names left alone: somebody knows them by now, or nothing is left") % {"n": known}
    if is_cut:
        text += ". " + _("There are more: repeat the action for the rest")
    admin.message_user(request, text + ".", messages.WARNING if is_cut or known else messages.SUCCESS)


def _log(request: HttpRequest, names: list[str]) -> None:
    rows = [JobState(job_name=name) for name in names]
    for row in rows:
        row._state.db = jobs_alias()
    if rows and request.user.is_authenticated:
        LogEntry.objects.log_actions(request.user.pk, rows, DELETION, _("Purged."))
