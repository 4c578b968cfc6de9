"""`jobs list`: executions, newest first."""

from __future__ import annotations

from datetime import datetime

from django_jobs import clock
from django_jobs.cli import records
from django_jobs.cli.choosing import Filters, checked_limit, newest
from django_jobs.cli.terminal import Terminal
from django_jobs.models import JobExecution, jobs_alias
from django_jobs.reading import words
from django_jobs.reading.listing import COLUMNS, WINDOW


def list_executions(terminal: Terminal, filters: Filters, *, limit: int) -> None:
    """Show the newest executions that pass the filters, at most `limit` of them."""
    limit = checked_limit(limit, least=1)
    using = jobs_alias()
    now = clock.now(using)
    rows, is_cut = newest(filters, now=now, using=using)
    found = list(rows.only(*COLUMNS)[: limit + 1])
    has_more, found = len(found) > limit, found[:limit]
    terminal.json({"executions": [records.brief(row) for row in found], "has_more": has_more, "is_cut": is_cut})
    if found:
        terminal.table(
            ("ID", "STATUS", "JOB", "ATTEMPT", "AGE", "TOOK", "QUEUE", "PRIORITY", "KEY", "BY"),
            [_cells(row, now) for row in found],
        )
    if has_more:
        terminal.line(f"… and more: --limit {limit} ends here.")
    elif not found:
        terminal.line("There are no executions." if filters.is_empty else "No execution matches.")
    if is_cut:
        terminal.line(f"Only the newest {WINDOW:,} of that status were searched: no index serves these filters.")


def _cells(row: JobExecution, now: datetime) -> tuple[str, ...]:
    _kind, word, note = words.state(row, now)
    return (
        str(row.pk),
        f"{word} ({note})" if note else word,
        row.job_name or "?",
        f"{row.attempt}/{row.max_attempts}",
        words.age(row.created_at, now),
        _known(words.run_time(row, now)),
        # The defaults go without saying.
        row.queue if row.queue != "default" else "",
        words.priority(row.priority) if row.priority else "",
        row.key,
        _known(words.who(row)),
    )


def _known(text: str) -> str:
    return "" if text == words.EMPTY else text
