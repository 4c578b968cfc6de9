"""Cancel or retry many executions, page by page; the admin's actions and `manage.py jobs` call this."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from django.db import connections

from django_jobs import clock, dispatchers, registry, transitions
from django_jobs.exceptions import JobsError
from django_jobs.models import JobExecution, jobs_alias
from django_jobs.options import attribution
from django_jobs.querysets import ExecutionQuerySet
from django_jobs.rows import by_id
from django_jobs.services import keys
from django_jobs.services._entry import after_commit, service
from django_jobs.services.hints import hint
from django_jobs.services.operations import after_cancel, cancel, known_job, retry
from django_jobs.states import Status

PAGE = 500
# The bulk of a row, and not needed here.
BULKY = ("payload", "errors", "logs", "result", "progress")


@dataclass(slots=True, kw_only=True)
class Report:
    """What became of a set of executions: how many were changed, and for each of the others why it was not."""

    done: int = 0
    skipped: list[tuple[JobExecution, str]] = field(default_factory=list)


@service
def cancel_many(queryset: ExecutionQuerySet, by: Any = None) -> Report:
    """Cancel the executions of the queryset as cancel() does, in a few statements for each page of them."""
    using = jobs_alias()
    connection = connections[using]
    user, name = attribution(by)
    report = Report()
    for rows in pages(queryset.using(using).defer(*BULKY)):
        page = JobExecution.objects.using(using).filter(pk__in=[row.pk for row in rows])
        now = clock.now(using)
        with by_id(using):
            transitions.cancel(page, now=now, by=user, by_name=name)
            transitions.mark_cancel(page, now=now, by=user, by_name=name)
        after = {row.pk: row for row in page.defer(*BULKY)}
        marked = []
        for row in rows:
            new = after.get(row.pk)
            if new is None or new.cancel_requested_at != now or new.cancelled_by != user:
                # Finished, gone, or its status changed between the two statements.
                _one(cancel, row, by, report)
                continue
            report.done += 1
            if new.status == Status.CANCELLED and new.completed_at == now:
                after_cancel(new, using=using)
            elif new.status == Status.RUNNING:
                marked.append(new.pk)
        if marked:
            after_commit(connection, partial(dispatchers.announce_cancel, marked))
    return report


@service
def retry_many(queryset: ExecutionQuerySet, by: Any = None) -> Report:
    """Retry the executions of the queryset as retry() does: keyed ones one by one, others in a statement per job."""
    using = jobs_alias()
    report = Report()
    for rows in pages(queryset.using(using).defer(*BULKY)):
        by_job: dict[str, list[JobExecution]] = {}
        for row in rows:
            job = registry.find(row.job_name)
            if job is None or row.key_digest or keys.overlap_key(job) is not None:
                _one(retry, row, by, report)
            else:
                by_job.setdefault(row.job_name, []).append(row)
        for same in by_job.values():
            _retry_unkeyed(same, by, report, using)
    return report


def _retry_unkeyed(rows: list[JobExecution], by: Any, report: Report, using: str) -> None:
    user, name = attribution(by)
    page = JobExecution.objects.using(using).filter(pk__in=[row.pk for row in rows])
    now = clock.now(using)
    retries = known_job(rows[0]).retries
    with by_id(using):
        moved = transitions.retry(page, now=now, retries=retries, by=user, by_name=name, active_key=None)
    after = {row.pk: row for row in page.defer(*BULKY)}
    retried = [row for row in after.values() if row.retried_at == now and row.retried_by == user]
    # A worker may have finished some already, and their job keeps no finished rows.
    ran = moved - len(retried)
    report.done += moved
    hint(connections[using], [row for row in retried if row.status == Status.PENDING])
    for row in rows:
        new = after.get(row.pk)
        if new is None and ran > 0:
            ran -= 1
        elif new is None or new not in retried:
            _one(retry, row, by, report)


def pages(queryset: ExecutionQuerySet) -> Iterator[list[JobExecution]]:
    """Yield the rows in pages, up to the newest there is now: rows may be added faster than they are handled."""
    ordered = queryset.order_by("pk")
    end = ordered.values_list("pk", flat=True).last()
    page = list(ordered.filter(pk__lte=end)[:PAGE]) if end is not None else []
    while page:
        yield page
        page = list(ordered.filter(pk__gt=page[-1].pk, pk__lte=end)[:PAGE])


def _one(operation: Callable[[JobExecution, Any], JobExecution], row: JobExecution, by: Any, report: Report) -> None:
    try:
        operation(row, by)
    except JobsError as reason:
        report.skipped.append((row, str(reason)))
    else:
        report.done += 1
