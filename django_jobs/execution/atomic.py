"""Atomic runs: the handler and the end of its row in one transaction, even if the reply to the commit is lost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from django.db import InterfaceError, OperationalError, connections, transaction

from django_jobs import clock, transitions
from django_jobs.contention import is_connection_loss
from django_jobs.execution import judgement
from django_jobs.execution.endings import ending_of
from django_jobs.execution.outcomes import Lost, Ok, Outcome
from django_jobs.execution.run import Run
from django_jobs.models import JobExecution, jobs_alias
from django_jobs.states import Status

logger = logging.getLogger("django_jobs")

# Seconds for which a slot waits for the database to tell what became of a commit; after that the fence decides.
SETTLE_PATIENCE = 60.0


def write_inside(run: Run, using: str) -> None:
    """Have an atomic run write its end in the handler's transaction, and ask the row if the commit has no reply.

    `finish_inside` returns False when the row no longer belongs to the run, `settle` whether its end was committed.
    """

    def finish_inside(outcome: Outcome) -> bool:
        run.outcome = outcome
        now = clock.now(using)
        ending = ending_of(run, now)
        if ending is None:
            return False
        if ending.drop:
            # Kept until the commit is certain: if the reply is lost, a deleted row could not tell whether it happened.
            ending = transitions.succeed(run.execution, logs=ending.logs, progress=ending.progress)
        return bool(transitions.finish([ending], now=now, using=using))

    def settle() -> bool:
        connections[using].close()
        rows = JobExecution.objects.using(using).filter(pk=run.execution.pk, run_no=run.execution.run_no)
        return rows.filter(status=Status.OK).exists()

    run.finish_inside, run.settle = finish_inside, settle


def execute_atomic(run: Run, execute: Callable[[Run], Outcome]) -> Outcome:
    """Run the handler, by `execute`, and write the end of its row in one transaction: both are stored, or neither."""
    outcome: Outcome | None = None
    committed: list[bool] = []
    alias = jobs_alias()
    try:
        with transaction.atomic(using=alias):
            # The first hook of the transaction: the project's hooks, which may raise, come after it.
            transaction.on_commit(lambda: committed.append(True), using=alias)
            outcome = execute(run)
            if not isinstance(outcome, Ok):
                raise _RollBack
            if run.finish_inside is not None:
                # If the run was given up, its row has been ended already.
                if run.gate.abandoned or not run.finish_inside(outcome):
                    outcome = Lost()
                    raise _RollBack
                run.recorded = True
    except _RollBack:
        pass
    except BaseException as error:  # noqa: BLE001 - the database, or a hook of the project
        outcome = _after_commit_failed(run, outcome, error, committed=bool(committed))
    return outcome or judgement.failed(run, RuntimeError("the transaction could not be opened"))


class _RollBack(Exception):
    """The handler's transaction must not be committed."""


def _after_commit_failed(run: Run, outcome: Outcome | None, error: BaseException, *, committed: bool) -> Outcome:
    if outcome is not None and not isinstance(outcome, Ok):
        # The rollback itself failed; the handler's outcome stands.
        return outcome
    if outcome is not None and committed:
        logger.error("a commit hook of %s raised; the job's own effects stand", run.job.name, exc_info=error)
        return outcome
    unanswered = run.recorded and isinstance(error, OperationalError | InterfaceError)
    # The reply to the commit was lost; only the row tells whether it happened.
    if outcome is not None and unanswered and _settle(run):
        return outcome
    run.recorded = False
    return judgement.failed(run, error)


def _settle(run: Run) -> bool:
    """Return whether the row says that the commit happened; waits for the database, unless the run is given up."""
    until, pause = time.monotonic() + SETTLE_PATIENCE, 0.05
    while True:
        try:
            return run.settle is not None and run.settle()
        except Exception as error:
            waits = time.monotonic() < until and not run.gate.abandoned
            if not waits or not is_connection_loss(error, jobs_alias()):
                logger.exception("cannot tell whether the commit of %s happened", run.job.name)
                return False
        time.sleep(pause)
        pause = min(pause * 2, 1.0)
