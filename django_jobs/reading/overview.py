"""Each job and queue, and the names that are not registered, as the code declares them and the tables know them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from django_jobs import clock, registry
from django_jobs.models import JobExecution, JobState
from django_jobs.reading.figures import KEPT, Figure, Figures, collect
from django_jobs.reading.queues import QueueFacts, queue_facts
from django_jobs.states import Parked, Skip, Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django_jobs.definition import Job


@dataclass(frozen=True, slots=True)
class Kind:
    """Rows that are counted together."""

    name: str
    # The word for such a row.
    word: Any
    # The value of the list's status filter that shows them.
    listed_as: str


LIVE = (
    *(Kind(status.value, status.label, status.value) for status in (Status.RUNNING, Status.PENDING, Status.SCHEDULED)),
    Kind("parked", _("parked"), "parked"),
    Kind(Parked.UNKNOWN.value, _("parked: no worker knows the job"), "parked"),
)
FINISHED = tuple(Kind(name, Status(name).label, name) for name in KEPT)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """One registered job."""

    job: Job[...]
    state: JobState | None
    # The state that holds its pause: that of an old name, if it was paused before it was renamed.
    pause: JobState | None
    # The execution that ended last.
    last: JobExecution | None
    # Only kinds with rows.
    counts: dict[Kind, Figure]
    now: datetime

    @property
    def next_run(self) -> datetime | None:
        """The next tick, whether or not it will be skipped; None for pushed jobs."""
        return self.job.cron.next_after(self.now) if self.job.cron else None

    @property
    def why_skipped(self) -> Any:
        """Why its last skipped tick was skipped."""
        reason = self.state.last_skip_reason if self.state else ""
        return Skip(reason).label if reason in Skip.values else reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """Everything that was read."""

    jobs: list[JobFacts]
    queues: list[QueueFacts]
    # Names in rows that neither a worker nor this process knows, with the number of rows that wait.
    nameless: dict[str, Figure]


def read_overview(jobs: Sequence[Job[...]], *, using: str) -> Overview:
    """Read everything in four queries, whatever the number of jobs and rows."""
    now = clock.now(using)
    figures = collect(jobs, using=using)
    states = JobState.objects.using(using).in_bulk([name for job in jobs for name in job.names])
    last = _last(jobs, figures, using)
    facts = [
        JobFacts(
            job=job,
            state=states.get(job.name),
            pause=next((s for name in job.names if (s := states.get(name)) is not None and s.paused_at), None),
            last=last.get(job.name),
            counts={kind: figure for kind in (*LIVE, *FINISHED) if (figure := figures.of(job, kind.name))},
            now=now,
        )
        for job in jobs
    ]
    nameless = {name: figure for name, figure in figures.unknown().items() if registry.find(name) is None}
    return Overview(jobs=facts, queues=queue_facts(figures, using=using), nameless=nameless)


def _last(jobs: Sequence[Job[...]], figures: Figures, using: str) -> dict[str, JobExecution]:
    """Return each job's execution that ended last, by the job's name; the retention index finds them."""
    wanted = {ending: job.name for job in jobs if (ending := figures.last(job)) is not None}
    if not wanted:
        return {}
    each = Q()
    for ended, status, name in wanted:
        each |= Q(job_name=name, status=status, completed_at=ended)
    rows = JobExecution.objects.using(using).filter(each)
    columns = ("pk", "job_name", "status", "started_at", "completed_at")
    return {wanted[row.completed_at, row.status, row.job_name]: row for row in rows.only(*columns)}
