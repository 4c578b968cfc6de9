"""A worker's subscription to the redis dispatcher: its hints, and the channel for cancels."""

from __future__ import annotations

from collections.abc import Callable

from django_jobs.dispatchers.redis.breaker import Breaker
from django_jobs.dispatchers.redis.channel import Channel
from django_jobs.dispatchers.redis.hints import Hints
from django_jobs.dispatchers.redis.keys import MOST, Keys
from django_jobs.dispatchers.redis.server import Server
from django_jobs.dispatchers.redis.session import Session
from django_jobs.served import Served


class RedisSubscription:
    """Listens from its creation until it is closed."""

    def __init__(
        self,
        server: Server,
        keys: Keys,
        breaker: Breaker,
        *,
        wake: Callable[[], None],
        look: Callable[[], None] | None,
        wanted: Callable[[], int] | None,
        served: Served,
        on_close: Callable[[RedisSubscription], None],
    ) -> None:
        self._on_close = on_close
        hints = Hints(server, keys, breaker, wake=wake, wanted=wanted or (lambda: MOST), served=served)
        self._sessions: list[Session] = [hints]
        if look is not None:
            self._sessions.append(Channel(server, keys, breaker, look=look))
        for session in self._sessions:
            session.start()

    def problem(self) -> str | None:
        """Return why no hints or cancels arrive now; None while they do."""
        return next((session.problem for session in self._sessions if session.problem is not None), None)

    def close(self) -> None:
        """End the threads; returns at once, whatever the server does."""
        for session in self._sessions:
            session.close()
        self._on_close(self)
