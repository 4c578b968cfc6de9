"""The names and queues that the live workers list in their rows; read by stage before it parks rows."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from django_jobs import clock
from django_jobs.models import Worker
from django_jobs.querysets import is_fresh, lost_after
from django_jobs.served import Served

# How long a name must have been unlisted: a deploy replaces the workers one after the other.
UNLISTED_FOR = timedelta(minutes=1)
EVERY = timedelta(seconds=5)
LIMIT = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The names and queues of all workers at one moment."""

    # Names that a live worker runs.
    listed: frozenset[str]
    # Names that a worker, live or not, listed within the last minute.
    listed_lately: frozenset[str]
    # Queues served by a worker that has been live for a minute.
    settled_queues: Served


class Fleet:
    """Reads the rows of the workers, at most every five seconds."""

    def __init__(self, *, using: str) -> None:
        self._using = using
        self._view: View | None = None
        self._looked_at: datetime | None = None

    def look(self, now: datetime) -> View:
        """Return a view that is at most five seconds old."""
        if self._view is None or not clock.is_within(EVERY, self._looked_at, now):
            self._view, self._looked_at = self._read(now), now
        return self._view

    def _read(self, now: datetime) -> View:
        since = now - max(UNLISTED_FOR, lost_after())
        recent = Worker.objects.using(self._using).filter(heartbeat_at__gt=since)
        fields = ("roles", "names", "queues", "started_at", "heartbeat_at", "stopped_at")
        listed: set[str] = set()
        lately: set[str] = set()
        settled = Served()
        for roles, names, queues, started_at, heartbeat_at, stopped_at in recent.values_list(*fields)[:LIMIT]:
            if "worker" not in roles:
                continue
            lately.update(names)
            if stopped_at is not None or not is_fresh(heartbeat_at, now):
                continue
            listed.update(names)
            if started_at <= now - UNLISTED_FOR:
                settled |= Served.from_row(queues)
        return View(
            listed=frozenset(listed),
            listed_lately=frozenset(lately),
            settled_queues=settled,
        )
