"""`jobs cancel` and `jobs retry`: the executions with these ids, or all that pass the filters, page by page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from uuid import UUID

from django_jobs import clock, dispatchers, services
from django_jobs.cli.choosing import Filters, executions, filtered, gone
from django_jobs.cli.errors import NothingDone, UsageError
from django_jobs.cli.terminal import Terminal
from django_jobs.models import JobExecution, jobs_alias
from django_jobs.querysets import ExecutionQuerySet
from django_jobs.reading.figures import COUNTED
from django_jobs.reading.reasons import reasons, short_reason
from django_jobs.services import Report
from django_jobs.services.bulk import pages
from django_jobs.states import LIVE, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """What is done to many executions, and the words for its outcome."""

    name: str
    run: Callable[..., Report]
    done: str
    # Which rows filters without a status select.
    usual: Callable[[ExecutionQuerySet], ExecutionQuerySet]


CANCEL = Verb(
    name="cancel",
    run=services.cancel_many,
    done="cancelled (running ones are told to stop)",
    usual=lambda rows: rows.filter(status__in=LIVE),
)
RETRY = Verb(
    name="retry", run=services.retry_many, done="queued again", usual=lambda rows: rows.filter(status=Status.ERROR)
)


def act(terminal: Terminal, verb: Verb, ids: Sequence[str], filters: Filters, *, yes: bool, by: str) -> None:
    """Apply the verb to the executions with these ids, or to those that pass the filters, and report the outcome.

    Raises NothingDone when no row was changed, or when one given by id was not.
    """
    if bool(ids) is not filters.is_empty:
        raise UsageError(f"Give either ids or filters of the executions to {verb.name}.")
    using = jobs_alias()
    absent: list[UUID] = []
    if ids:
        rows, absent = executions(ids, using=using)
    else:
        rows = filtered(filters, now=clock.now(using), using=using)
        rows = verb.usual(rows) if filters.status is None else rows
        _ask(terminal, verb, rows, yes=yes)
    done, skipped = 0, Counter[str]()
    for page in pages(rows.only("pk")):
        # Nothing runs in this process; see acting.push().
        with dispatchers.get_dispatcher().without_running():
            chosen = JobExecution.objects.using(using).filter(pk__in=[row.pk for row in page])
            report = verb.run(chosen, by=by)
        done += report.done
        skipped.update(short_reason(row, why) for row, why in report.skipped)
        if ids:
            for _row, why in report.skipped:
                terminal.note(why)
        terminal.progress(f"{done:,} {verb.done.partition(' (')[0]}, {skipped.total():,} skipped")
    terminal.end_progress()
    for pk in absent:
        terminal.note(gone(pk))
    skipped.update(["it does not exist"] * len(absent))
    terminal.json({"done": done, "skipped": skipped.total(), "reasons": dict(skipped)})
    summary = _summary(verb, done, skipped)
    if not done or (ids and skipped):
        raise NothingDone(summary)
    terminal.line(summary)


def _ask(terminal: Terminal, verb: Verb, rows: ExecutionQuerySet, *, yes: bool) -> None:
    count = 0 if yes else rows.order_by().values("pk")[: COUNTED + 1].count()
    if not count:
        return
    number = f"more than {COUNTED:,}" if count > COUNTED else f"{count:,}"
    if not terminal.confirm(f"{verb.name.capitalize()} {number} execution{'' if count == 1 else 's'}?", yes=yes):
        raise NothingDone("Nothing was done.")


def _summary(verb: Verb, done: int, skipped: Counter[str]) -> str:
    text = f"{done:,} {verb.done}"
    return f"{text}, {skipped.total():,} skipped: {reasons(skipped)}." if skipped else f"{text}."
