"""Hints to the dispatcher after commit: one batch per queue and atomic block, however many pushes add to it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from uuid import UUID

from django_jobs import dispatchers
from django_jobs.models import JobExecution

# The attribute in which a connection keeps the batches of its open transaction.
_BATCHES = "_django_jobs_batches"


def hint(connection: Any, executions: Iterable[JobExecution]) -> None:
    """Announce pending rows once they are committed, so never those of a savepoint that is rolled back.

    With autocommit off that moment is unknown, so nothing is announced and the poll finds the rows.
    """
    if connection.in_atomic_block:
        for row in executions:
            _open_batch(connection, row.queue).add(row)
    elif connection.get_autocommit():
        dispatchers.announce_all((row.queue, row.rank, row.pk) for row in executions)


class _Batch:
    __slots__ = ("ids", "queue", "sent")

    def __init__(self, queue: str) -> None:
        self.queue = queue
        # By rank, since a hint carries one priority.
        self.ids: dict[int, list[UUID]] = {}
        self.sent = False

    def add(self, row: JobExecution) -> None:
        self.ids.setdefault(row.rank, []).append(row.pk)

    def send(self) -> None:
        self.sent = True
        for rank in sorted(self.ids):
            dispatchers.announce(self.queue, self.ids[rank], priority=-rank)


class _Batches:
    """The batches that wait for one transaction, by savepoint stack and queue."""

    __slots__ = ("by_block", "hooks")

    def __init__(self, hooks: list[Any]) -> None:
        # Django makes a new list at commit, rollback and rollback to a savepoint; these batches are stale then.
        self.hooks = hooks
        self.by_block: dict[tuple[tuple[str | None, ...], str], _Batch] = {}


def _open_batch(connection: Any, queue: str) -> _Batch:
    batches = vars(connection).get(_BATCHES)
    if batches is None or batches.hooks is not connection.run_on_commit:
        # The outer blocks of a savepoint that was rolled back keep their earlier batches and get second ones.
        batches = vars(connection)[_BATCHES] = _Batches(connection.run_on_commit)
    block = (tuple(connection.savepoint_ids), queue)
    batch: _Batch | None = batches.by_block.get(block)
    # Directly inside a TestCase nothing commits, and captureOnCommitCallbacks() sees only callbacks registered while it
    # is open: there each push gets a batch of its own, and a batch that was sent is not reused.
    if batch is None or batch.sent or connection.atomic_blocks[-1]._from_testcase:
        batch = batches.by_block[block] = _Batch(queue)
        connection.on_commit(batch.send, robust=True)
    return batch
