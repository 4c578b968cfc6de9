"""Open connections in threads of their own, within a time limit: looking up a name, for one, has none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

import redis
from redis.exceptions import ConnectionError as ServerGone
from redis.exceptions import TimeoutError as NoAnswer

from django_jobs.loop import start_thread

_thread = threading.local()


def connect_within_bounds(pool: redis.ConnectionPool) -> None:
    """Have connections of this pool be opened inside of within() only; elsewhere ServerGone is raised."""

    class Bounded(pool.connection_class):  # type: ignore[misc, name-defined]  # One of many.
        _sock: Any

        def connect(self) -> None:
            if not self._sock and not getattr(_thread, "may_wait", False):
                raise ServerGone("no connection is open")
            super().connect()

    pool.connection_class = Bounded


def within(seconds: float, do: Callable[[], object]) -> None:
    """Call `do` in a thread of its own, and raise what it raises; after these seconds NoAnswer, and it goes on alone.

    In a process that cannot start threads, which may be one that ends, it is waited for.
    """
    ended: SimpleQueue[Exception | None] = SimpleQueue()

    def run() -> None:
        _thread.may_wait = True
        try:
            do()
        except Exception as error:  # noqa: BLE001 - for the caller
            ended.put(error)
        else:
            ended.put(None)
        finally:
            _thread.may_wait = False

    try:
        start_thread(run, name="redis connect")
    except RuntimeError:
        run()
    try:
        error = ended.get(timeout=max(seconds, 0.0))
    except Empty:
        raise NoAnswer(f"no connection within {seconds:.1f} s") from None
    if error is not None:
        raise error
