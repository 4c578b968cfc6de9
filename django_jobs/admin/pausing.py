"""Pause and resume jobs and queues from the page of jobs: through services, with history entries and one message."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django.contrib import messages
from django.contrib.admin.models import CHANGE
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext_lazy

from django_jobs import registry, services
from django_jobs.admin import history
from django_jobs.exceptions import JobsError
from django_jobs.models import JobState, QueueState
from django_jobs.text import some

if TYPE_CHECKING:
    from django.contrib.admin import ModelAdmin
    from django.http import HttpRequest
    from django.utils.functional import _StrPromise

# The most names that a message lists.
NAMED = 5


@dataclass(frozen=True, slots=True)
class Verb:
    """What a button or an action does, and the words for its outcome."""

    label: _StrPromise
    job: Callable[..., bool]
    queue: Callable[..., bool]
    done: _StrPromise
    unchanged: _StrPromise
    # The entry in the history.
    log: _StrPromise


VERBS = {
    "pause": Verb(
        label=_("Pause"),
        job=services.pause_job,
        queue=services.pause_queue,
        done=ngettext_lazy("%(n)d paused", "%(n)d paused", "n"),
        unchanged=ngettext_lazy("%(n)d was already paused", "%(n)d were already paused", "n"),
        log=_("Paused."),
    ),
    "resume": Verb(
        label=_("Resume"),
        job=services.resume_job,
        queue=services.resume_queue,
        done=ngettext_lazy("%(n)d resumed", "%(n)d resumed", "n"),
        unchanged=ngettext_lazy("%(n)d was not paused", "%(n)d were not paused", "n"),
        log=_("Resumed."),
    ),
}


def apply_to_jobs(admin: ModelAdmin[Any], request: HttpRequest, verb: Verb, names: Iterable[str]) -> None:
    """Pause or resume these jobs and report what became of each."""
    _apply(admin, request, verb, verb.job, names, lambda name: JobState(job_name=_canonical(name)))


def apply_to_queue(admin: ModelAdmin[Any], request: HttpRequest, verb: Verb, queue: str) -> None:
    """Pause or resume a queue and report it."""
    _apply(admin, request, verb, verb.queue, [queue], lambda name: QueueState(queue=name), _("queue %s"))


def _canonical(name: str) -> str:
    job = registry.find(name)
    return name if job is None else job.name


def _apply(
    admin: ModelAdmin[Any],
    request: HttpRequest,
    verb: Verb,
    run: Callable[..., bool],
    names: Iterable[str],
    subject: Callable[[str], JobState | QueueState],
    called: _StrPromise | str = "%s",
) -> None:
    done: list[str] = []
    unchanged: list[str] = []
    for name in names:
        try:
            changed = run(name, by=request.user)
        except JobsError as error:
            admin.message_user(request, str(error), messages.WARNING)
            continue
        (done if changed else unchanged).append(name)
    history.record(request, [subject(name) for name in done], CHANGE, str(verb.log))
    parts = [
        _told(text, [called % name for name in found])
        for text, found in ((verb.done, done), (verb.unchanged, unchanged))
        if found
    ]
    if parts:
        level = messages.SUCCESS if done else messages.INFO
        admin.message_user(request, "; ".join(parts) + ".", level)


def _told(text: _StrPromise, names: list[str]) -> str:
    return f"{text % {'n': len(names)}}: {some(names, NAMED)}"
