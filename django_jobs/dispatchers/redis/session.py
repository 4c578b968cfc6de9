"""A connection that waits for the server's messages, kept open by a loop; for hints and for the channel."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from datetime import datetime
from typing import Any

from django_jobs.dispatchers.base import Unavailable
from django_jobs.dispatchers.redis.bounds import answers_by
from django_jobs.dispatchers.redis.breaker import Breaker
from django_jobs.dispatchers.redis.server import Server
from django_jobs.loop import MAX_BACKOFF, Loop

# Seconds of one wait, after which we check that the server is still there.
WAIT = 2.0
CONNECT_TIMEOUT = 2.0
# Seconds; longer than the wait itself. A later answer counts as none.
ANSWER_TIMEOUT = WAIT + 1.0
# Seconds for all answers together, which may come in many parts.
PATIENCE = 10.0


class Session(ABC):
    """Opens a connection and listens on it, and opens another one when that fails, after growing pauses."""

    name: str

    def __init__(self, server: Server, breaker: Breaker) -> None:
        self._server, self._breaker = server, breaker
        self._client: Any = server.client(connect=CONNECT_TIMEOUT, answer=ANSWER_TIMEOUT)
        # Why nothing arrives now, in one line; None while it does.
        self.problem: str | None = "there is no connection to Redis yet"
        self._is_closed = False
        self._loop = Loop(self._tick, name=f"redis {self.name}")

    def start(self) -> None:
        """Connect and listen in a thread."""
        self._loop.start()

    def close(self) -> None:
        """End the thread, even while it waits; returns at once."""
        self._is_closed = True
        self._loop.stop()
        self._client.connection_pool.disconnect()

    @abstractmethod
    def _open(self) -> None:
        """Check that the server can serve this, then look at everything, since something may have been missed."""

    @abstractmethod
    def _listen(self) -> float:
        """Wait up to WAIT seconds for a message and pass it on; return the seconds until the next call."""

    def _tick(self, now: datetime | None = None) -> float:
        try:
            with self._server.faults(), answers_by(time.monotonic() + PATIENCE):
                if self.problem is None:
                    return self._listen()
                self._open()
        except Exception as error:
            if self._is_closed:
                # close() took the connection away, so any error may follow.
                return 0.0
            if self.problem is not None and isinstance(error, Unavailable):
                # More than a lost connection: until the next attempt, pushes need not find that out themselves.
                self._breaker.trip(str(error), MAX_BACKOFF)
            self.problem = str(error)
            self._client.connection_pool.disconnect()
            raise
        finally:
            if self._is_closed:
                # A connection that was opened after close().
                self._client.connection_pool.disconnect()
        self.problem = None
        self._breaker.reset()
        return 0.0
