"""The lines of the page of jobs: what the code says of each job, and what the tables know of it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from django.db.models import Q
from django.utils.html import escape
from django.utils.translation import gettext_lazy as _

from django_jobs import clock, registry
from django_jobs.admin import formatting
from django_jobs.admin.figures import KEPT, Figure, Figures, collect, names
from django_jobs.admin.queues import QueueLine, queue_lines
from django_jobs.models import JobExecution, JobState
from django_jobs.states import Parked, Skip, Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django_jobs.definition import Job

# Names that nobody registered: each is one line, and there may be any number.
LISTED = 50
# The kinds of live rows, with the word for a row and the list's filter.
LIVE = (
    *((status.value, status.label, status.value) for status in (Status.RUNNING, Status.PENDING, Status.SCHEDULED)),
    ("parked", _("parked"), "parked"),
    (Parked.UNKNOWN.value, _("parked: no worker knows the job"), "parked"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """A number of executions, and the list that shows them."""

    figure: Figure
    word: Any
    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One registered job, in words; the template writes them down."""

    job: Job[...]
    # Its executions.
    url: str
    state: JobState | None
    # The state that holds its pause: one of an old name, if it was paused before it was renamed.
    pause: JobState | None
    last: JobExecution | None
    live: list[Count]
    kept: list[Count]
    now: datetime
    # May the person who looks run it?
    may_run: bool

    @property
    def description(self) -> str:
        # Also when somebody marked it as safe: it is text here.
        return escape(self.job.description)

    @property
    def next_run(self) -> datetime | None:
        """The next tick, whether or not it will be skipped; None for pushed jobs."""
        return self.job.cron.next_after(self.now) if self.job.cron else None

    @property
    def next_moment(self) -> str:
        return formatting.moment(self.next_run)

    @property
    def next_in(self) -> str:
        return formatting.short_duration(self.next_run - self.now) if self.next_run else ""

    @property
    def priority(self) -> str:
        return formatting.priority_word(self.job.priority)

    @property
    def timeout(self) -> str:
        limit = self.job.effective_timeout
        return "" if limit is None else formatting.short_duration(timedelta(seconds=limit))

    @property
    def outcome(self) -> str:
        return formatting.badge(self.last, self.now) if self.last else ""

    @property
    def ended(self) -> str:
        return formatting.ago(self.last.completed_at, self.now) if self.last and self.last.completed_at else ""

    @property
    def is_paused(self) -> bool:
        return self.pause is not None

    @property
    def paused_since(self) -> str:
        return formatting.moment(self.pause.paused_at) if self.pause else ""

    @property
    def skips(self) -> str:
        return str(self.state.skips) if self.state and self.state.skips else ""

    @property
    def last_skip(self) -> str:
        return formatting.moment(self.state.last_skip_at) if self.state else ""

    @property
    def why_skipped(self) -> Any:
        reason = self.state.last_skip_reason if self.state else ""
        return Skip(reason).label if reason in Skip.values else reason

    @property
    def has_button(self) -> bool:
        """Whether a person may run it and there is nothing to fill in."""
        return self.may_run and not self.job.schema.required


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """Everything the page shows below its title."""

    lines: list[Line]
    # Names in rows that no worker knows and nothing here is called, with how many of their rows wait.
    nameless: list[tuple[str, Count]]
    has_more_nameless: bool
    queues: list[QueueLine]


def overview(jobs: Sequence[Job[...]], *, using: str, list_url: str, may_run: bool) -> Overview:
    """Read what the page needs in four queries, whatever the number of jobs and rows."""

    def listed(**query: str) -> str:
        return f"{list_url}?{urlencode(query)}"

    def counts(job: Job[...], kinds: Sequence[tuple[str, Any, str]]) -> list[Count]:
        return [
            Count(figure=figure, word=word, url=listed(job_name=job.name, status=status))
            for kind, word, status in kinds
            if (figure := figures.of(job, kind))
        ]

    now = clock.now(using)
    figures = collect(jobs, using=using)
    states = JobState.objects.using(using).in_bulk([name for job in jobs for name in names(job)])
    last = _last(jobs, figures, using)
    lines = [
        Line(
            job=job,
            url=listed(job_name=job.name),
            state=states.get(job.name),
            pause=next((s for name in names(job) if (s := states.get(name)) is not None and s.paused_at), None),
            last=last.get(job.name),
            live=counts(job, LIVE),
            kept=counts(job, [(kind, Status(kind).label, kind) for kind in KEPT]),
            now=now,
            may_run=may_run,
        )
        for job in jobs
    ]
    nameless = [
        (name, Count(figure=figure, word="", url=listed(job_name=name, status="parked")))
        for name, figure in figures.unknown().items()
        if registry.find(name) is None
    ]
    return Overview(
        lines=lines,
        nameless=nameless[:LISTED],
        has_more_nameless=len(nameless) > LISTED,
        queues=queue_lines(figures, using=using, listed=listed),
    )


def _last(jobs: Sequence[Job[...]], figures: Figures, using: str) -> dict[str, JobExecution]:
    """Return the execution of each job that ended last, by the job's name; each is found by the retention index."""
    wanted = {ending: job.name for job in jobs if (ending := figures.last(job)) is not None}
    if not wanted:
        return {}
    each = Q()
    for ended, status, name in wanted:
        each |= Q(job_name=name, status=status, completed_at=ended)
    rows = JobExecution.objects.using(using).filter(each)
    columns = ("pk", "job_name", "status", "started_at", "completed_at")
    return {wanted[row.completed_at, row.status, row.job_name]: row for row in rows.only(*columns)}
