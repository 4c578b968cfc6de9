"""Helpers for the tests of the ticks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

from django.db import transaction
from django.dispatch import Signal

from django_jobs import dispatchers
from django_jobs.models import JobExecution
from django_jobs.runtime import stage, surplus
from tests.threads import in_thread


def rests(delay: float) -> bool:
    """Whether this is what a tick of stage returns that left nothing to do: the interval, less its own time."""
    return surplus.SOON < delay <= stage.INTERVAL


def statuses() -> dict[UUID, str]:
    """Return the status of every execution."""
    return dict(JobExecution.objects.values_list("pk", "status"))


@contextmanager
def hinted(monkeypatch: Any) -> Iterator[list[tuple[str, list[UUID], int]]]:
    """Collect the hints: queue, ids and priority."""
    hints: list[tuple[str, list[UUID], int]] = []

    def announce(queue: str, ids: Any, *, priority: int = 0) -> None:
        hints.append((queue, list(ids), priority))

    with monkeypatch.context() as patch:
        patch.setattr(dispatchers, "announce", announce)
        yield hints


@contextmanager
def heard(signal: Signal) -> Iterator[list[dict[str, Any]]]:
    """Collect the arguments of a signal."""
    calls: list[dict[str, Any]] = []

    def receive(**kwargs: Any) -> None:
        calls.append(kwargs)

    signal.connect(receive)
    try:
        yield calls
    finally:
        signal.disconnect(receive)


@contextmanager
def held(row: JobExecution, **change: Any) -> Iterator[None]:
    """Have another transaction hold the row while the block runs; its change, if any, is committed afterwards.

    The block must not wait for the row: it fails if it takes that long.
    """
    is_held, is_over = threading.Event(), threading.Event()
    waits: list[bool] = []

    def hold() -> None:
        with transaction.atomic():
            JobExecution.objects.filter(pk=row.pk).update(**change or {"error": "held"})
            is_held.set()
            waits.append(not is_over.wait(20))
            transaction.set_rollback(not change)

    thread = threading.Thread(target=in_thread, args=(hold,))
    thread.start()
    assert is_held.wait(10)
    try:
        yield
    finally:
        is_over.set()
        thread.join(30)
    assert waits == [False]
