"""A connection that waits for the server to say something, kept up by a loop; for hints and for the channel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import datetime
from typing import Any

from django_jobs.dispatchers.base import Unavailable
from django_jobs.dispatchers.redis.breaker import Breaker
from django_jobs.dispatchers.redis.server import Server
from django_jobs.loop import MAX_BACKOFF, Loop

# How long one wait lasts: then it is seen whether the server is still there.
WAIT = 2.0
CONNECT_TIMEOUT = 2.0
# Over the wait itself; an answer that is later is none.
ANSWER_TIMEOUT = WAIT + 1.0


class Session(ABC):
    """Opens a connection and listens on it, and opens another one when that fails, less and less often."""

    name: str

    def __init__(self, server: Server, breaker: Breaker) -> None:
        self._server, self._breaker = server, breaker
        self._client: Any = server.client(connect=CONNECT_TIMEOUT, answer=ANSWER_TIMEOUT)
        # Why nothing is heard now, in one line; None while it is.
        self.problem: str | None = "there is no connection to Redis yet"
        self._is_closed = False
        self._loop = Loop(self._tick, name=f"redis {self.name}")

    def start(self) -> None:
        """Connect and listen in a thread."""
        self._loop.start()

    def close(self) -> None:
        """End the thread, also out of a wait; returns at once."""
        self._is_closed = True
        self._loop.stop()
        self._client.connection_pool.disconnect()

    @abstractmethod
    def _open(self) -> None:
        """Make sure that the server can serve this; then everything is looked at, since something may be missed."""

    @abstractmethod
    def _listen(self) -> float:
        """Wait up to WAIT seconds for something and pass it on; return when to go on."""

    def _tick(self, now: datetime | None = None) -> float:
        try:
            with self._server.faults():
                if self.problem is None:
                    return self._listen()
                self._open()
        except Exception as error:
            if self._is_closed:
                # The connection was closed under its reader, who may meet anything.
                return 0.0
            if self.problem is not None and isinstance(error, Unavailable):
                # It is no lost connection only: until the next attempt nobody who pushes has to find that out.
                self._breaker.trip(str(error), MAX_BACKOFF)
            self.problem = str(error)
            self._client.connection_pool.disconnect()
            raise
        finally:
            if self._is_closed:
                # One that was opened meanwhile.
                self._client.connection_pool.disconnect()
        self.problem = None
        self._breaker.reset()
        return 0.0
