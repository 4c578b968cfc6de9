"""Fire cron ticks, each as one row however many schedulers run: the scheduler role of runjobs."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import IntegrityError, connections, transaction
from django.db.models import Case, F, QuerySet, Value, When

from django_jobs import clock, pauses, registry, transitions
from django_jobs.contention import passes_over_locks, retried, short_transaction
from django_jobs.definition import Job
from django_jobs.fields import UTCDateTimeField
from django_jobs.models import JobExecution, JobState
from django_jobs.options import PushOptions
from django_jobs.runtime.portions import contained, portions
from django_jobs.schedules import Cron
from django_jobs.services.hints import hint
from django_jobs.services.keys import held_by_namesake, is_key_conflict, overlap_key
from django_jobs.services.push import build
from django_jobs.signals import emit, job_pushed
from django_jobs.states import Skip

logger = logging.getLogger("django_jobs.scheduler")

# Seconds, even without a tick: the clock may be set, and other processes change the stored state.
MAX_DELAY = 10.0
AGAIN_AFTER_FAILURE = 5.0
LOOK_AGAIN = 1.0
INSTANT = timedelta(microseconds=1)
MIN_GRACE, MAX_GRACE = timedelta(seconds=5), timedelta(hours=1)
# misfire="all" fires at most this many of the newest missed ticks; no more missed ones are counted either.
MOST = 100
# A cursor this far ahead was written under a wrong clock, and no tick would fire before that time.
AHEAD = timedelta(days=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """The decision about a job's ticks that have come: which to fire, and which to count as missed."""

    fire: tuple[datetime, ...]
    missed: int
    newest: datetime
    following: datetime


class Scheduler:
    """Compares the stored cursor of each cron job with the clock."""

    def __init__(self, *, using: str) -> None:
        self._using = using
        # The schedule that this process stored for each job. It does so once, so that older code, which still runs
        # during a deploy, does not bring its own schedule back.
        self._settled: dict[str, str] = {}

    def tick(self, now: datetime | None = None) -> float:
        """Fire what is due and return the seconds to the next tick, at most ten."""
        moment = now or clock.now(self._using)
        jobs = [(job, job.cron) for job in registry.all_jobs() if job.cron is not None]
        self._settle([job for job, cron in jobs if self._settled.get(job.name) != str(cron)], moment)
        delay = MAX_DELAY
        for page in portions(jobs):
            states = JobState.objects.using(self._using).in_bulk([job.name for job, _ in page])
            for job, cron in page:
                following: datetime | float = AGAIN_AFTER_FAILURE
                with contained(logger, f"{job.name} could not fire and will be tried again", using=self._using):
                    following = self._look(job, cron, states.get(job.name), moment)
                if isinstance(following, datetime):
                    following = (following - (now or clock.now(self._using))).total_seconds()
                delay = min(delay, max(0.0, following))
        return delay

    def _settle(self, jobs: list[Job[...]], now: datetime) -> None:
        """Store the schedules of this process's code; new and changed ones begin now, so that no past tick fires."""
        if not jobs:
            return
        states = JobState.objects.using(self._using)
        names = [job.name for job in jobs]
        since = {job.name: self._take_over(job, now) for job in jobs}
        stored = states.in_bulk(names)
        new = [
            JobState(job_name=job.name, schedule=str(job.cron), last_tick_at=since[job.name])
            for job in jobs
            if job.name not in stored
        ]
        if new:
            # Another process may have been faster.
            states.bulk_create(new, ignore_conflicts=True)
            stored = states.in_bulk(names)
        for job in jobs:
            state = stored.get(job.name)
            mine = str(job.cron)
            if state is not None and (state.schedule != mine or state.last_tick_at is None):
                # Older code may be firing right now, by a clock a little ahead: its tick must not come again. If
                # another process has changed the schedule meanwhile, that stays.
                begin = Value(since[job.name], output_field=UTCDateTimeField())
                cursor = Case(When(last_tick_at__gt=since[job.name], then=F("last_tick_at")), default=begin)
                states.filter(job_name=job.name, schedule=state.schedule).update(schedule=mine, last_tick_at=cursor)
            self._settled[job.name] = mine

    def _take_over(self, job: Job[...], now: datetime) -> datetime:
        """Stop older code from firing this job under a former name; return when its last tick fired."""
        if not job.aliases:
            return now
        states = JobState.objects.using(self._using).filter(job_name__in=job.aliases)
        if not states.exclude(schedule="").update(schedule=""):
            return now
        fired = states.filter(last_tick_at__gt=now).order_by("-last_tick_at")
        return fired.values_list("last_tick_at", flat=True).first() or now

    def _look(self, job: Job[...], cron: Cron, state: JobState | None, now: datetime) -> datetime | float:
        """Fire the due ticks of one job; return its next tick, or the seconds after which to look again."""
        if state is None or state.last_tick_at is None:
            # Its row was deleted; the next tick() treats the job as new.
            self._settled.pop(job.name, None)
            return LOOK_AGAIN
        if state.schedule != str(cron):
            # Newer code has changed the schedule, so this process no longer fires the job.
            return MAX_DELAY
        cursor = state.last_tick_at
        if cursor > now + AHEAD:
            logger.warning("the cron cursor of %s was at %s, ahead of the clock; setting it back", job.name, cursor)
            row = JobState.objects.using(self._using).filter(job_name=job.name, last_tick_at=cursor)
            row.update(last_tick_at=now)
            return 0.0
        due = due_ticks(job, cron, cursor, now)
        if due is None:
            return cron.next_after(cursor)
        if job.name in pauses.paused(self._using).jobs:
            done = self._skip(job, cursor, due.newest, Skip.PAUSED, len(due.fire) + due.missed)
        elif not due.fire:
            done = self._skip(job, cursor, due.newest, Skip.MISFIRE, due.missed)
        else:
            steps = zip((cursor, *due.fire), due.fire, strict=False)
            done = all(
                fire(job, tick, after=last, missed=due.missed if last == cursor else 0, using=self._using)
                for last, tick in steps
            )
        # If not, another process is firing, which may have many to fire, or may die.
        return due.following if done else LOOK_AGAIN

    def _skip(self, job: Job[...], cursor: datetime, tick: datetime, reason: str, count: int) -> bool:
        rows = _unmoved(job, cursor, self._using)
        with short_transaction(self._using):
            skipped = _is_free(rows, self._using) and rows.update(
                last_tick_at=tick, last_skip_at=tick, last_skip_reason=reason, skips=F("skips") + count
            )
        if skipped and reason == Skip.MISFIRE:
            logger.warning("%s missed %d tick%s up to %s", job.name, count, "" if count == 1 else "s", tick)
        return bool(skipped)


def due_ticks(job: Job[...], cron: Cron, cursor: datetime, now: datetime) -> Due | None:
    """Return what the job's misfire rule makes of the ticks in (cursor, now]; None when there are none.

    A tick is late when it is past its grace: half the gap to the next one, at least 5 s and at most 1 h, unless the
    job sets it. "latest" fires the newest tick if it is not late. "skip" makes up for nothing; its grace of 5 s allows
    for a scheduler that comes a little late. "all" fires the newest hundred, of any age unless the job sets a grace.
    """
    first = cron.next_after(cursor)
    if first > now:
        return None
    following = cron.next_after(first)
    newest = first if following > now else cron.previous_before(now + INSTANT)
    if newest != first:
        following = cron.next_after(newest)
    grace = timedelta(seconds=job.misfire_grace) if job.misfire_grace is not None else None
    if job.misfire == "all":
        fire = _newest(cron, cursor, newest, now, grace)
    else:
        default = MIN_GRACE if job.misfire == "skip" else min(max((following - newest) / 2, MIN_GRACE), MAX_GRACE)
        fire = (newest,) if now - newest <= (default if grace is None else grace) else ()
    missed = len(cron.between(cursor, newest, MOST + len(fire))) - len(fire)
    return Due(fire=fire, missed=missed, newest=newest, following=following)


def _newest(
    cron: Cron, cursor: datetime, newest: datetime, now: datetime, grace: timedelta | None
) -> tuple[datetime, ...]:
    ticks = cron.between(cursor, newest, MOST + 1)
    if len(ticks) > MOST:
        ticks = [newest]
        while len(ticks) < MOST:
            ticks.insert(0, cron.previous_before(ticks[0]))
    return tuple(tick for tick in ticks if grace is None or now - tick <= grace)


@retried
def fire(job: Job[...], tick: datetime, *, after: datetime, missed: int = 0, using: str) -> bool:
    """Move the cursor to the tick and write its row, or neither; False if the cursor is locked or not at `after`.

    The row is like a pushed one except for its key: with overlap="skip" all ticks and triggers of a job share one, and
    while it is taken the tick is skipped and recorded in the job's state.
    """
    connection = connections[using]
    rows = _unmoved(job, after, using)
    with short_transaction(using):
        traced = (
            {"last_skip_at": tick, "last_skip_reason": Skip.MISFIRE, "skips": F("skips") + missed} if missed else {}
        )
        if not _is_free(rows, using) or not rows.update(last_tick_at=tick, **traced):
            return False
        if missed:
            logger.warning("%s missed %d tick%s before %s", job.name, missed, "" if missed == 1 else "s", tick)
        now = clock.now(using)
        row = build(job, PushOptions(by="system"), "{}", now=now)
        row.active_key, row.tick_at = overlap_key(job), tick
        if not _is_inserted(row, job, now, using):
            state = JobState.objects.using(using).filter(job_name=job.name)
            state.update(last_skip_at=tick, last_skip_reason=Skip.OVERLAP, skips=F("skips") + 1)
            logger.warning("%s skipped its tick of %s: an execution of it is still live", job.name, tick)
            return True
        row.created = True
        hint(connection, (row,))
    # After the commit: on PostgreSQL, a receiver whose statement fails would undo the tick again and again.
    emit(job_pushed, job, row)
    return True


def _is_inserted(row: JobExecution, job: Job[...], now: datetime, using: str) -> bool:
    """Write the row of a tick; return False when an execution of the job is still live that must not overlap."""
    if held_by_namesake(row, job, row.active_key, using=using) is not None:
        return False
    try:
        with transaction.atomic(using=using):
            transitions.insert([row], now=now, using=using)
    except IntegrityError as error:
        if not is_key_conflict(error):
            raise
        return False
    return True


def _unmoved(job: Job[...], cursor: datetime, using: str) -> QuerySet[JobState]:
    """Return the job's state, if its cursor has not moved and its schedule is the one of this process."""
    return JobState.objects.using(using).filter(job_name=job.name, schedule=str(job.cron), last_tick_at=cursor)


def _is_free(rows: QuerySet[JobState], using: str) -> bool:
    """Lock a state for this transaction; return False when there is none, or another process holds it.

    Without waiting: a holder that is frozen or cut off would hold up the ticks of every job in every process.
    """
    if not passes_over_locks(using):
        # The UPDATE decides.
        return True
    return bool(rows.select_for_update(skip_locked=True).values_list("pk", flat=True))
