"""The Worker row of one process, the beat that keeps it fresh, and the watch over the rows that the process owns."""

from __future__ import annotations

import logging
import os
import resource
import socket
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import datetime, timedelta
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Protocol
from uuid import UUID

from django.db import Error, transaction

from django_jobs import clock, transitions
from django_jobs.conf import get_settings
from django_jobs.contention import is_connection_loss, is_contention, passes_over_locks, retried
from django_jobs.execution.endings import UNSTORABLE
from django_jobs.execution.run import Run
from django_jobs.fields import uuid7
from django_jobs.models import JobExecution, Worker
from django_jobs.states import Status

logger = logging.getLogger("django_jobs.liveness")


@cache
def package_version() -> str:
    """Return the installed version of django_jobs, "" when it runs from a bare source tree."""
    try:
        return version("django-outbox-jobs")
    except PackageNotFoundError:
        return ""


def memory_in_use() -> int | None:
    """Return the resident memory of this process in bytes, or its peak where the system does not tell more; or None."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


class Liveness:
    """The Worker row of this process: registered at the start under a new id, kept fresh, and retired at the end."""

    def __init__(
        self,
        *,
        roles: list[str],
        queues: list[str] | None,
        names: list[str],
        slots: int,
        using: str,
    ) -> None:
        self.using = using
        # Called when this process was declared dead: it owns none of its runs any more.
        self.on_lost: Callable[[], None] = lambda: None
        self.worker_id: UUID = uuid7()
        self.host = socket.gethostname()[:255]
        self.pid = os.getpid()
        self._described = {"roles": roles, "queues": queues, "names": names, "slots": slots}

    @property
    def label(self) -> str:
        """Host and process id, for error entries."""
        return f"{self.host} pid {self.pid}"

    def register(self) -> None:
        """Write a row under a new id; rows of the old id no longer belong to this process."""
        clock.refresh(self.using)
        now = clock.now(self.using)
        self.worker_id = uuid7()
        Worker.objects.using(self.using).create(
            id=self.worker_id,
            host=self.host,
            pid=self.pid,
            version=package_version(),
            memory=memory_in_use(),
            started_at=now,
            heartbeat_at=now,
            **self._described,
        )

    def tick(self, now: datetime | None = None) -> float:
        """Beat: show that this process is alive, and clear any suspicion; register again when the row is gone."""
        clock.refresh(self.using)
        if not self._beat(now, using=self.using):
            logger.warning("this worker was declared dead; it drops its runs and registers again")
            self.on_lost()
            self.register()
        return get_settings().heartbeat_interval

    @retried
    def _beat(self, now: datetime | None, *, using: str) -> int:
        """Write the beat, with the time at which it gets through; return 0 if the row is gone."""
        mine = Worker.objects.using(using).filter(pk=self.worker_id, stopped_at__isnull=True)
        return mine.update(heartbeat_at=now or clock.now(using), suspected_at=None, memory=memory_in_use())

    def retire(self, reason: str) -> None:
        """Mark this process as stopped, so that nobody waits for its next beat."""
        now = clock.now(self.using)
        Worker.objects.using(self.using).filter(pk=self.worker_id).update(stopped_at=now, stop_reason=reason[:255])


class Runs(Protocol):
    """The part of the engine that the watch needs."""

    def running(self) -> Mapping[UUID, Run]:
        """Runs inside their handlers, by execution id."""

    def owned(self) -> Iterable[UUID]:
        """Every execution that this process holds: running, waiting for a slot, or not written yet."""

    def unstored(self) -> Collection[UUID]:
        """Executions whose handlers ended here, and whose ends could not be stored."""

    def cancel(self, run: Run) -> None:
        """Tell a run that its cancel was asked for."""

    def lost(self, run: Run) -> None:
        """Tell a run that its row no longer belongs to it; its outcome is dropped."""


class Watch:
    """Watches the rows this process owns: carries cancels to handlers and progress to rows, and releases strays."""

    INTERVAL = 1.0
    RECONCILE_EVERY = timedelta(seconds=10)

    def __init__(self, liveness: Liveness, runs: Runs) -> None:
        self._liveness = liveness
        self._runs = runs
        self._reconciled_at: datetime | None = None
        self._strays: set[tuple[UUID, int]] = set()
        self._progress: dict[UUID, object] = {}

    def tick(self, now: datetime | None = None) -> float:
        """Look once: a read by primary key while something runs, else nothing."""
        using = self._liveness.using
        now = now or clock.now(using)
        running = self._runs.running()
        if running:
            self._look(running, now)
        if self._reconciled_at is not None and self._reconciled_at > now:
            # The clock was set back: how long ago the last look was is not known any more.
            self._reconciled_at, self._strays = now, set()
        if not clock.is_within(self.RECONCILE_EVERY, self._reconciled_at, now):
            self._reconciled_at = now
            self._reconcile(now)
        return self.INTERVAL

    def _look(self, running: Mapping[UUID, Run], now: datetime) -> None:
        rows = JobExecution.objects.using(self._liveness.using).filter(pk__in=list(running))
        seen = {pk: rest for pk, *rest in rows.values_list("pk", "run_no", "status", "cancel_requested_at")}
        still = self._runs.running()
        for pk, run in running.items():
            if still.get(pk) is not run:
                continue
            run_no, status, marked = seen.get(pk, (None, None, None))
            if run_no != run.execution.run_no or status != Status.RUNNING:
                self._runs.lost(run)
            elif marked is not None:
                self._runs.cancel(run)
        # After all cancels: a write that the database refuses ends this tick.
        if new := [run for pk, run in running.items() if self._progress.get(pk) is not run.progress]:
            self._write_progress(new, now)
        self._progress = {pk: done for pk, done in self._progress.items() if pk in still}

    def _write_progress(self, runs: list[Run], now: datetime) -> None:
        """Write the reported progress; a row that another transaction holds is skipped until the next look."""
        using = self._liveness.using
        reported = {run.execution.pk: run.progress for run in runs}
        mine = JobExecution.objects.using(using).running()
        done: list[UUID] = []
        try:
            with transaction.atomic(using=using):
                free = set(reported)
                if passes_over_locks(using):
                    rows = JobExecution.objects.using(using).filter(pk__in=list(reported))
                    free = set(rows.select_for_update(skip_locked=True).values_list("pk", flat=True))
                for row in (run.execution for run in runs if run.execution.pk in free):
                    done.append(row.pk)
                    mine.filter(pk=row.pk, run_no=row.run_no).update(progress=reported[row.pk], updated_at=now)
        except Error as error:
            passes = is_contention(error) or is_connection_loss(error, using)
            # The last one was refused for its content, and is not tried again.
            done = [] if passes else done[-1:]
            raise
        finally:
            self._progress.update({pk: reported[pk] for pk in done})

    def _reconcile(self, now: datetime) -> None:
        """Settle rows that belong to this process by the table, but that it does not know.

        Either the reply to their claim was lost, and they are handed back; or their handlers ended here but the end
        could not be stored: they would run twice if they were handed back, so they end with an error.
        """
        using = self._liveness.using
        rows = JobExecution.objects.using(using).of_worker(self._liveness.worker_id)
        given = {(row.pk, row.run_no): row for row in rows.only("pk", "run_no")}
        # After the read, so that a row which was claimed meanwhile is known by now, or missing from the read.
        owned = set(self._runs.owned())
        strays = {ident for ident in given if ident[0] not in owned}
        due, self._strays = strays & self._strays, strays - self._strays
        for ident in due:
            row, unstored = given[ident], ident[0] in self._runs.unstored()
            ending = transitions.fail(row, error=UNSTORABLE) if unstored else transitions.release(row)
            if not transitions.finish([ending], now=now, using=using, wait=False):
                continue
            what = "ended" if unstored else "handed back: the reply to its claim was lost"
            logger.warning("execution %s was %s", ident[0], what)
