"""How values look on the admin pages; every function escapes what it is given."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from typing import Any

from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, pgettext

from django_jobs.conf import get_settings
from django_jobs.models import JobExecution
from django_jobs.states import Parked, Status

EMPTY = "-"
PRIORITIES = {
    -50: gettext_lazy("low"),
    0: gettext_lazy("normal"),
    50: gettext_lazy("high"),
    100: gettext_lazy("critical"),
}


def badge(execution: JobExecution, now: datetime) -> SafeString:
    """Return the status as a coloured word, with what keeps the row from moving on behind it."""
    kind, word, note = str(execution.status), str(execution.get_status_display()), ""
    if execution.is_cancelling:
        kind, word = "cancelling", pgettext("status", "cancelling")
    elif execution.status == Status.SCHEDULED and execution.parked_reason:
        kind, word = "parked", pgettext("status", "parked")
        reason = execution.parked_reason
        note = str(Parked(reason).label) if reason in Parked.values else reason
    elif execution.status == Status.SCHEDULED:
        left = execution.scheduled_at - now
        note = _("in %(time)s") % {"time": short_duration(left)} if left > timedelta(0) else _("due")
    mark = format_html('<span class="dj-badge dj-{}">{}</span>', kind, word)
    return format_html('{} <span class="dj-note">{}</span>', mark, note) if note else mark


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


def moment(value: datetime | None) -> str:
    """Return an instant to the second with the name of its zone, so that the hour a clock repeats stays clear.

    Local time under USE_TZ; without it stored instants are UTC and shown so.
    """
    # Django's own format "T" is empty in just that hour.
    return EMPTY if value is None else f"{_local(value):%Y-%m-%d %H:%M:%S %Z}"


def _local(value: datetime) -> datetime:
    return timezone.localtime(value) if get_settings().use_tz else value


def ago(value: datetime, now: datetime) -> SafeString:
    """Return how long ago an instant was, with the instant itself as its title."""
    return format_html('<time datetime="{}" title="{}">{}</time>', value.isoformat(), moment(value), _age(value, now))


def _age(value: datetime, now: datetime) -> str:
    # Tenths of a second would be different on every look.
    age = max(now - value, timedelta(0))
    return f"{int(age.total_seconds())} s" if age < timedelta(seconds=10) else short_duration(age)


def priority(execution: JobExecution) -> str:
    """Return the word of a priority, or its number where it has none."""
    return priority_word(execution.priority)


def priority_word(value: int) -> str:
    """Return the word for a number on the scale of priorities, or the number where there is none."""
    return str(PRIORITIES.get(value, value))


def who(execution: JobExecution) -> str:
    """Return who asked for an execution: a person, the clock, or nobody that is known."""
    return _("cron") if execution.tick_at else execution.triggered_by_name or EMPTY


def run_time(execution: JobExecution, now: datetime) -> str:
    """Return how long the last attempt took, or takes so far."""
    if execution.started_at is None:
        return EMPTY
    if execution.status == Status.RUNNING:
        return _("%(time)s so far") % {"time": short_duration(now - execution.started_at)}
    return EMPTY if execution.duration is None else short_duration(execution.duration)


def shortened(text: str, length: int = 24) -> str:
    """Return the text, or its beginning and an ellipsis."""
    return text if len(text) <= length else f"{text[: length - 1]}…"


def pretty_json(value: Any) -> str:
    """Return a value as indented JSON; as text, for the template to escape."""
    return json.dumps(value, indent=2, ensure_ascii=False, default=str)


def parsed_moment(value: Any) -> str:
    """Return an instant that was stored as text inside JSON; whatever is no instant is returned as it is."""
    try:
        instant = datetime.fromisoformat(str(value))
    except ValueError:
        return str(value)
    return moment(instant) if timezone.is_aware(instant) else str(value)
