"""Move rows between PENDING and SCHEDULED for stage: in portions, with hints, skipping those that cannot be moved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django_jobs import dispatchers, transitions
from django_jobs.models import JobExecution
from django_jobs.querysets import ExecutionQuerySet
from django_jobs.rows import among
from django_jobs.runtime.portions import move, portions

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

REFUSED_FOR = timedelta(minutes=1)
# After this time a row that another transaction held is tried again.
HELD_FOR = timedelta(seconds=0.5)

# Queue, rank and id of a row.
Row = tuple[str, int, UUID]


class Moves:
    """The verbs of stage for rows given by id; rows that could not be moved are left alone for a while."""

    def __init__(self, *, using: str) -> None:
        self._using = using
        # Rows that the database refused to move or that were held, and until when they are skipped.
        self._refused: dict[UUID, datetime] = {}

    def forget(self, now: datetime) -> None:
        """Try the rows again that were left alone long enough."""
        # A time further ahead than that was noted before the clock was set back.
        self._refused = {pk: until for pk, until in self._refused.items() if now < until <= now + REFUSED_FOR}

    def rows(self) -> ExecutionQuerySet:
        """Return all rows except those that are left alone now."""
        rows: ExecutionQuerySet = JobExecution.objects.using(self._using).exclude(pk__in=list(self._refused))
        return rows

    def others(self, connection: BaseDatabaseWrapper) -> tuple[str, list[Any]]:
        """Return the condition for all rows but these, to follow another one in SQL, and its parameters."""
        if not self._refused:
            return "", []
        those, ids = among(list(self._refused), connection)
        return f" AND NOT (id {those})", ids

    def promote(self, rows: Sequence[Row], now: datetime) -> None:
        """Make due rows claimable, in one statement."""
        self._hinted(rows, lambda found: transitions.promote(found, now=now), now)

    def park(self, ids: Sequence[UUID], reason: str, now: datetime) -> None:
        """Set pending rows aside, in one statement."""
        self._apply(ids, lambda found: transitions.park(found, reason, now=now), now)

    def unpark(self, rows: Sequence[Row], now: datetime) -> None:
        """Bring parked rows back, in portions."""
        for page in portions(rows):
            self._hinted(page, lambda found: transitions.unpark(found, now=now), now)

    def _hinted(self, rows: Sequence[Row], verb: Callable[[ExecutionQuerySet], Any], now: datetime) -> None:
        left = self._apply([pk for _, _, pk in rows], verb, now)
        dispatchers.announce_all(row for row in rows if row[2] not in left)

    def _apply(self, ids: Sequence[UUID], verb: Callable[[ExecutionQuerySet], Any], now: datetime) -> set[UUID]:
        """Return the rows that could not be moved."""
        unmoved = move(ids, verb, using=self._using)
        self._refused.update(dict.fromkeys(unmoved.held, now + HELD_FOR))
        self._refused.update(dict.fromkeys(unmoved.refused, now + REFUSED_FOR))
        return {*unmoved.held, *unmoved.refused}
