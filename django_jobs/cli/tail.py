"""`jobs tail`: a line for each execution that has ended, as it ends."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from uuid import UUID

from django_jobs import clock, registry
from django_jobs.cli import records
from django_jobs.cli.choosing import checked_limit, job_names
from django_jobs.cli.terminal import Terminal
from django_jobs.clock import EPOCH
from django_jobs.models import JobExecution, jobs_alias
from django_jobs.querysets import ExecutionQuerySet
from django_jobs.reading import words
from django_jobs.reading.detail import is_masked
from django_jobs.reading.listing import COLUMNS
from django_jobs.runtime.portions import distinct
from django_jobs.states import FINAL, Status

EVERY = 1.0
# A row whose end is committed up to this long after it is still seen: ends are written in batches, and a handler
# with atomic=True commits its own writes in the same transaction.
LATE = timedelta(seconds=5)
PAGE = 500
# The most pages that new() reads; the next call reads on.
PAGES = 20
# Seconds between looks for names of jobs, as new ones are rare.
NAMES_EVERY = 10.0


class Ends:
    """The executions that end, each once, in the order of their ends; reads use the retention index."""

    def __init__(self, job: str | None, *, using: str) -> None:
        self._job = job
        self._using = using
        self._names = self._read_names()
        self._names_at = time.monotonic()
        self._since = clock.now(using)
        # Those that were returned and may be read again.
        self._told: dict[tuple[UUID, datetime], None] = {}

    def last(self, limit: int) -> list[JobExecution]:
        """Return the last executions that ended, at most `limit`; new() continues after them."""
        newest = (
            list(self._ended([name], [status]).order_by("-completed_at", "-pk")[:limit])
            for name in sorted(self._names)
            for status in sorted(FINAL)
        )
        rows = heapq.nlargest(limit, (row for part in newest for row in part), key=lambda row: _place(row)[::-1])[::-1]
        self._told |= dict.fromkeys(map(_place, rows))
        return rows

    def new(self) -> list[JobExecution]:
        """Return the executions that have ended since the last call."""
        if time.monotonic() - self._names_at > NAMES_EVERY:
            self._names, self._names_at = self._read_names(), time.monotonic()
        found: dict[tuple[UUID, datetime], JobExecution] = {}
        rest = self._ended(self._names, FINAL).filter(completed_at__gte=self._since).order_by("completed_at", "pk")
        started = clock.now(self._using)
        since, skipped = self._since, 0
        for _ in range(PAGES):
            page = list(rest.filter(completed_at__gte=since)[skipped : skipped + PAGE])
            found |= {_place(row): row for row in page if _place(row) not in self._told}
            if len(page) < PAGE:
                since = started - LATE
                break
            last = page[-1].completed_at
            # Rows of the same instant are skipped by number: a condition on two columns would not use the index.
            same = sum(row.completed_at == last for row in page)
            skipped = skipped + PAGE if last == since else same
            since = last
        self._told |= dict.fromkeys(found)
        self._since = max(self._since, min(since, started))
        self._told = {place: None for place in self._told if place[1] >= self._since}
        return list(found.values())

    def _ended(self, names: Iterable[str], statuses: Iterable[str]) -> ExecutionQuerySet:
        rows = JobExecution.objects.using(self._using).filter(
            job_name__in=sorted(names), status__in=sorted(statuses), completed_at__gt=EPOCH
        )
        return rows.only(*COLUMNS, "error")

    def _read_names(self) -> frozenset[str]:
        if self._job is not None:
            return frozenset(job_names(self._job, using=self._using))
        return registry.names().union(distinct(JobExecution.objects.using(self._using).all(), "job_name"))


def _place(row: JobExecution) -> tuple[UUID, datetime]:
    # A retried execution ends again, at another instant.
    return row.pk, row.completed_at


def tail(
    terminal: Terminal, job: str | None, *, limit: int, follow: bool, wait: Callable[[float], None] = time.sleep
) -> None:
    """Write a line for each of the last executions that ended, and, with `follow`, for further ones until Ctrl-C."""
    limit = checked_limit(limit, least=0)
    try:
        ends = Ends(job, using=jobs_alias())
        _tell(terminal, ends.last(limit) if limit else [])
        while follow:
            wait(EVERY)
            _tell(terminal, ends.new())
    except KeyboardInterrupt:
        # The usual way to end it.
        return


def _tell(terminal: Terminal, rows: list[JobExecution]) -> None:
    for row in rows:
        error = "" if is_masked(row) else row.error
        terminal.json({**records.brief(row), "error": error or None}, indent=None)
        terminal.line(_line(row, error))
    terminal.flush()


def _line(row: JobExecution, error: str) -> str:
    took = "" if row.duration is None else f" in {words.short_duration(row.duration)}"
    text = f"{words.moment(row.completed_at)}  {row.status:<9}  {row}  attempt {row.attempt}/{row.max_attempts}{took}"
    return f"{text}  {error.splitlines()[0]}" if error and row.status != Status.OK else text
