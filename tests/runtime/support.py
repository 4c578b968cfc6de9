"""Helpers for the tests of the ticks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from uuid import UUID

from django.db import connections, transaction
from django.dispatch import Signal

from django_jobs import dispatchers
from django_jobs.models import JobExecution
from django_jobs.runtime import stage, surplus

T = TypeVar("T")


def rests(delay: float) -> bool:
    """Whether this is what a tick of stage returns that left nothing to do: the interval, less its own time."""
    return surplus.SOON < delay <= stage.INTERVAL


def in_thread(call: Callable[[], T]) -> T:
    """Return the result of the call in a new thread, which has its own connection."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append((True, call()))
        except BaseException as error:
            results.append((False, error))
        finally:
            connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert results, "the call did not return within 30 s"
    done, value = results[0]
    if not done:
        raise value
    return value  # type: ignore[no-any-return]


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Run the calls in threads that start together; return their results, in order."""
    barrier = threading.Barrier(len(calls))
    results: list[Any] = [None] * len(calls)

    def run(index: int, call: Callable[[], Any]) -> None:
        try:
            barrier.wait(10)
            results[index] = call()
        except BaseException as error:
            results[index] = error
        finally:
            connections.close_all()

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def statuses() -> dict[UUID, str]:
    """Return the status of every execution."""
    return dict(JobExecution.objects.values_list("pk", "status"))


@contextmanager
def hinted(monkeypatch: Any) -> Iterator[list[tuple[str, list[UUID], int]]]:
    """Collect the hints: queue, ids and priority."""
    hints: list[tuple[str, list[UUID], int]] = []

    def announce(queue: str, ids: Any, *, priority: int = 0) -> bool:
        hints.append((queue, list(ids), priority))
        return True

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
    """Have another transaction hold the row while the block runs; its change, if any, is committed afterwards."""
    is_held, is_over = threading.Event(), threading.Event()

    def hold() -> None:
        with transaction.atomic():
            JobExecution.objects.filter(pk=row.pk).update(**change or {"error": "held"})
            is_held.set()
            is_over.wait(10)
            transaction.set_rollback(not change)

    thread = threading.Thread(target=in_thread, args=(hold,))
    thread.start()
    assert is_held.wait(10)
    try:
        yield
    finally:
        is_over.set()
        thread.join(30)
