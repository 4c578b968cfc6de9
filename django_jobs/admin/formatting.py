"""Values as HTML for the admin pages; every function escapes its arguments."""

from __future__ import annotations

from datetime import datetime

from django.utils.html import format_html
from django.utils.safestring import SafeString

from django_jobs.models import JobExecution
from django_jobs.reading.words import age, moment, state


def badge(execution: JobExecution, now: datetime) -> SafeString:
    """Return the status as a coloured word, followed by what keeps the row from moving on, if anything."""
    kind, word, note = state(execution, now)
    mark = format_html('<span class="dj-badge dj-{}">{}</span>', kind, word)
    return format_html('{} <span class="dj-note">{}</span>', mark, note) if note else mark


def ago(value: datetime, now: datetime) -> SafeString:
    """Return how long ago an instant was, with the instant itself as the tooltip."""
    return format_html('<time datetime="{}" title="{}">{}</time>', value.isoformat(), moment(value), age(value, now))
