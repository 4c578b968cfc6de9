"""The statuses of an execution, the transitions between them, and the reasons for parked rows and skipped ticks."""

from __future__ import annotations

from dataclasses import dataclass

from django.db.models import TextChoices
from django.utils.translation import gettext_lazy as _


class Status(TextChoices):
    """The status of an execution; each comment says who moves a row out of it."""

    PENDING = "pending", _("pending")  # a worker, by claiming it
    RUNNING = "running", _("running")  # the worker that owns it, or a rescue when that worker is dead
    SCHEDULED = "scheduled", _("scheduled")  # stage, when it is due and not parked
    OK = "ok", _("ok")  # nobody
    ERROR = "error", _("error")  # a person, by retrying it
    CANCELLED = "cancelled", _("cancelled")  # a person, by retrying it


FINAL: frozenset[Status] = frozenset({Status.OK, Status.ERROR, Status.CANCELLED})
LIVE: frozenset[Status] = frozenset({Status.PENDING, Status.RUNNING, Status.SCHEDULED})


class Parked(TextChoices):
    """Why a scheduled row waits for something other than its time; each comment says what brings it back."""

    PAUSED = "paused", _("paused")  # its job is resumed
    UNKNOWN = "unknown", _("no worker knows the job")  # a worker lists its name
    CONCURRENCY = "concurrency", _("its job is at its limit")  # runs of its job end


class Skip(TextChoices):
    """Why a cron tick did not become a row."""

    OVERLAP = "overlap", _("an earlier one was still live")
    MISFIRE = "misfire", _("nobody fired it in time")
    PAUSED = "paused", _("the job was paused")


@dataclass(frozen=True, slots=True)
class Transition:
    """One transition: its verb, the statuses it starts from and those it may end in."""

    verb: str
    sources: frozenset[Status]
    targets: frozenset[Status]


def _move(verb: str, sources: set[Status], targets: set[Status]) -> tuple[str, Transition]:
    return verb, Transition(verb, frozenset(sources), frozenset(targets))


# Where a row carries a cancel mark, verbs that leave RUNNING end CANCELLED, except succeed: what is done is done.
TRANSITIONS: dict[str, Transition] = dict(
    [
        _move("push", set(), {Status.PENDING, Status.SCHEDULED}),
        _move("claim", {Status.PENDING}, {Status.RUNNING}),
        _move("promote", {Status.SCHEDULED}, {Status.PENDING}),
        _move("start_now", {Status.SCHEDULED}, {Status.PENDING}),
        _move("park", {Status.PENDING}, {Status.SCHEDULED}),
        _move("unpark", {Status.SCHEDULED}, {Status.PENDING}),
        _move("succeed", {Status.RUNNING}, {Status.OK}),
        _move("fail", {Status.RUNNING}, {Status.ERROR, Status.CANCELLED}),
        _move("reschedule", {Status.RUNNING}, {Status.SCHEDULED, Status.CANCELLED}),
        _move("release", {Status.RUNNING}, {Status.PENDING, Status.CANCELLED}),
        _move("abort", {Status.RUNNING}, {Status.CANCELLED}),
        _move("rescue", {Status.RUNNING}, {Status.PENDING, Status.CANCELLED}),
        _move("bury", {Status.RUNNING}, {Status.ERROR, Status.CANCELLED}),
        _move("cancel", {Status.PENDING, Status.SCHEDULED}, {Status.CANCELLED}),
        _move("retry", {Status.ERROR, Status.CANCELLED}, {Status.PENDING}),
    ]
)
