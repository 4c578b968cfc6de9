"""The context of the page of jobs: what reading.overview found, as text, with the URLs and buttons of the page."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from django.utils.html import escape

from django_jobs.admin import formatting
from django_jobs.reading import words
from django_jobs.reading.figures import COUNTED
from django_jobs.reading.overview import FINISHED, LIVE, JobFacts, Kind, read_overview

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from django_jobs.definition import Job
    from django_jobs.models import JobExecution
    from django_jobs.reading.figures import Figure
    from django_jobs.reading.queues import QueueFacts

# Unregistered names take a line each, and there may be any number of them.
LISTED = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """A number of executions, and the list that shows them."""

    figure: Figure
    word: Any
    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One registered job, as the template shows it."""

    facts: JobFacts
    # Its executions.
    url: str
    live: list[Count]
    kept: list[Count]
    # May the user run it?
    may_run: bool

    @property
    def job(self) -> Job[...]:
        return self.facts.job

    @property
    def last(self) -> JobExecution | None:
        return self.facts.last

    @property
    def description(self) -> str:
        # escape(), not conditional_escape(): a description that was marked safe is still text here.
        return escape(self.job.description)

    @property
    def next_moment(self) -> str:
        return words.moment(self.facts.next_run)

    @property
    def next_in(self) -> str:
        return words.short_duration(due - self.facts.now) if (due := self.facts.next_run) else ""

    @property
    def priority(self) -> str:
        return words.priority(self.job.priority)

    @property
    def timeout(self) -> str:
        limit = self.job.effective_timeout
        return "" if limit is None else words.short_duration(timedelta(seconds=limit))

    @property
    def outcome(self) -> str:
        return formatting.badge(self.last, self.facts.now) if self.last else ""

    @property
    def ended(self) -> str:
        return formatting.ago(self.last.completed_at, self.facts.now) if self.last and self.last.completed_at else ""

    @property
    def is_paused(self) -> bool:
        return self.facts.pause is not None

    @property
    def paused_since(self) -> str:
        return words.moment(self.facts.pause.paused_at) if self.facts.pause else ""

    @property
    def skips(self) -> str:
        return str(self.facts.state.skips) if self.facts.state and self.facts.state.skips else ""

    @property
    def last_skip(self) -> str:
        return words.moment(self.facts.state.last_skip_at) if self.facts.state else ""

    @property
    def has_button(self) -> bool:
        """Whether the user may run it and it has no required parameter."""
        return self.may_run and not self.job.schema.required


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLine:
    """One queue, as the template shows it."""

    facts: QueueFacts
    # The list of its pending executions.
    url: str

    @property
    def name(self) -> str:
        return self.facts.name

    @property
    def pending(self) -> Figure:
        return self.facts.pending

    @property
    def is_paused(self) -> bool:
        return self.facts.pause is not None

    @property
    def paused_since(self) -> str:
        return words.moment(self.facts.pause.paused_at) if self.facts.pause else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """Everything the page shows below its title."""

    lines: list[Line]
    nameless: list[tuple[str, Count]]
    has_more_nameless: bool
    queues: list[QueueLine]
    # How many rows of a kind are counted at most.
    counted: int = COUNTED

    @property
    def is_cut(self) -> bool:
        """Whether some number on the page may be higher."""
        counts = [count for line in self.lines for count in (*line.live, *line.kept)]
        counts += [count for _name, count in self.nameless]
        return any(each.is_cut for each in (*(c.figure for c in counts), *(line.pending for line in self.queues)))


def overview(jobs: Sequence[Job[...]], *, using: str, list_url: str, may_run: bool) -> Overview:
    """Read what the page needs, in four queries whatever the number of jobs and rows."""

    def listed(**query: str) -> str:
        return f"{list_url}?{urlencode(query)}"

    found = read_overview(jobs, using=using)
    nameless = [
        (name, Count(figure=figure, word="", url=listed(job_name=name, status="parked")))
        for name, figure in found.nameless.items()
    ]
    return Overview(
        lines=[
            Line(
                facts=facts,
                url=listed(job_name=facts.job.name),
                live=_counts(facts, LIVE, listed),
                kept=_counts(facts, FINISHED, listed),
                may_run=may_run,
            )
            for facts in found.jobs
        ],
        nameless=nameless[:LISTED],
        has_more_nameless=len(nameless) > LISTED,
        queues=[QueueLine(facts=facts, url=listed(queue=facts.name, status="pending")) for facts in found.queues],
    )


def _counts(facts: JobFacts, kinds: Sequence[Kind], listed: Callable[..., str]) -> list[Count]:
    return [
        Count(figure=figure, word=kind.word, url=listed(job_name=facts.job.name, status=kind.listed_as))
        for kind in kinds
        if (figure := facts.counts.get(kind))
    ]
