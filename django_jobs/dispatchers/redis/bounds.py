"""Bound the waits for the server: a socket's timeout begins anew with each byte, and looking up a name has none."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Any

import redis
from redis.exceptions import ConnectionError as ServerGone
from redis.exceptions import TimeoutError as NoAnswer

from django_jobs.loop import start_thread

_thread = threading.local()
# Seconds for the answers on a new connection that nobody waits for any more.
ALONE = 60.0
# Seconds for what is there already.
AT_ONCE = 0.001


def answer_within_bounds(pool: redis.ConnectionPool) -> None:
    """Have connections of this pool heed answers_by()."""

    class Bounded(pool.connection_class):  # type: ignore[misc, name-defined]  # One of many.
        def _connect(self) -> Any:
            return _Impatient(super()._connect())

    pool.connection_class = Bounded


def connect_within_bounds(pool: redis.ConnectionPool) -> None:
    """Have connections of this pool be opened inside of within() only; elsewhere ServerGone is raised."""

    class Bounded(pool.connection_class):  # type: ignore[misc, name-defined]  # One of many.
        _sock: Any

        def connect(self) -> None:
            if not self._sock and not getattr(_thread, "may_wait", False):
                raise ServerGone("no connection is open")
            super().connect()

    pool.connection_class = Bounded


@contextlib.contextmanager
def answers_by(moment: float) -> Iterator[None]:
    """Have this thread wait for answers until the monotonic time `moment`, and then take only what is there."""
    _thread.answers_by = moment
    try:
        yield
    finally:
        del _thread.answers_by


class _Impatient:
    """A socket that waits no longer than this thread may."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def recv(self, *args: Any) -> Any:
        return self._wait(self._socket.recv, *args)

    def recv_into(self, *args: Any) -> Any:
        return self._wait(self._socket.recv_into, *args)

    def _wait(self, receive: Callable[..., Any], *args: Any) -> Any:
        usual = self._socket.gettimeout()
        left = getattr(_thread, "answers_by", math.inf) - time.monotonic()
        if usual <= left:
            return receive(*args)
        self._socket.settimeout(max(left, AT_ONCE))
        try:
            return receive(*args)
        finally:
            self._socket.settimeout(usual)


def within(seconds: float, do: Callable[[], object]) -> None:
    """Call `do` in a thread of its own, and raise what it raises; after these seconds NoAnswer, and it goes on alone.

    In a process that cannot start threads, which may be one that ends, it is waited for.
    """
    ended: SimpleQueue[Exception | None] = SimpleQueue()

    def run() -> None:
        _thread.may_wait = True
        try:
            with answers_by(time.monotonic() + ALONE):
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
