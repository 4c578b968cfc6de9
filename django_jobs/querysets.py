"""Querysets of executions and workers, by state."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Self
from uuid import UUID

from django.db import models, router
from django.db.models import Case, When

from django_jobs.conf import get_settings
from django_jobs.states import FINAL, LIVE, Status

if TYPE_CHECKING:
    from django_jobs.models import JobExecution, Worker  # noqa: F401 - named in strings below


def key_digest(organization_id: str | None, key: str) -> str:
    """Return the fixed-length digest of a dedup key within its organization, exact under every collation."""
    # The length prefix tells ("a", "bc") from ("ab", "c"), and no organization from the organization "".
    scope = "-" if organization_id is None else f"{len(organization_id)}:{organization_id}"
    return hashlib.blake2b(f"{scope}\n{key}".encode(), digest_size=24).hexdigest()


def lost_after() -> timedelta:
    """Return how old a heartbeat may be before others take its worker for dead."""
    return timedelta(seconds=get_settings().worker_lost_after)


def is_fresh(heartbeat_at: datetime, now: datetime) -> bool:
    """Whether a heartbeat is no older than WORKER_LOST_AFTER.

    One that is further ahead than that is from before the clock was set back; its worker may have died since.
    """
    return abs(now - heartbeat_at) < lost_after()


class ExecutionQuerySet(models.QuerySet["JobExecution"]):
    """Executions by their state."""

    def pending(self) -> Self:
        """Rows a worker may claim now."""
        return self.filter(status=Status.PENDING)

    def running(self) -> Self:
        """Rows a worker owns."""
        return self.filter(status=Status.RUNNING)

    def scheduled(self) -> Self:
        """Rows that wait for their time, a retry, or the reason for which they are parked to go."""
        return self.filter(status=Status.SCHEDULED)

    def live(self) -> Self:
        """Rows that are not finished."""
        return self.filter(status__in=LIVE)

    def finished(self) -> Self:
        """Rows that only a person can move again."""
        return self.filter(status__in=FINAL)

    def parked(self) -> Self:
        """Scheduled rows that wait for something other than their time."""
        return self.scheduled().exclude(parked_reason="")

    def due(self, now: datetime) -> Self:
        """Scheduled rows whose time has come, without parked ones."""
        return self.scheduled().filter(parked_reason="", scheduled_at__lte=now)

    def among_jobs(self, names: Iterable[str]) -> Self:
        """Rows with these names; a filter on top of the index that the rest of the query uses."""
        # In a CASE, as the database would otherwise use an index of names, and read every row these jobs ever left.
        known = Case(When(job_name__in=sorted(names), then=True), default=False, output_field=models.BooleanField())
        return self.alias(is_of_jobs=known).filter(is_of_jobs=True)

    def of_worker(self, worker_id: UUID) -> Self:
        """Running rows that belong to this worker."""
        return self.running().filter(worker_id=worker_id)

    def with_key(self, organization_id: str | None, key: str) -> Self:
        """Rows pushed with this dedup key, live or not."""
        return self.filter(key_digest=key_digest(organization_id, key))

    @property
    def written_to(self) -> str:
        """The alias to which this queryset writes; `db` is the one for reads until the first write."""
        alias: str | None = self._db  # type: ignore[attr-defined]  # Missing in the stubs.
        return alias or router.db_for_write(self.model)

    def delete_finished(self) -> int:
        """Delete the finished rows of this queryset in one statement and return how many; live rows stay."""
        # Without the collector: these rows have no relations, and it would load every row first.
        return self.finished()._raw_delete(self.written_to)


class WorkerQuerySet(models.QuerySet["Worker"]):
    """Workers by heartbeat."""

    def fresh(self, now: datetime) -> Self:
        """Workers that have beaten within WORKER_LOST_AFTER and have not stopped; see is_fresh()."""
        span = lost_after()
        return self.filter(stopped_at__isnull=True, heartbeat_at__gt=now - span, heartbeat_at__lt=now + span)
