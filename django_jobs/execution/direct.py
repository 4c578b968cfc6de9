"""Run the rows that this process was told of in slots of its own; started by the direct dispatcher's first hint."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db.models import Q

from django_jobs import clock, pauses, registry, transitions
from django_jobs.conf import get_settings
from django_jobs.execution.backlog import Backlog, Entry
from django_jobs.execution.engine import AFTER_DRAIN, GOODBYE, Engine
from django_jobs.execution.liveness import Liveness
from django_jobs.loop import IDLE_CONNECTION, LOG_INTERVAL, MAX_BACKOFF, Loop
from django_jobs.models import JobExecution
from django_jobs.states import Status

logger = logging.getLogger("django_jobs.direct")

ROLE = "direct"
# Rows; about 4 MB. Those that do not fit are left to `runjobs`, as are all when this process dies.
BACKLOG_MAX = 10_000
# Seconds until a pending row that was not claimed, perhaps because another transaction holds it, is tried again;
# sooner for a job at its limit, as its runs in other processes may end.
AGAIN = 1.0
SOON = 0.25
# Seconds; a little less than the second within which every process notices a pause.
PAUSES_FOR = 0.9
# Seconds with nothing to do: the first rest is as long as a connection is kept, the later ones are endless.
RESTS = (IDLE_CONNECTION, 3600.0)


class DirectRunner:
    """Claims the rows of its backlog for an engine, under a Worker row of its own, until end() is called.

    It never restarts the process, which is not its own: with every slot stuck, it claims no more.
    """

    def __init__(self, *, using: str) -> None:
        settings = get_settings()
        self._using = using
        self._backlog = Backlog(BACKLOG_MAX)
        self._liveness = Liveness(
            roles=[ROLE], queues=[], names=sorted(registry.names()), slots=settings.direct_concurrency, using=using
        )
        self._engine = Engine(
            settings.direct_concurrency,
            liveness=self._liveness,
            using=using,
            on_free=self._wake,
            on_fewer=self._on_fewer,
            on_recycle=self._on_stuck,
            on_death=self._on_death,
        )
        self._claims = Loop(self.tick, name="direct", on_death=self._on_death)
        # As in runjobs: after an outage it beats before others have looked three times for dead workers.
        max_backoff = min(MAX_BACKOFF, settings.heartbeat_interval)
        self._beats = Loop(self._beat, name="beat", max_backoff=max_backoff, on_death=self._on_death)
        self._paused = (float("-inf"), frozenset[str](), frozenset[str]())
        self._is_registered = False
        self._rests = 0
        self._told_at = float("-inf")
        self._goodbye = ""
        self._ending = threading.Lock()
        # Whether it takes rows; False once it ends, is stuck or is broken.
        self.is_open = True
        # Whether one of its threads died: its runs are given up, and another runner may take its place.
        self.is_broken = False

    def start(self) -> None:
        """Start the threads; raises RuntimeError when the system cannot start any."""
        try:
            self._engine.start()
            self._beats.start()
            self._claims.start()
        except RuntimeError:
            self.is_open = False
            self._claims.stop()
            self._beats.stop()
            self._engine.shutdown(time.monotonic())
            raise

    def put(self, queue: str, ids: Sequence[UUID], *, priority: int) -> list[UUID]:
        """Run these rows as slots become free; return those that are left to others."""
        if not self.is_open:
            return list(ids)
        left_out = self._backlog.put(Entry(-priority, pk, queue) for pk in ids)
        if left_out and time.monotonic() - self._told_at > LOG_INTERVAL:
            self._told_at = time.monotonic()
            logger.warning("%d executions wait for slots in this process; more are left to runjobs", len(self._backlog))
        self._claims.wake()
        return left_out

    def look(self) -> None:
        """Look for cancel marks now; safe from any thread."""
        self._engine.look()

    def tick(self, now: datetime | None = None) -> float:
        """Claim once for the free slots; return the seconds until the next look."""
        if not self._is_registered:
            self._liveness.register()
            self._is_registered = True
        room = self._engine.room if self.is_open else 0
        told = self._backlog.take(room) if room else []
        if not told:
            return self._rest()
        self._rests = 0
        left = {row.pk: row for row in told}
        try:
            self._claim(left, told[0].queue, now or clock.now(self._using))
        finally:
            self._backlog.put_back(left.values(), delay=AGAIN)
        self._engine.is_hungry = not len(self._backlog)
        return 0.0

    def end(self, reason: str, *, drain: float) -> bool:
        """Claim nothing more, wait up to `drain` seconds for running executions, stop the rest, close the worker's row.

        What still runs then is told to stop, interrupted and handed back as at the end of runjobs, within AFTER_DRAIN
        seconds. Return whether all ends were written. A second caller waits for the first.
        """
        with self._ending:
            if self._goodbye:
                return True
            started = time.monotonic()
            self.is_open = False
            self._claims.stop()
            # A claim that is under way may still bring rows.
            self._claims.join(drain)
            self._engine.is_hungry = True
            if running := len(self._engine.running()):
                logger.info("waiting up to %g s for %d running here", drain, running)
            if not self._engine.wait_idle(started + drain):
                logger.warning("interrupting what still runs here after %g s", drain)
            deadline = started + drain + AFTER_DRAIN
            written = self._engine.shutdown(deadline - GOODBYE)
            if left := len(self._backlog):
                logger.info("%d executions that were pushed here did not start and are left to runjobs", left)
            self._say_goodbye(reason)
            self._beats.join(max(deadline - time.monotonic(), 0.1))
            return written

    def _claim(self, left: dict[UUID, Entry], queue: str, now: datetime) -> None:
        """Start rows of one queue; remove from `left` those that started, were taken by others, or are paused."""
        paused_jobs, paused_queues = self._pauses()
        limited = registry.limited_names()
        known = registry.names() - paused_jobs
        options: dict[str, Any] = {
            "queue": queue,
            "worker_id": self._liveness.worker_id,
            "now": now,
            "using": self._using,
        }
        if queue in paused_queues:
            left.clear()
        self._start(transitions.claim(names=sorted(known - limited), ids=list(left), limit=len(left), **options), left)
        if not left:
            return
        waiting = self._still_waiting(left, known)
        for pk in left.keys() - waiting.keys():
            del left[pk]
        at_limit: dict[str, list[UUID]] = {}
        for pk, name in waiting.items():
            if name in limited:
                at_limit.setdefault(registry.get(name).name, []).append(pk)
        for name, ids in at_limit.items():
            job = registry.get(name)
            self._start(transitions.claim_within(job, ids=ids, limit=len(ids), **options), left)
            self._backlog.put_back([left.pop(pk) for pk in ids if pk in left], delay=SOON, job=name)

    def _start(self, claimed: list[JobExecution], left: dict[UUID, Entry]) -> None:
        self._engine.submit(claimed)
        for row in claimed:
            del left[row.pk]

    def _still_waiting(self, told: Collection[UUID], names: Collection[str]) -> dict[UUID, str]:
        """Return the job names of rows that may still run here: pending, or of a claim whose reply was lost."""
        strays = Q(status=Status.RUNNING, worker_id=self._liveness.worker_id)
        rows = JobExecution.objects.using(self._using).filter(Q(status=Status.PENDING) | strays, pk__in=list(told))
        owned = set(self._engine.owned())
        return {pk: name for pk, name in rows.values_list("pk", "job_name") if name in names and pk not in owned}

    def _pauses(self) -> tuple[frozenset[str], frozenset[str]]:
        """Return the paused jobs and queues, as of less than a second ago."""
        asked_at, jobs, queues = self._paused
        now = time.monotonic()
        if now - asked_at > PAUSES_FOR:
            jobs, queues = pauses.paused(self._using)
            # Aged from before the query, as the answer may be out of date at once.
            self._paused = (now, jobs, queues)
        return jobs, queues

    def _rest(self) -> float:
        if not self._engine.is_hungry:
            self._engine.is_hungry = not len(self._backlog)
            if not self._engine.running():
                self._engine.hurry()
        if len(self._backlog) and self.is_open:
            # A slot that becomes free wakes this loop; rows to be tried again do not, nor does a finisher that lagged.
            return SOON
        rest = RESTS[min(self._rests, 1)]
        self._rests += 1
        return rest

    def _wake(self) -> None:
        self._claims.wake()

    def _on_fewer(self, names: Collection[str]) -> None:
        self._backlog.hasten(names)
        self._claims.wake()

    def _beat(self, now: datetime | None = None) -> float:
        if self._goodbye:
            # In this thread, whose connection works if any does, so that nobody waits for the database for ever.
            self._beats.stop()
            try:
                if self._is_registered:
                    self._liveness.retire(self._goodbye)
            finally:
                if self.is_broken:
                    # No caller of end() waits for this, so nobody else would do it.
                    self._engine.shutdown(time.monotonic() + GOODBYE)
        elif self._is_registered:
            return self._liveness.tick(now)
        return get_settings().heartbeat_interval

    def _say_goodbye(self, reason: str) -> None:
        self._goodbye = reason
        self._beats.wake()

    def _on_stuck(self, usable: bool) -> None:
        if usable or not self.is_open:
            return
        self.is_open = False
        logger.error(
            "every slot of pid %d is stuck in a handler that does not stop; until this process is restarted, it leaves "
            "all jobs to runjobs",
            self._liveness.pid,
        )

    def _on_death(self, error: BaseException) -> None:
        """Give up: this process does not write its running rows any more; as it is marked stopped, they are rescued."""
        self.is_open = False
        self.is_broken = True
        self._claims.stop()
        self._liveness.on_lost()
        self._say_goodbye(f"a thread died of {type(error).__name__}: {error}")
