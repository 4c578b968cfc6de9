"""Run claimed rows, from slot to written end; used by the worker role of runjobs and by processes in direct mode."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from uuid import UUID

from django_jobs import registry
from django_jobs.execution.announcer import Announcer
from django_jobs.execution.atomic import write_inside
from django_jobs.execution.finisher import Finisher
from django_jobs.execution.liveness import Liveness, Watch
from django_jobs.execution.pool import Pool
from django_jobs.execution.run import Run
from django_jobs.loop import Loop, OnDeath
from django_jobs.models import JobExecution
from django_jobs.states import Status

# Seconds after the drain: to signal and interrupt what still runs, to write how it ended, to close the worker's row.
AFTER_DRAIN = 7.0
GOODBYE = 1.5


class Engine:
    """Runs rows in slots; one thread writes how they ended, one sends the signals, one watches the rows.

    Its owner claims up to `room` rows and submits them. `on_free` is called when there is room again after it was full;
    `on_fewer` with the names of jobs with `concurrency=` whose runs ended, so that others may start; `on_recycle` as in
    Pool.
    """

    def __init__(
        self,
        slots: int,
        *,
        liveness: Liveness,
        using: str,
        on_free: Callable[[], None],
        on_fewer: Callable[[Collection[str]], None] = lambda names: None,
        on_recycle: Callable[[bool], None] = lambda usable: None,
        on_death: OnDeath | None = None,
    ) -> None:
        self._liveness = liveness
        self._using = using
        self._on_fewer = on_fewer
        # Did the last claim find fewer rows than there was room for? Set by the owner.
        self.is_hungry = True
        # How many ends were written, by the status that the row got.
        self.ended: Counter[str] = Counter()
        self._announcer = Announcer(on_death=on_death)
        self._finisher = Finisher(using=using, tell=self._tell, is_quiet=self._is_quiet, on_death=on_death)
        self._pool = Pool(slots, on_ended=self._finisher.put, on_free=on_free, on_recycle=on_recycle, on_death=on_death)
        self._watch = Loop(Watch(liveness, self).tick, name="watch", on_death=on_death)
        liveness.on_lost = self._pool.lose_all

    def start(self) -> None:
        """Start the threads; slots start when they are first needed."""
        self._announcer.start()
        self._finisher.start()
        self._pool.start()
        self._watch.start()

    @property
    def loops(self) -> Sequence[Loop]:
        """The loops that have to turn while it runs."""
        return self._watch, self._pool.ladder

    @property
    def room(self) -> int:
        """How many more rows may be claimed now: none while writes or receivers of signals lag far behind."""
        if self._finisher.is_congested or self._announcer.is_congested:
            return 0
        return max(self._pool.free, 0)

    def submit(self, rows: Sequence[JobExecution]) -> None:
        """Run rows that were just claimed, at most `room` of them; see Pool.submit()."""
        self._pool.submit([self._run_of(row) for row in rows])

    def look(self) -> None:
        """Look for cancel marks now; safe from any thread."""
        self._watch.wake()

    def hurry(self) -> None:
        """Write the ends there are without waiting for more."""
        self._finisher.hurry()

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs and nothing is unwritten."""
        return self._pool.is_idle and self._finisher.is_idle

    def running(self) -> Mapping[UUID, Run]:
        """Runs in slots, by execution id."""
        return self._pool.running()

    def owned(self) -> list[UUID]:
        """Every execution that this process holds: in a slot, or ended but not written yet."""
        # In this order: a run moves from the pool to the finisher.
        return [*self._pool.running(), *self._finisher.unwritten()]

    def unstored(self) -> set[UUID]:
        """Executions whose handlers ended here but whose ends could not be stored."""
        return self._finisher.unstored

    def cancel(self, run: Run) -> None:
        """Tell a run that its cancellation was requested."""
        self._pool.cancel(run)

    def lost(self, run: Run) -> None:
        """Tell a run that its row no longer belongs to it."""
        self._pool.lost(run)

    def wait_idle(self, deadline: float) -> bool:
        """Wait for running executions until the monotonic `deadline`; return whether all ended and were written."""
        while not self.is_idle and time.monotonic() < deadline:
            self._finisher.hurry()
            time.sleep(0.01)
        return self.is_idle

    def shutdown(self, deadline: float) -> bool:
        """Signal and interrupt what still runs, write all ends, stop the threads; by the monotonic `deadline`.

        Return whether all ends were written. Rows that are submitted meanwhile are stopped as well.
        """
        if not self._pool.is_idle:
            self._pool.interrupt_all(give_up_at=deadline - 2)
            self.wait_idle(deadline - 1)
        self._watch.stop()
        written = self._finisher.stop(max(deadline - time.monotonic(), 0.1))
        self._announcer.stop(max(deadline - time.monotonic(), 0.1))
        self._pool.stop()
        self._watch.join(max(deadline - time.monotonic(), 0.1))
        return written

    def _tell(self, ended: Sequence[tuple[Run, Status, datetime]]) -> None:
        self.ended.update(status.value for _, status, _ in ended)
        self._announcer.tell(ended)
        if fewer := {run.job.name for run, _, _ in ended if run.job.concurrency is not None}:
            self._on_fewer(fewer)

    def _run_of(self, row: JobExecution) -> Run:
        job = registry.get(row.job_name)
        run = Run(row, job, worker=self._liveness.label)
        if job.atomic:
            write_inside(run, self._using)
        return run

    def _is_quiet(self) -> bool:
        """Whether no more ends are expected soon, so that waiting for a fuller batch would be in vain."""
        return self.is_hungry and self._pool.busy <= 1
