"""Announce pending rows again that nobody took, and delete the rows of long dead workers: the sweep role of runjobs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime, timedelta
from uuid import UUID

from django.db.models import Exists, OuterRef

from django_jobs import clock, dispatchers
from django_jobs.conf import get_settings
from django_jobs.models import JobExecution, Worker
from django_jobs.runtime.portions import PAGE, contained, move
from django_jobs.schedules import configured

logger = logging.getLogger("django_jobs.sweep")

WORKERS_KEPT = timedelta(days=7)
# Pages of pending rows in one sweep; the next one continues after them.
PAGES = 40
MAX_DELAY = 60.0
LONGEST_WAIT = timedelta(hours=1)


def seconds_until(moment: datetime, now: datetime) -> float:
    """Return the seconds until a moment, at most 60, as the clock may be set meanwhile."""
    return min(MAX_DELAY, max(0.0, (moment - now).total_seconds()))


class Sweep:
    """Runs at start and at each tick of SWEEP_CRON; safe in any number of processes."""

    def __init__(self, *, using: str) -> None:
        self._using = using
        self._due_at: datetime | None = None
        self._place: UUID | None = None

    def tick(self, now: datetime | None = None) -> float:
        """Sweep if it is time; return the seconds to the next sweep."""
        now = now or clock.now(self._using)
        if self._due_at is None or now >= self._due_at:
            with contained(
                logger, "announcing stale executions again failed and will be tried again", using=self._using
            ):
                self.rehint(now)
            with contained(logger, "removing dead workers failed and will be tried again", using=self._using):
                self.remove_workers(now)
        # Computed from now, as the setting and the clock may have changed.
        self._due_at = configured("SWEEP_CRON").next_after(now)
        return seconds_until(self._due_at, now)

    def rehint(self, now: datetime) -> int:
        """Announce pending rows again whose last hint is older than STALE_THRESHOLD; return how many.

        The threshold doubles with each hint of a row, up to an hour, as hints for rows that wait for a slot are noise.
        """
        threshold = timedelta(seconds=get_settings().stale_threshold)
        pending = JobExecution.objects.using(self._using).pending()
        hinted = 0
        for _ in range(PAGES):
            rest = pending if self._place is None else pending.filter(pk__gt=self._place)
            fields = ("pk", "queue", "rank", "hinted_at", "scheduled_at")
            page = list(rest.order_by("pk").values_list(*fields)[:PAGE])
            self._place = page[-1][0] if len(page) == PAGE else None
            stale = [
                (queue, rank, pk)
                for pk, queue, rank, hinted_at, due_at in page
                if now - hinted_at >= max(threshold, min(hinted_at - due_at, max(LONGEST_WAIT, threshold)))
            ]
            if stale:
                left = self._note_hint([pk for _, _, pk in stale], now)
                dispatchers.announce_all(row for row in stale if row[2] not in left)
                hinted += len(stale) - len(left)
            if self._place is None:
                break
        return hinted

    def _note_hint(self, ids: Sequence[UUID], now: datetime) -> set[UUID]:
        """Write when these rows were hinted; return those that could not be written, whose turn comes later."""
        unmoved = move(ids, lambda rows: rows.pending().update(hinted_at=now), using=self._using)
        return {*unmoved.held, *unmoved.refused}

    def remove_workers(self, now: datetime) -> int:
        """Delete the rows of workers silent for a week that own no running row; return how many."""
        workers = Worker.objects.using(self._using)
        owned = JobExecution.objects.using(self._using).running().filter(worker_id=OuterRef("pk"))
        dead = workers.filter(heartbeat_at__lt=now - WORKERS_KEPT).filter(~Exists(owned)).order_by("pk")
        removed = 0
        while ids := list(dead.values_list("pk", flat=True)[:PAGE]):
            count, _ = workers.filter(pk__in=ids, heartbeat_at__lt=now - WORKERS_KEPT).delete()
            removed += count
            if not count:
                break
        return removed
