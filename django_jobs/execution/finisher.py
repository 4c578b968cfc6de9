"""Collect ended runs and have them written in batches, by a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import datetime
from uuid import UUID

from django_jobs.execution.run import Run
from django_jobs.execution.writer import Writer
from django_jobs.loop import OnDeath, start_thread
from django_jobs.states import Status

logger = logging.getLogger("django_jobs.finisher")

BATCH_ROWS = 100
BATCH_BYTES = 256 * 1024
BATCH_SECONDS = 0.05
# Above this many unwritten runs the worker claims nothing more.
BACKLOG_MAX = 1000
BACKLOG_BYTES = 16 * 1024 * 1024


class Finisher:
    """Collects ended runs and writes them in batches from a thread of its own.

    A batch is written at 100 rows, 256 kB or 50 ms, or as soon as nothing runs any more. Each row is fenced: a run that
    lost its row changes nothing and sends no signal. A row that another transaction holds does not hold up its batch,
    but is tried again later. After each write, `tell` gets the runs whose rows moved, with the status of each and the
    time.
    """

    def __init__(
        self,
        *,
        using: str,
        tell: Callable[[list[tuple[Run, Status, datetime]]], None],
        is_quiet: Callable[[], bool],
        on_death: OnDeath | None = None,
    ) -> None:
        self._on_death = on_death
        self._is_quiet = is_quiet
        self._ended: deque[Run] = deque()
        self._writing: Sequence[Run] = ()
        self._writer = Writer(using=using, tell=tell, is_stopping=lambda: self._stopping)
        self._held = self._writer.held
        self._bytes = 0
        self._work = threading.Event()
        self._full = threading.Event()
        self._stopping = False
        self._stop_by = 0.0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread = start_thread(self._run, name="finisher", on_death=self._on_death)

    def put(self, run: Run) -> None:
        """Take over an ended run; safe from any thread, never blocks."""
        self._ended.append(run)
        count = len(self._ended)
        # Threads that add at the same time may lose a summand; it is corrected as soon as nothing is left.
        self._bytes += run.size
        if count == 1:
            self._work.set()
        if count >= BATCH_ROWS or self._bytes >= BATCH_BYTES or self._is_quiet():
            self._full.set()

    def hurry(self) -> None:
        """Write the ends there are without waiting for more."""
        self._full.set()

    @property
    def unstored(self) -> set[UUID]:
        """Executions that ended here, but whose ends were given up on."""
        return self._writer.unstored

    @property
    def is_congested(self) -> bool:
        """Whether so many ends are unwritten that no more should be claimed."""
        held = self._held
        return len(self._ended) + len(held.runs) >= BACKLOG_MAX or self._bytes + held.size >= BACKLOG_BYTES

    @property
    def is_idle(self) -> bool:
        """Whether everything is written."""
        return not self._ended and not self._writing and not self._held.runs

    def unwritten(self) -> list[UUID]:
        """Executions that ended here but are not written yet."""
        # In this order: a run moves from one to the next, and from those being written back to the held ones.
        runs = (*tuple(self._ended), *self._held.runs, *self._writing, *self._held.runs)
        return list(dict.fromkeys(run.execution.pk for run in runs))

    def stop(self, timeout: float) -> bool:
        """Write the remaining ends and end the thread; return whether that was done in time."""
        self._stop_by = time.monotonic() + timeout
        self._stopping = True
        self._work.set()
        self._full.set()
        if self._thread is not None:
            self._thread.join(timeout)
        return self.is_idle

    def _run(self) -> None:
        while True:
            if self._held.runs or not self._stopping:
                self._work.wait(self._held.seconds_left())
            if self._held.seconds_left() == 0.0:
                batch = self._take_held()
            elif not self._ended:
                if self._stopping and self._is_over():
                    return
                self._work.clear()
                # Without another look, a run that was put before the clear would wait for the next one.
                if self._ended or (self._stopping and not self._held.runs):
                    self._work.set()
                continue
            else:
                if len(self._ended) < BATCH_ROWS and self._bytes < BATCH_BYTES and not self._stopping:
                    self._full.wait(BATCH_SECONDS)
                self._full.clear()
                batch = self._take()
            try:
                self._writer.write(batch)
            except Exception:
                # This thread must live to write the next ones.
                logger.exception("a batch of outcomes was lost")
                self.unstored.update(run.execution.pk for run in batch)
            finally:
                # So that this thread holds no payload while it waits.
                self._writing = ()
                del batch

    def _take(self) -> list[Run]:
        """Take a batch of ended runs."""
        batch: list[Run] = []
        # Before it is filled, so that its runs are known at all times.
        self._writing = batch
        size = 0
        while self._ended and len(batch) < BATCH_ROWS and size < BATCH_BYTES:
            batch.append(self._ended.popleft())
            size += batch[-1].size
        self._bytes = self._bytes - size if self._ended else 0
        return batch

    def _take_held(self) -> list[Run]:
        """Take the runs whose rows were held."""
        batch = list(self._held.runs)
        # Before they leave there, so that they are known at all times.
        self._writing = batch
        self._held.clear()
        return batch

    def _is_over(self) -> bool:
        """Whether a stopping finisher has nothing left to do, or no time for it."""
        if not (held := self._held.runs):
            return True
        if time.monotonic() < self._stop_by:
            return False
        logger.error(
            "%d outcomes were not stored: another transaction holds their rows, which will be rescued", len(held)
        )
        return True
