"""History entries for what the pages do to rows, as the admin writes them for its own actions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from django.contrib.admin.models import LogEntry

from django_jobs.models import jobs_alias

if TYPE_CHECKING:
    from django.db.models import Model
    from django.http import HttpRequest


def record(request: HttpRequest, rows: Sequence[Model], flag: int, message: str) -> None:
    """Write one entry per row in the user's name."""
    if not rows or not request.user.is_authenticated:
        return
    for row in rows:
        # A row that was only made for its entry belongs to no database yet.
        row._state.db = row._state.db or jobs_alias()
    LogEntry.objects.log_actions(request.user.pk, rows, flag, message)
