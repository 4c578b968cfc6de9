"""Values in words, for a page and a terminal alike; as plain text, which a page has to escape."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from typing import Any

from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, pgettext

from django_jobs.conf import get_settings
from django_jobs.models import JobExecution
from django_jobs.states import Parked, Status

EMPTY = "-"
SHORT = 24
PRIORITIES = {
    -50: gettext_lazy("low"),
    0: gettext_lazy("normal"),
    50: gettext_lazy("high"),
    100: gettext_lazy("critical"),
}


def state(execution: JobExecution, now: datetime) -> tuple[str, str, str]:
    """Return the kind of state of a row, the word for it, and what keeps the row from moving on, if anything."""
    if execution.is_cancelling:
        return "cancelling", pgettext("status", "cancelling"), ""
    if execution.status == Status.SCHEDULED and execution.parked_reason:
        reason = execution.parked_reason
        return "parked", pgettext("status", "parked"), str(Parked(reason).label) if reason in Parked.values else reason
    note = ""
    if execution.status == Status.SCHEDULED:
        left = execution.scheduled_at - now
        note = _("in %(time)s") % {"time": short_duration(left)} if left > timedelta(0) else _("due")
    return str(execution.status), str(execution.get_status_display()), note


def short_duration(value: timedelta) -> str:
    """Return a length of time in its two largest units: 0.12 s, 42 s, 3 min 5 s, 2 h 1 min, 5 d 3 h."""
    total = max(value.total_seconds(), 0.0)
    if total < 10:
        return f"{total:.2f} s" if total < 1 else f"{total:.1f} s"
    whole = round(total)
    parts: list[str] = []
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        count, whole = divmod(whole, size)
        if count or parts:
            parts.append(f"{count} {unit}" if count else "")
    return " ".join(filter(None, parts[:2]))


def age(value: datetime, now: datetime) -> str:
    """Return how long ago an instant was."""
    # Tenths of a second would differ at every look.
    passed = max(now - value, timedelta(0))
    return f"{int(passed.total_seconds())} s" if passed < timedelta(seconds=10) else short_duration(passed)


def moment(value: datetime | None) -> str:
    """Return an instant to the second with the name of its zone, which tells the two passes of a repeated hour apart.

    In local time under USE_TZ; without it, stored instants are UTC and shown as such.
    """
    # Django's own format "T" is empty in exactly that hour.
    return EMPTY if value is None else f"{_local(value):%Y-%m-%d %H:%M:%S %Z}"


def _local(value: datetime) -> datetime:
    return timezone.localtime(value) if get_settings().use_tz else value


def parsed_moment(value: Any) -> str:
    """Return an instant that was stored as text inside JSON; anything else is returned as it is."""
    try:
        instant = datetime.fromisoformat(str(value))
    except ValueError:
        return str(value)
    return moment(instant) if timezone.is_aware(instant) else str(value)


def priority(value: int) -> str:
    """Return the word for a number on the scale of priorities, or the number where there is none."""
    return str(PRIORITIES.get(value, value))


def who(execution: JobExecution) -> str:
    """Return who asked for an execution: a person, cron, or nobody known."""
    return _("cron") if execution.tick_at else execution.triggered_by_name or EMPTY


def run_time(execution: JobExecution, now: datetime) -> str:
    """Return how long the last attempt took, or takes so far."""
    if execution.started_at is None:
        return EMPTY
    if execution.status == Status.RUNNING:
        return _("%(time)s so far") % {"time": short_duration(now - execution.started_at)}
    return EMPTY if execution.duration is None else short_duration(execution.duration)


def shortened(text: str) -> str:
    """Return the text, or its beginning and an ellipsis."""
    return text if len(text) <= SHORT else f"{text[: SHORT - 1]}…"


def pretty_json(value: Any) -> str:
    """Return a value as indented JSON."""
    return json.dumps(value, indent=2, ensure_ascii=False, default=str)
