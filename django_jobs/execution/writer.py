"""Write how runs ended, many in one transaction, whatever the database says; for the finisher's thread."""

from __future__ import annotations

import logging
import time
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
from django_jobs.models import JobExecution
from django_jobs.states import Status
from django_jobs.transitions import Ending

logger = logging.getLogger("django_jobs.finisher")

# At the end of the process a batch is given up on after so many seconds.
PATIENCE = 2.0


class Writer:
    """Writes batches of ended runs and tells which rows moved; puts aside those whose rows are held."""

    def __init__(
        self,
        *,
        using: str,
        tell: Callable[[list[tuple[Run, Status, datetime]]], None],
        is_stopping: Callable[[], bool],
    ) -> None:
        self._using = using
        self._tell = tell
        self._is_stopping = is_stopping
        self._keeping = Keeping(using=using)
        self.held = Held()
        # Ended here, but given up on: the watch ends these rows, since a release would start them again.
        self.unstored: set[UUID] = set()

    def write(self, batch: list[Run]) -> None:
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
                if self._is_stopping() and time.monotonic() - started > PATIENCE:
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
            self.held.put([run for run in endings if run.execution.pk in held])
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
            self.write(batch[:middle])
            self.write(batch[middle:])
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
                    self.write(batch)
                    return
                if form is ending_of:
                    logger.error("the outcome of %s could not be stored as it is: %s", run.execution, refusal)  # noqa: TRY400 - one line
                continue
            self._tell([(run, status, now) for status in moved.values()])
            self.held.put([run] if held else [])
            return
        logger.error("the outcome of %s could not be stored at all", run.execution)
        self.unstored.add(run.execution.pk)

    def _without_logs(self, run: Run, now: datetime) -> Ending | None:
        run.capture.buffer = None
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
