"""Write how runs ended, many in one transaction, and have the signals sent afterwards."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import datetime
from uuid import UUID

from django.db import Error, connections, transaction

from django_jobs import clock, transitions
from django_jobs.contention import is_connection_loss, is_contention, is_unable_to_write
from django_jobs.execution.endings import UNSTORABLE, ending_of, surplus_of
from django_jobs.execution.held import Held
from django_jobs.execution.keeping import Keeping
from django_jobs.execution.outcomes import Failed, Ok
from django_jobs.execution.run import Run
from django_jobs.loop import OnDeath, start_thread
from django_jobs.models import JobExecution
from django_jobs.states import Status
from django_jobs.transitions import Ending

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
        self._using = using
        self._on_death = on_death
        self._tell = tell
        self._is_quiet = is_quiet
        self._ended: deque[Run] = deque()
        self._writing: Sequence[Run] = ()
        self._held = Held()
        self._bytes = 0
        self._work = threading.Event()
        self._full = threading.Event()
        self._stopping = False
        self._stop_by = 0.0
        # Ended here, but given up on: the watch ends these rows, since a release would start them again.
        self.unstored: set[UUID] = set()
        self._thread: threading.Thread | None = None
        self._keeping = Keeping(using=using)

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
                self._write(batch)
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

    def _write(self, batch: list[Run]) -> None:
        """Try to write a batch until it is written; whatever the database says, the handlers never run again for it."""
        started = time.monotonic()
        pause, lost_connection, now = 0.05, False, None
        while True:
            try:
                now = now or clock.now(self._using)
                ended = self._finish(batch, now, lost_connection)
                break
            except Error as error:
                lost = is_connection_loss(error, self._using)
                connections[self._using].close()
                passes = lost or is_contention(error) or is_unable_to_write(error)
                if not passes and self._takes_the_plainest(batch[0]):
                    self._split(batch)
                    return
                lost_connection |= lost
                if pause == 0.05:
                    logger.warning("the outcomes of %d runs wait for the database: %s", len(batch), error)
                if self._stopping and time.monotonic() - started > BATCH_SECONDS * 40:
                    logger.error("%d outcomes were not stored, their rows will be rescued: %s", len(batch), error)  # noqa: TRY400 - one line
                    return
                time.sleep(pause)
                pause = min(pause * 2, 2.0)
            except Exception:
                logger.exception("a batch of outcomes could not be prepared")
                self._split(batch)
                return
        self._tell([(run, status, now) for run, status in ended])
        self._keeping.trim(ended)

    def _finish(self, batch: Sequence[Run], now: datetime, after_loss: bool) -> list[tuple[Run, Status]]:
        surplus = surplus_of(batch)
        # Atomic runs wrote their own end; rows that their job does not keep are still to be deleted.
        recorded = [run for run in batch if run.recorded]
        self._keeping.discard((run, Status.OK) for run in recorded)
        endings = {
            run: ending
            for run in batch
            if not run.recorded and (ending := ending_of(run, now, surplus=run in surplus)) is not None
        }
        moved = transitions.finish(list(endings.values()), now=now, using=self._using, wait=False) if endings else {}
        if after_loss and (unmoved := [ending for ending in endings.values() if ending.execution_id not in moved]):
            moved |= self._settled(unmoved, now)
        ended = [(run, Status.OK) for run in recorded]
        missing: list[Ending] = []
        for run, ending in endings.items():
            if (status := moved.get(ending.execution_id)) is None:
                missing.append(ending)
            else:
                ended.append((run, status))
        # A cancel mark turned these into rows that their job may not keep.
        self._keeping.discard((run, status) for run, status in ended if status is Status.CANCELLED)
        if missing:
            held = transitions.still_running(missing, using=self._using)
            self._held.put([run for run in endings if run.execution.pk in held])
        return ended

    def _settled(self, endings: list[Ending], now: datetime) -> dict[UUID, Status]:
        """Find what a commit did whose reply was lost with the connection: our own writes have our `now`."""
        rows = {
            row.pk: row
            for row in JobExecution.objects.using(self._using)
            .filter(pk__in=[e.execution_id for e in endings])
            .only("pk", "run_no", "status", "updated_at")
        }
        settled = {}
        for ending in endings:
            row = rows.get(ending.execution_id)
            if row is None and ending.drop:
                settled[ending.execution_id] = ending.status
            elif row is not None and row.run_no == ending.run_no and row.updated_at == now:
                settled[ending.execution_id] = Status(row.status)
        return settled

    def _takes_the_plainest(self, run: Run) -> bool:
        """Try the plainest write; if that is refused as well, the cause is not the content of the rows.

        A server that is read-only after a failover, or out of space, recovers; until then, outcomes wait as in an
        outage.
        """
        try:
            with transaction.atomic(using=self._using):
                now = clock.now(self._using)
                ending = transitions.fail(run.execution, error=UNSTORABLE)
                transitions.finish([ending], now=now, using=self._using, wait=False)
                transaction.set_rollback(True, using=self._using)
        except Error:
            connections[self._using].close()
            return False
        return True

    def _split(self, batch: list[Run]) -> None:
        """Find the row that the database refuses by halving; write a single one with less and less detail."""
        if len(batch) > 1:
            middle = len(batch) // 2
            self._write(batch[:middle])
            self._write(batch[middle:])
            return
        run = batch[0]
        # First unchanged once more: the cause, such as a time limit of the server, may have passed.
        for form in (ending_of, self._without_logs, self._without_detail, self._fixed_text):
            try:
                now = clock.now(self._using)
                with transaction.atomic(using=self._using):
                    ending = form(run, now)
                    moved = transitions.finish([ending], now=now, using=self._using, wait=False) if ending else {}
                    held = ending and not moved and transitions.still_running([ending], using=self._using)
            except Exception as refusal:  # noqa: BLE001 - logged below, or by the write that follows
                lost = is_connection_loss(refusal, self._using)
                passes = lost or is_contention(refusal) or is_unable_to_write(refusal)
                connections[self._using].close()
                if passes:
                    self._write(batch)
                    return
                if form is ending_of:
                    logger.error("the outcome of %s could not be stored as it is: %s", run.execution, refusal)  # noqa: TRY400 - one line
                continue
            self._tell([(run, status, now) for status in moved.values()])
            self._held.put([run] if held else [])
            return
        logger.error("the outcome of %s could not be stored at all", run.execution)
        self.unstored.add(run.execution.pk)

    def _without_logs(self, run: Run, now: datetime) -> Ending | None:
        run.logs = None
        return ending_of(run, now)

    def _without_detail(self, run: Run, now: datetime) -> Ending | None:
        run.progress = None
        if isinstance(run.outcome, Failed):
            entry = {"exception": run.outcome.error.get("exception", ""), "message": UNSTORABLE}
            return transitions.fail(run.execution, error=UNSTORABLE, entry=entry)
        if isinstance(run.outcome, Ok):
            return transitions.succeed(run.execution)
        return ending_of(run, now)

    def _fixed_text(self, run: Run, now: datetime) -> Ending | None:
        return transitions.fail(run.execution, error=UNSTORABLE)
