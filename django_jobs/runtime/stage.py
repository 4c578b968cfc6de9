"""Make due rows claimable, set rows aside that nobody can run now, and bring them back: in every runjobs process."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db.models import Q

from django_jobs import clock, pauses, registry, transitions
from django_jobs.models import JobExecution
from django_jobs.querysets import ExecutionQuerySet
from django_jobs.runtime.fleet import Fleet
from django_jobs.runtime.portions import PAGE, Unmoved, distinct, hint, move, portions
from django_jobs.runtime.worker import Pauses
from django_jobs.states import Parked

INTERVAL = 1.0
# A tick promotes for so long at most: the pauses it read must not grow old.
BUDGET = 0.5
# Due rows are put in order of priority within so many of the oldest.
WINDOW = 5000
NAMES_EVERY = timedelta(seconds=5)
REFUSED_FOR = timedelta(minutes=1)
# A row that another transaction holds is looked at again so much later.
HELD_FOR = timedelta(seconds=0.5)


class Stage(Pauses):
    """Moves rows between SCHEDULED and PENDING, and tells the worker of its process what is paused."""

    def __init__(self, *, using: str, watch_queues: bool = False) -> None:
        """Take `watch_queues` to know in which queues rows are pending, for a worker that serves any."""
        self.paused_jobs: frozenset[str] = frozenset()
        self.paused_queues: frozenset[str] = frozenset()
        self.pending_queues: frozenset[str] = frozenset()
        self._using = using
        self._watch_queues = watch_queues
        self._fleet = Fleet(using=using)
        self._deadline = 0.0
        # Rows that the database refuses to move, and until when they are left alone.
        self._refused: dict[UUID, datetime] = {}
        # Names that came back, by why their rows are parked; their rows are fetched by name.
        self._returning: set[tuple[str, str]] = set()
        # Where the round through all parked rows stands, by reason; None at its beginning.
        self._round: dict[str, tuple[datetime, UUID] | None] = {Parked.PAUSED: None, Parked.UNKNOWN: None}
        self._first_round = {Parked.PAUSED, Parked.UNKNOWN}
        self._listed: frozenset[str] | None = None
        self._names_at: datetime | None = None

    def jobs(self) -> Collection[str]:
        """See Pauses.jobs()."""
        return self.paused_jobs

    def queues(self) -> Collection[str]:
        """See Pauses.queues()."""
        return self.paused_queues

    def seen_queues(self) -> Collection[str]:
        """See Pauses.seen_queues()."""
        return self.pending_queues

    def tick(self, now: datetime | None = None) -> float:
        """Stage once; return 0 when there is more to do, else the seconds to the next due row, at most one."""
        self._deadline = time.monotonic() + BUDGET
        now = now or clock.now(self._using)
        self._refused = {pk: until for pk, until in self._refused.items() if until > now}
        self._read_pauses()
        self._park_paused(now)
        more = self._promote(now)
        self._park_unknown(now)
        more |= self._unpark(now)
        if self._watch_queues:
            self.pending_queues = frozenset(distinct(self._rows().pending(), "queue"))
        return 0.0 if more else self._until_due(now)

    def has_due(self) -> bool:
        """Whether rows wait that the next tick would make claimable."""
        return bool(self._rows().due(clock.now(self._using)).exists())

    def _rows(self) -> ExecutionQuerySet:
        return JobExecution.objects.using(self._using).exclude(pk__in=list(self._refused))

    def _read_pauses(self) -> None:
        paused = pauses.paused_jobs(self._using)
        self._returning |= {(Parked.PAUSED, name) for name in self.paused_jobs - paused}
        self.paused_jobs, self.paused_queues = paused, pauses.paused_queues(self._using)

    def _promote(self, now: datetime) -> bool:
        due = self._rows().due(now).order_by("scheduled_at", "pk")
        window = sorted(due.values_list("rank", "scheduled_at", "pk", "queue")[:WINDOW])
        for page in portions(window):
            if self._is_over():
                return True
            self._move(
                [(queue, rank, pk) for rank, _, pk, queue in page], lambda rows: transitions.promote(rows, now=now), now
            )
        return len(window) == WINDOW

    def _park_paused(self, now: datetime) -> None:
        for name in sorted(self.paused_jobs):
            self._park(Q(job_name=name), Parked.PAUSED, now)

    def _park_unknown(self, now: datetime) -> None:
        if self._names_at is not None and now - self._names_at < NAMES_EVERY:
            return
        self._names_at = now
        # What this process can run is not in question; mostly nothing is left, and no worker is asked for.
        names = set(distinct(JobExecution.objects.using(self._using).all(), "job_name")) - registry.names()
        if not names:
            return
        view = self._fleet.look(now)
        served = Q() if view.settled_queues is None else Q(queue__in=view.settled_queues)
        for name in sorted(names - view.listed_lately):
            if view.settled_queues is None or view.settled_queues:
                self._park(Q(job_name=name) & served, Parked.UNKNOWN, now)

    def _park(self, which: Q, reason: str, now: datetime) -> None:
        while not self._is_over():
            ids = list(self._rows().pending().filter(which).order_by().values_list("pk", flat=True)[:PAGE])
            if ids:
                self._leave_out(move(ids, lambda rows: transitions.park(rows, reason, now=now), using=self._using), now)
            if len(ids) < PAGE:
                return

    def _unpark(self, now: datetime) -> bool:
        """Bring back rows whose reason is gone; return whether there is more to look at soon."""
        parked = self._rows().scheduled().filter(parked_reason=Parked.UNKNOWN).order_by()
        if self._listed is not None or parked.exists():
            listed = self._fleet.look(now).listed
            if self._listed is not None:
                self._returning |= {(Parked.UNKNOWN, name) for name in listed - self._listed}
            self._listed = listed
        for reason, name in sorted(self._returning):
            if not self._unpark_name(reason, name, now):
                return True
            self._returning.discard((reason, name))
        unfinished = [reason for reason in self._round if self._unpark_page(reason, now)]
        return bool(unfinished)

    def _unpark_name(self, reason: str, name: str, now: datetime) -> bool:
        while not self._is_over():
            parked = self._rows().scheduled().filter(job_name=name, parked_reason=reason).order_by()
            page = list(parked.values_list("queue", "rank", "pk")[:PAGE])
            self._return(page, now)
            if len(page) < PAGE:
                return True
        return False

    def _unpark_page(self, reason: str, now: datetime) -> bool:
        """Look at the next parked rows of the round: what happened while no process looked comes back by this."""
        parked = self._rows().scheduled().filter(parked_reason=reason)
        place = self._round[reason]
        if place is not None:
            at, pk = place
            parked = parked.filter(scheduled_at__gte=at).filter(Q(scheduled_at__gt=at) | Q(pk__gt=pk))
        fields = ("scheduled_at", "pk", "queue", "rank", "job_name")
        page = list(parked.order_by("scheduled_at", "pk").values_list(*fields)[: PAGE * 2])
        self._round[reason] = (page[-1][0], page[-1][1]) if len(page) == PAGE * 2 else None
        self._return([(queue, rank, pk) for _, pk, queue, rank, name in page if self._is_free(reason, name)], now)
        if self._round[reason] is None:
            self._first_round.discard(reason)
        # The first round goes through at once, the later ones a page a second.
        return reason in self._first_round

    def _is_free(self, reason: str, name: str) -> bool:
        if reason == Parked.PAUSED:
            return name not in self.paused_jobs
        return self._listed is not None and name in self._listed

    def _return(self, rows: list[tuple[str, int, UUID]], now: datetime) -> None:
        for page in portions(rows):
            self._move(list(page), lambda found: transitions.unpark(found, now=now), now)

    def _move(self, rows: list[tuple[str, int, UUID]], verb: Callable[[ExecutionQuerySet], Any], now: datetime) -> None:
        left = self._leave_out(move([pk for _, _, pk in rows], verb, using=self._using), now)
        hint(row for row in rows if row[2] not in left)

    def _leave_out(self, unmoved: Unmoved, now: datetime) -> set[UUID]:
        """Pass over rows that could not be moved for a while, so that they hold up no others; return them."""
        self._refused.update(dict.fromkeys(unmoved.held, now + HELD_FOR))
        self._refused.update(dict.fromkeys(unmoved.refused, now + REFUSED_FOR))
        return {*unmoved.held, *unmoved.refused}

    def _until_due(self, now: datetime) -> float:
        waiting = self._rows().scheduled().filter(parked_reason="").order_by("scheduled_at")
        due = waiting.values_list("scheduled_at", flat=True).first()
        return INTERVAL if due is None else min(INTERVAL, max(0.0, (due - now).total_seconds()))

    def _is_over(self) -> bool:
        return time.monotonic() > self._deadline
