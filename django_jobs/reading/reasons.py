"""Why rows were skipped, in a few words; for the messages of the admin's actions and of `manage.py jobs`."""

from __future__ import annotations

from collections import Counter

from django.utils.translation import gettext as _

from django_jobs.models import JobExecution

SHOWN = 5


def short_reason(row: JobExecution, reason: str) -> str:
    """Return why a row was skipped, without the row's own name, so that equal reasons are counted together."""
    _subject, separator, why = reason.removeprefix(str(row)).partition(": ")
    return (why if separator else reason).strip().rstrip(".")


def reasons(skipped: Counter[str]) -> str:
    """Return the most frequent reasons with their counts."""
    shown = [f"{count} × {why}" for why, count in skipped.most_common(SHOWN)]
    if rest := skipped.total() - sum(count for _why, count in skipped.most_common(SHOWN)):
        shown.append(_("%(n)d for other reasons") % {"n": rest})
    return "; ".join(shown)
