"""The pauses that keep a newly queued row waiting; for the messages of the admin and of `manage.py jobs`."""

from __future__ import annotations

from django.utils.translation import gettext as _

from django_jobs.models import JobExecution, jobs_alias
from django_jobs.pauses import paused


def pause_of(row: JobExecution) -> list[str]:
    """Return a clause for each pause of its job or its queue, to stand after a semicolon."""
    jobs, queues = paused(jobs_alias())
    found = []
    if row.job_name in jobs:
        found.append(_("the job is paused and waits for a resume"))
    if row.queue in queues:
        found.append(_("its queue is paused and waits for a resume"))
    return found
