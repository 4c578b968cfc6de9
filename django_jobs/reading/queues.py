"""Each queue, with its number of pending rows and its pause; for reading.overview."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from django_jobs import registry
from django_jobs.conf import get_settings
from django_jobs.models import QueueState

if TYPE_CHECKING:
    from django_jobs.reading.figures import Figure, Figures

# There may be any number of queues that no code names.
LISTED = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueFacts:
    """One queue."""

    name: str
    pending: Figure
    # None while it is not paused.
    pause: QueueState | None


def named_queues() -> set[str]:
    """Return the queues that jobs or the settings name."""
    return {"default", *registry.queues(), *(get_settings().queues or ())}


def queue_facts(figures: Figures, *, using: str) -> list[QueueFacts]:
    """Return the queues that jobs or the settings name, that are paused, or that have pending rows; one query."""
    paused = QueueState.objects.using(using).filter(paused_at__isnull=False).order_by("queue")
    pauses = {state.queue: state for state in paused[:LISTED]}
    names = {*named_queues(), *pauses, *sorted(figures.queues())[:LISTED]}
    return [QueueFacts(name=name, pending=figures.in_queue(name), pause=pauses.get(name)) for name in sorted(names)]
