"""The lines about queues on the page of jobs: what waits in each, and whether it is paused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from django_jobs import registry
from django_jobs.admin import formatting
from django_jobs.conf import get_settings
from django_jobs.models import QueueState

if TYPE_CHECKING:
    from collections.abc import Callable

    from django_jobs.admin.figures import Figure, Figures

# Queues that no code names may be any number.
LISTED = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLine:
    """One queue, in words; the template writes them down."""

    name: str
    pending: Figure
    # The list of its pending executions.
    url: str
    state: QueueState | None

    @property
    def is_paused(self) -> bool:
        return self.state is not None

    @property
    def paused_since(self) -> str:
        return formatting.moment(self.state.paused_at) if self.state else ""


def queue_lines(figures: Figures, *, using: str, listed: Callable[..., str]) -> list[QueueLine]:
    """Return the queues that jobs or the settings name, that are paused, or in which something waits; one query."""
    paused = QueueState.objects.using(using).filter(paused_at__isnull=False).order_by("queue")
    states = {state.queue: state for state in paused[:LISTED]}
    named = {"default", *(job.queue for job in registry.all_jobs()), *(get_settings().queues or ())}
    counts = figures.queues()
    return [
        QueueLine(
            name=name,
            pending=figures.in_queue(name),
            url=listed(queue=name, status="pending"),
            state=states.get(name),
        )
        for name in sorted({*named, *states, *sorted(counts)[:LISTED]})
    ]
