"""Warnings about the whole installation (no worker, no scheduler), shown above the lists of the admin."""

from __future__ import annotations

from datetime import timedelta

from django.utils.translation import gettext as _

from django_jobs import clock, registry
from django_jobs.execution.direct import ROLE as DIRECT
from django_jobs.models import Worker, jobs_alias

# A process that has been missing for longer than this is not just being restarted.
SILENCE = timedelta(minutes=2)


def outages() -> list[str]:
    """Return a sentence with the remedy for each role that no process has filled for two minutes; one query."""
    using = jobs_alias()
    # Includes processes that have stopped since: `runjobs --once`, called every minute, is a working setup.
    seen = Worker.objects.using(using).filter(heartbeat_at__gt=clock.now(using) - SILENCE)
    roles = {role for listed in seen.values_list("roles", flat=True) for role in listed}
    found = []
    if "worker" not in roles and DIRECT in roles:
        found.append(
            _(
                "No worker has been seen for two minutes: web processes run what they push, but retries, delayed jobs, "
                "and whatever they leave unfinished must wait. Start one: manage.py runjobs"
            )
        )
    elif "worker" not in roles:
        found.append(_("No worker has been seen for two minutes, so no job runs. Start one: manage.py runjobs"))
    if "scheduler" not in roles and any(job.cron for job in registry.all_jobs()):
        found.append(
            _("No scheduler has been seen for two minutes, so no cron job fires. Start one: manage.py runjobs")
        )
    return found
