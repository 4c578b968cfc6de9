"""What is paused now, as stage, the scheduler, direct mode and the admin ask for it; services.pauses changes it."""

from __future__ import annotations

from django_jobs import registry
from django_jobs.models import JobState, QueueState

# More than anybody pauses: no read is without an end.
LIMIT = 10_000


def paused_jobs(using: str) -> frozenset[str]:
    """Return the names whose rows must not start and whose ticks are left out, with all names of each such job.

    A pause outlives a rename: it holds for the job that has the paused name among its aliases now.
    """
    states = JobState.objects.using(using).filter(paused_at__isnull=False)
    names = set(states.values_list("job_name", flat=True)[:LIMIT])
    for name in tuple(names):
        if (job := registry.find(name)) is not None:
            names.update((job.name, *job.aliases))
    return frozenset(names)


def paused_queues(using: str) -> frozenset[str]:
    """Return the queues from which nothing is claimed."""
    states = QueueState.objects.using(using).filter(paused_at__isnull=False)
    return frozenset(states.values_list("queue", flat=True)[:LIMIT])
