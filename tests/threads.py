"""Run callables in other threads, each on a connection of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from django.db import connections

T = TypeVar("T")


def on_own_connection(call: Callable[[], T]) -> T:
    """Call it and close what it opened; for threads."""
    try:
        return call()
    finally:
        connections.close_all()


def race(*calls: Callable[[], T]) -> list[T]:
    """Start the calls at the same moment and return what they return, in their order; the first exception is raised."""
    start = threading.Barrier(len(calls))

    def run(call: Callable[[], T]) -> T:
        start.wait(10)
        return on_own_connection(call)

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(60) for future in [pool.submit(run, call) for call in calls]]


class InThread:
    """One call on a thread of its own: begin now, take the result later."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._pool = ThreadPoolExecutor(1)
        self.future: Future[Any] = self._pool.submit(on_own_connection, call)

    def result(self) -> Any:
        """Return what the call returned, or raise what it raised."""
        try:
            return self.future.result(60)
        finally:
            self._pool.shutdown()


def in_thread(call: Callable[[], T]) -> T:
    """Return what the call returns in another thread, or raise what it raises."""
    return InThread(call).result()  # type: ignore[no-any-return]
