"""Announce pending rows again that nobody took, and delete the rows of long dead workers: the sweep role of runjobs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime, timedelta
from uuid import UUID

from django.db import connections
from django.db.models import Exists, OuterRef

from django_jobs import clock, dispatchers, rows
from django_jobs.conf import get_settings
from django_jobs.models import JobExecution, Worker
from django_jobs.runtime.portions import PAGE, contained, move
from django_jobs.schedules import configured

logger = logging.getLogger("django_jobs.sweep")

WORKERS_KEPT = timedelta(days=7)
# Pages of pending rows in one sweep; the next one continues after them.
PAGES = 40
# The columns that tell whether a row is to be hinted again; none of its times is far ahead.
HINTED = rows.Columns({"id", "queue", "rank", "hinted_at", "scheduled_at"}, instants_as_seconds=True)
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
        hinted = 0
        for _ in range(PAGES):
            page = self._page()
            self._place = page[-1].pk if len(page) == PAGE else None
            stale = [
                (row.queue, row.rank, row.pk)
                for row in page
                if now - row.hinted_at
                >= max(threshold, min(row.hinted_at - row.scheduled_at, max(LONGEST_WAIT, threshold)))
            ]
            if stale:
                left = self._note_hint([pk for _, _, pk in stale], now)
                dispatchers.announce_all(row for row in stale if row[2] not in left)
                hinted += len(stale) - len(left)
            if self._place is None:
                break
        return hinted

    def _page(self) -> list[JobExecution]:
        """Return the next pending rows, in the order of their ids; of their fields only HINTED."""
        connection = connections[self._using]
        # By hand: without the index, MariaDB and MySQL read all history that is older than a long backlog.
        table = rows.by_index("django_jobs_list", connection)
        after, place = ("", []) if self._place is None else (" AND id > %s", [rows.identity(self._place, connection)])
        with connection.cursor() as cursor:
            cursor.execute(
                f"SELECT {HINTED.sql(connection)} FROM {table} WHERE status = 'pending'{after} ORDER BY id LIMIT %s",  # noqa: S608 - our names
                [*place, PAGE],
            )
            return HINTED.executions(cursor.fetchall(), connection)

    def _note_hint(self, ids: Sequence[UUID], now: datetime) -> set[UUID]:
        """Write when these rows were hinted; return those that could not be written, whose turn comes later."""
        unmoved = move(ids, lambda found: found.pending().update(hinted_at=now), using=self._using)
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
