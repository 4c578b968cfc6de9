"""Make due rows claimable, park rows that nobody can run now, and bring them back; runs in every runjobs process."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection
from datetime import datetime, timedelta
from uuid import UUID

from django.db import connections
from django.db.models import Q

from django_jobs import clock, pauses, registry, rows
from django_jobs.models import JobExecution
from django_jobs.pauses import Paused
from django_jobs.runtime.fleet import Fleet
from django_jobs.runtime.moves import Moves
from django_jobs.runtime.portions import PAGE, distinct, portions
from django_jobs.runtime.surplus import Surplus
from django_jobs.runtime.worker import Observed
from django_jobs.served import Served
from django_jobs.states import Parked
from django_jobs.text import some

logger = logging.getLogger("django_jobs.stage")

# Seconds between two ticks; a little less than the second within which every process notices a pause.
INTERVAL = 0.9
# Seconds for which a claim relies on the pauses that a tick read. The next one may be late: it has lost its connection,
# the whole process was frozen, or with --once there is too much to run.
PAUSES_FOR = 1.0
# The most seconds for each phase of a tick, so that none starves the others and the pauses that were read stay fresh.
SHARE = 0.12
# Due rows are ordered by priority among this many of the oldest.
WINDOW = 5000
# Time between pages of parked rows.
PAGE_EVERY = timedelta(seconds=INTERVAL)
NAMES_EVERY = timedelta(seconds=5)
# Queues that no job declares are looked for less often: usually there are none, and an idle process should query
# little.
QUEUES_EVERY = timedelta(seconds=2)
# The columns that tell why the first scheduled row waits.
WAITING = rows.Columns({"parked_reason", "scheduled_at"})
# Those by which due rows are ordered and announced; their time is past.
DUE = rows.Columns({"id", "queue", "rank", "scheduled_at"}, instants_as_seconds=True)
# The most names that a line of the log lists.
NAMED = 5


class Stage(Observed):
    """Moves rows between SCHEDULED and PENDING, and shows the worker of its process what it saw."""

    def __init__(self, *, using: str, watch_queues: bool = False) -> None:
        """Take `watch_queues` to find the queues with pending rows, for a worker that serves any queue."""
        self._using = using
        self._watch_queues = watch_queues
        self._fleet = Fleet(using=using)
        self._moves = Moves(using=using)
        self._surplus = Surplus(self._moves, using=using)
        self._deadline = 0.0
        # When pauses were asked for last, in monotonic seconds, and the answer.
        self._paused = (float("-inf"), super().recent_pauses())
        # Reasons and names that became free; their rows are unparked by name.
        self._returning: set[tuple[str, str]] = set()
        # Where the round through all parked rows is, by reason; None at its beginning.
        self._round: dict[Parked, tuple[datetime, UUID] | None] = dict.fromkeys(Parked)
        self._first_round = set(Parked)
        self._paged_at: datetime | None = None
        self._listed: frozenset[str] | None = None
        # Unknown names that the log has told of.
        self._told: set[str] = set()
        # When the next row is due, as of the last look.
        self._due_at: datetime | None = None
        self._names_at: datetime | None = None
        self._queues_at: datetime | None = None

    def tick(self, now: datetime | None = None) -> float:
        """Stage once; return 0 when there is more to do, else the seconds to the next due row or the next interval."""
        began = time.monotonic()
        now = now or clock.now(self._using)
        self._moves.forget(now)
        self._read_pauses()
        more = bool(self.paused_jobs) and not self._park(self.paused_jobs, Q(), Parked.PAUSED, now)
        reasons = self._look()
        more |= self._promote(now)
        more |= self._park_unknown(now)
        soon = self._surplus.tick(now, self.paused_jobs, self._share())
        self.limited_jobs = self._surplus.seen
        more |= self._unpark(reasons, now)
        if not clock.is_within(QUEUES_EVERY, self._queues_at, now):
            self.look_for_queues(now)
        if more:
            return 0.0
        # Not 0: that would say that there is more.
        left = max(INTERVAL - (time.monotonic() - began), 0.001)
        return min(soon, left, self._until_due(now))

    def look_for_queues(self, now: datetime) -> None:
        """Find the queues with pending rows, if the worker serves any queue."""
        self._queues_at = now
        if self._watch_queues:
            self.pending_queues = frozenset(distinct(self._moves.rows().pending(), "queue"))

    def has_due(self, served: Served) -> bool:
        """Whether the next ticks would make waiting rows of the `served` queues claimable."""
        due = self._moves.rows().due(clock.now(self._using)).filter(served.condition()).exists()
        return bool(due) or self._surplus.waits(self.paused_jobs, served)

    def recent_pauses(self) -> Paused:
        """See Observed.recent_pauses(); the next tick still finds out what was resumed. Safe from any thread."""
        asked_at, paused = self._paused
        return paused if time.monotonic() - asked_at <= PAUSES_FOR else self._ask_for_pauses()

    def _ask_for_pauses(self) -> Paused:
        # Aged from before the query, as the answer may be out of date at once.
        asked_at = time.monotonic()
        paused = pauses.paused(self._using)
        self._paused = (asked_at, paused)
        return paused

    def _share(self, times: int = 1) -> float:
        self._deadline = time.monotonic() + SHARE * times
        return self._deadline

    def _read_pauses(self) -> None:
        paused, self.paused_queues = self._ask_for_pauses()
        # Jobs with a limit come back a few rows at a time, see Surplus.
        resumed = self.paused_jobs - paused - registry.limited_names()
        self._returning |= {(Parked.PAUSED, name) for name in resumed}
        self.paused_jobs = paused

    def _look(self) -> set[str]:
        """Note when the next row is due, and return the reasons of parked rows; one probe when nothing is scheduled."""
        first = self._first_scheduled()
        self._due_at = first.scheduled_at if first is not None and not first.parked_reason else None
        if first is None:
            return set()
        parked = self._moves.rows().scheduled().filter(parked_reason__gt="")
        return set(distinct(parked, "parked_reason"))

    def _first_scheduled(self) -> JobExecution | None:
        """Return the first scheduled row, parked ones last, or None; of its fields only WAITING."""
        # By hand: every process asks each second, and building this query costs the ORM longer than the answer.
        connection = connections[self._using]
        with connection.cursor() as cursor:
            cursor.execute(
                f"SELECT {WAITING.sql(connection)} FROM {rows.TABLE} WHERE status = 'scheduled' "  # noqa: S608 - our names
                "ORDER BY parked_reason, scheduled_at LIMIT 1"
            )
            return next(iter(WAITING.executions(cursor.fetchall(), connection)), None)

    def _promote(self, now: datetime) -> bool:
        if self._due_at is None or self._due_at > now:
            return False
        # Twice the share: due rows are what people wait for.
        self._share(2)
        window = self._oldest_due(now)
        for page in portions(window):
            self._moves.promote([(row.queue, row.rank, row.pk) for row in page], now)
            # Not before the first page: reading may have taken the whole share, and would do so in each tick.
            if self._is_over():
                return True
        waiting = self._moves.rows().scheduled().filter(parked_reason="").order_by("scheduled_at")
        self._due_at = waiting.values_list("scheduled_at", flat=True).first()
        return len(window) == WINDOW

    def _oldest_due(self, now: datetime) -> list[JobExecution]:
        """Return the oldest due rows, in the order of claims; of their fields only DUE."""
        connection = connections[self._using]
        others, refused = self._moves.others(connection)
        table = rows.by_index("django_jobs_due", connection)
        with connection.cursor() as cursor:
            cursor.execute(
                f"SELECT {DUE.sql(connection)} FROM {table} WHERE status = 'scheduled' AND parked_reason = '' "  # noqa: S608 - our names
                f"AND scheduled_at <= %s{others} ORDER BY scheduled_at, id LIMIT %s",
                [rows.instant(now, connection), *refused, WINDOW],
            )
            due = DUE.executions(cursor.fetchall(), connection)
        due.sort(key=lambda row: (row.rank, row.scheduled_at, row.pk))
        return due

    def _park_unknown(self, now: datetime) -> bool:
        """Park rows whose name no worker knows; return whether there is more to do soon."""
        if clock.is_within(NAMES_EVERY, self._names_at, now):
            return False
        # This process knows its own jobs; usually no other name is left, and the workers' rows need not be read.
        names = set(distinct(JobExecution.objects.using(self._using).all(), "job_name")) - registry.names()
        done = True
        if names and (view := self._fleet.look(now)).settled_queues:
            served = view.settled_queues.condition()
            unlisted = names - view.listed_lately
            self._told &= unlisted
            done = not unlisted or self._park(unlisted, served, Parked.UNKNOWN, now)
        self._names_at = now if done else None
        return not done

    def _park(self, names: Collection[str], where: Q, reason: str, now: datetime) -> bool:
        """Park the pending rows of these jobs; return whether none is left."""
        self._share()
        while not self._is_over():
            pending = self._moves.rows().pending().filter(where).among_jobs(names).order_by()
            page = list(pending.values_list("pk", "job_name")[:PAGE])
            if page:
                self._moves.park([pk for pk, _ in page], reason, now)
            if reason == Parked.UNKNOWN:
                self._warn({name for _, name in page})
            if len(page) < PAGE:
                return True
        return False

    def _warn(self, names: set[str]) -> None:
        """Tell of names that no worker knows, each once."""
        if new := names - self._told:
            self._told |= new
            logger.warning(
                "no live worker knows the job %s: its executions are parked until one does. If it is new, is it in the "
                "jobs.py of an installed app? If it was renamed, add the old name to its aliases; if it is gone, purge "
                "them",
                some(sorted(new), NAMED),
            )

    def _unpark(self, reasons: Collection[str], now: datetime) -> bool:
        """Bring back rows whose reason, one of `reasons`, is gone; return whether to go on soon."""
        self._share()
        if self._listed is not None or Parked.UNKNOWN in reasons:
            listed = self._fleet.look(now).listed
            if self._listed is not None:
                self._returning |= {(Parked.UNKNOWN, name) for name in listed - self._listed}
            self._listed = listed
        for reason, name in sorted(self._returning):
            if not self._unpark_name(reason, name, now):
                return True
            self._returning.discard((reason, name))
            if self._is_over():
                return True
        if self._first_round or not clock.is_within(PAGE_EVERY, self._paged_at, now):
            self._paged_at = now
            for parked in Parked:
                if parked in reasons:
                    self._unpark_page(parked, now)
                else:
                    self._round[parked] = None
                    self._first_round.discard(parked)
        # The first round is completed at once; later ones take a page a second.
        return bool(self._first_round)

    def _unpark_name(self, reason: str, name: str, now: datetime) -> bool:
        while True:
            parked = self._moves.rows().scheduled().filter(parked_reason=reason).among_jobs([name]).order_by()
            page = list(parked.values_list("queue", "rank", "pk")[:PAGE])
            self._moves.unpark(page, now)
            if len(page) < PAGE:
                return True
            if self._is_over():
                return False

    def _unpark_page(self, reason: Parked, now: datetime) -> None:
        """Look at the next parked rows of the round, which finds whatever became free while no process was looking."""
        parked = self._moves.rows().scheduled().filter(parked_reason=reason)
        place = self._round[reason]
        if place is not None:
            at, pk = place
            parked = parked.filter(scheduled_at__gte=at).filter(Q(scheduled_at__gt=at) | Q(pk__gt=pk))
        fields = ("scheduled_at", "pk", "queue", "rank", "job_name")
        page = list(parked.order_by("scheduled_at", "pk").values_list(*fields)[: PAGE * 2])
        self._round[reason] = (page[-1][0], page[-1][1]) if len(page) == PAGE * 2 else None
        free = [(queue, rank, pk) for _, pk, queue, rank, name in page if self._is_free(reason, name)]
        self._moves.unpark(free, now)
        if self._round[reason] is None:
            self._first_round.discard(reason)

    def _is_free(self, reason: str, name: str) -> bool:
        if reason == Parked.UNKNOWN:
            return self._listed is not None and name in self._listed
        job = registry.find(name)
        if reason == Parked.PAUSED:
            return name not in self.paused_jobs and (job is None or job.concurrency is None)
        # Its limit was removed; for a job that still has one, see Surplus.
        return job is not None and job.concurrency is None and name not in self.paused_jobs

    def _until_due(self, now: datetime) -> float:
        return math.inf if self._due_at is None else max(0.0, (self._due_at - now).total_seconds())

    def _is_over(self) -> bool:
        return time.monotonic() > self._deadline
