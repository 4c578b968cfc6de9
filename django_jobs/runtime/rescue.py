"""Find running rows whose process died, and queue them again or end them; runs in every runjobs process."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from datetime import datetime, timedelta
from uuid import UUID

from django.db import DatabaseError
from django.db.models import Exists, F, OuterRef, Q

from django_jobs import clock, dispatchers, registry, transitions
from django_jobs.conf import get_settings
from django_jobs.contention import is_connection_loss
from django_jobs.definition import Job
from django_jobs.exceptions import WorkerLost
from django_jobs.models import JobExecution, Worker
from django_jobs.querysets import ExecutionQuerySet, is_fresh
from django_jobs.runtime.portions import PAGE, portions
from django_jobs.services.operations import after_cancel
from django_jobs.signals import emit, job_failed, job_finished
from django_jobs.states import Status

logger = logging.getLogger("django_jobs.rescue")

LOOKS = 3
# A look counts if it comes so many intervals after the last: an earlier one tells nothing new, before a later one
# this process may have been frozen.
EARLIEST, LATEST = 0.9, 1.5
LIMIT = 10_000
PREFIX = f"{WorkerLost.__name__}: "

# The workers that own running rows, by the id in these; None for one without a row of its own.
Owners = Mapping[UUID | None, Worker | None]


class Rescue:
    """Takes rows away from workers that are certainly dead.

    A worker is dead when it is stale by the database's clock and showed the same heartbeat in three consecutive looks
    of this process, an interval apart by its own monotonic clock. A failed or late look restarts the count, and `beat`
    is called before each look, so that neither an outage of the database nor a frozen host ends a healthy run. A worker
    that has marked itself stopped is dead at once.
    """

    def __init__(
        self,
        *,
        using: str,
        beat: Callable[[], object] = lambda: None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._using = using
        self._beat = beat
        self._monotonic = monotonic
        self._looked_at: float | None = None
        # The heartbeat that each owner showed, and in how many consecutive looks.
        self._seen: dict[UUID | None, tuple[datetime | None, int]] = {}

    def tick(self, now: datetime | None = None) -> float:
        """Look once and rescue the rows of dead workers; return the seconds to the next look."""
        interval = get_settings().heartbeat_interval
        moment = self._monotonic()
        since = None if self._looked_at is None else moment - self._looked_at
        if since is not None and since < EARLIEST * interval:
            return interval - since
        if since is None or since > LATEST * interval:
            self._seen.clear()
        # Until it has succeeded, this look does not count.
        self._looked_at = None
        self._beat()
        now = now or clock.now(self._using)
        owners = self._owners()
        self._count(owners)
        self._looked_at = moment
        self._settle({pk: owner for pk, owner in owners.items() if self._is_dead(pk, owner, now)}, now)
        return interval

    def suspect(self, now: datetime | None = None) -> int:
        """Look once, without memory of other looks, for processes that end soon; return how many rows were moved.

        A silent worker's row is marked as suspected, and its next beat clears the mark; a later call that finds a mark
        older than two intervals rescues. Calls may come from any process, at any time.
        """
        now = now or clock.now(self._using)
        patience = timedelta(seconds=2 * get_settings().heartbeat_interval)
        dead: dict[UUID | None, Worker | None] = {}
        for pk, owner in self._owners().items():
            if owner is None or owner.stopped_at is not None:
                dead[pk] = owner
            elif not is_fresh(owner.heartbeat_at, now):
                if owner.suspected_at is None or owner.suspected_at > now:
                    self._note_suspicion(owner, now)
                elif now - owner.suspected_at > patience:
                    dead[pk] = owner
        return self._settle(dead, now)

    def _note_suspicion(self, owner: Worker, now: datetime) -> None:
        unchanged = Q(pk=owner.pk, heartbeat_at=owner.heartbeat_at, suspected_at=owner.suspected_at)
        Worker.objects.using(self._using).filter(unchanged).update(suspected_at=now)

    def _owners(self) -> Owners:
        running = JobExecution.objects.using(self._using).running().order_by()
        ids = list(running.values_list("worker_id", flat=True).distinct()[:LIMIT])
        workers = Worker.objects.using(self._using).defer("roles", "queues", "names")
        found: dict[UUID | None, Worker] = {}
        for page in portions([pk for pk in ids if pk is not None]):
            found.update(workers.in_bulk(page))
        return {pk: found.get(pk) for pk in ids}

    def _count(self, owners: Owners) -> None:
        seen = {}
        for pk, owner in owners.items():
            shown = None if owner is None else owner.heartbeat_at
            heartbeat, looks = self._seen.get(pk, (None, 0))
            seen[pk] = (shown, looks + 1 if looks > 0 and heartbeat == shown else 1)
        self._seen = seen

    def _is_dead(self, pk: UUID | None, owner: Worker | None, now: datetime) -> bool:
        if owner is not None and owner.stopped_at is not None:
            return True
        is_silent = owner is None or not is_fresh(owner.heartbeat_at, now)
        return is_silent and self._seen[pk][1] >= LOOKS

    def _settle(self, dead: Owners, now: datetime) -> int:
        """Move the rows of dead owners, one by one so that none holds up the others; return how many moved."""
        fields = ("job_name", "worker_id", "started_at", "attempt", "rescues")
        moved = 0
        for ids in portions(list(dead)):
            lost = self._lost(ids, now)
            rest = lost
            while page := list(rest.order_by("pk").only(*fields)[:PAGE]):
                for row in page:
                    moved += self._settle_row(row, lost.filter(pk=row.pk), dead[row.worker_id], now)
                rest = lost.filter(pk__gt=page[-1].pk)
        return moved

    def _lost(self, worker_ids: Collection[UUID | None], now: datetime) -> ExecutionQuerySet:
        """Return the running rows of these workers, unless they are fresh again, which each UPDATE checks."""
        fresh = Worker.objects.using(self._using).fresh(now)
        mine = Q(worker_id__in=[pk for pk in worker_ids if pk is not None])
        if None in worker_ids:
            mine |= Q(worker_id__isnull=True)
        running: ExecutionQuerySet = JobExecution.objects.using(self._using).running().filter(mine)
        return running.exclude(Exists(fresh.filter(pk=OuterRef("worker_id"))))

    def _settle_row(self, row: JobExecution, lost: ExecutionQuerySet, owner: Worker | None, now: datetime) -> bool:
        job = registry.find(row.job_name)
        message = f"{_fate(row, owner)}."
        if row.rescues >= transitions.RESCUES_ALLOWED:
            message = f"this execution kills its worker: three were lost while running it; the last time, {message}"
        text = f"{PREFIX}{message}"
        entry = {
            "exception": f"{WorkerLost.__module__}.{WorkerLost.__qualname__}",
            "message": message,
            "traceback": "",
            "worker": str(row.worker_id or "") if owner is None else str(owner),
            "started_at": None if row.started_at is None else row.started_at.isoformat(),
            "failed_at": now.isoformat(),
        }
        moved: list[UUID] = []
        try:
            if job is None or job.has_retry:
                moved = transitions.rescue(lost, now=now, error=text, entry=entry)
                # A row that has attempts left but was not moved just now is no longer lost.
                lost = lost.filter(Q(attempt__gte=F("max_attempts")) | Q(rescues__gte=transitions.RESCUES_ALLOWED))
            moved = moved or transitions.bury(lost, now=now, error=text, entry=entry)
        except DatabaseError as error:
            if is_connection_loss(error, self._using):
                raise
            logger.error("%s cannot be rescued: %s", row, error)  # noqa: TRY400 - one line
            return False
        for pk in moved:
            self._tell(pk, job, attempt=row.attempt, message=message)
        return bool(moved)

    def _tell(self, pk: UUID, job: Job[...] | None, *, attempt: int, message: str) -> None:
        """Announce a row that runs again, and send the signal of the attempt that failed with its worker."""
        row = JobExecution.objects.using(self._using).filter(pk=pk).first()
        if row is None:
            return
        if row.status == Status.CANCELLED:
            after_cancel(row, using=self._using)
            return
        will_retry = row.status != Status.ERROR
        if will_retry:
            if row.status == Status.PENDING:
                dispatchers.announce_all([(row.queue, row.rank, row.pk)])
            # A worker that has claimed it since has already counted the next attempt.
            row.status, row.attempt = Status.PENDING, attempt
        if job is None:
            level, what = (logging.WARNING, "runs again") if will_retry else (logging.ERROR, "ended")
            logger.log(level, "%s %s: %s%s", row, what, PREFIX, message)
            return
        if not will_retry and job.retention(Status.ERROR) == 0:
            JobExecution.objects.using(self._using).filter(pk=row.pk).delete_finished()
        emit(job_failed, job, row, exception=WorkerLost(message), will_retry=will_retry)
        emit(job_finished, job, row)


def _fate(row: JobExecution, owner: Worker | None) -> str:
    """Return what happened to the worker of a row, in words."""
    if owner is None:
        return f"its worker {row.worker_id or ''}".rstrip() + " is not registered"
    who = f"its worker, {owner}, version {owner.version or 'unknown'},"
    if owner.stopped_at is not None:
        return f"{who} stopped at {owner.stopped_at:%Y-%m-%d %H:%M:%S} UTC"
    return f"{who} has shown no sign of life since {owner.heartbeat_at:%Y-%m-%d %H:%M:%S} UTC"
