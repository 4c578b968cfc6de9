"""The page that shows the executions of unknown jobs, and deletes those of the selected names."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from django.contrib import messages
from django.contrib.admin.models import DELETION
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_jobs.admin import history
from django_jobs.models import JobState, jobs_alias
from django_jobs.runtime.purge import Leftover, leftovers, purge, unregistered

if TYPE_CHECKING:
    from django.contrib.admin import ModelAdmin
    from django.http import HttpRequest

# How many names the page shows, with counts of their rows; the next ones appear once these are purged.
LISTED = 50
# Seconds; a proxy usually gives up after half a minute.
BUDGET = 15.0


def listed() -> list[Leftover]:
    """Return the counts of the first 50 unknown names."""
    using = jobs_alias()
    return leftovers(unregistered(using=using)[:LISTED], using=using)


def apply(admin: ModelAdmin[Any], request: HttpRequest, chosen: Collection[str]) -> None:
    """Purge the chosen names that are still unknown, with a history entry each, and report how many rows went."""
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
    history.record(request, [JobState(job_name=name) for name in done], DELETION, _("Purged."))
    text = _("%(n)d deleted") % {"n": deleted}
    if known := len(chosen) - len(names):
        left_alone = ngettext(
            "%(n)d name left alone: known by now, or nothing is left of it",
            "%(n)d names left alone: known by now, or nothing is left of them",
            known,
        )
        text += ", " + left_alone % {"n": known}
    if is_cut:
        text += ". " + _("There are more: repeat the action for the rest")
    admin.message_user(request, text + ".", messages.WARNING if is_cut or known else messages.SUCCESS)
