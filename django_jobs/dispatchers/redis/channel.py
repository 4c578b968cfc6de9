"""Listen on the channel that tells all workers at once to look for cancel marks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from redis.exceptions import TimeoutError as NoAnswer

from django_jobs.dispatchers.base import call
from django_jobs.dispatchers.redis.breaker import Breaker
from django_jobs.dispatchers.redis.keys import LOOK, Keys
from django_jobs.dispatchers.redis.server import Server
from django_jobs.dispatchers.redis.session import WAIT, Session


class Channel(Session):
    """Calls `look` for each message, and pings the server now and then."""

    name = "channel"

    def __init__(self, server: Server, keys: Keys, breaker: Breaker, *, look: Callable[[], None]) -> None:
        super().__init__(server, breaker)
        self._keys, self._look = keys, look
        self._messages: Any = None
        self._is_asked = False

    def _open(self) -> None:
        self._is_asked = False
        self._messages = self._client.pubsub()
        self._messages.subscribe(self._keys.channel)
        # The confirmation of the subscription.
        if self._messages.get_message(timeout=WAIT) is None:
            raise NoAnswer("the server does not answer SUBSCRIBE")
        call(self._look)

    def _listen(self) -> float:
        message = self._messages.get_message(timeout=WAIT)
        if message is not None:
            self._is_asked = False
            if message["type"] == "message" and message["data"] == LOOK:
                call(self._look)
        elif self._is_asked:
            raise NoAnswer("the server fell silent")
        else:
            self._messages.ping()
            self._is_asked = True
        return 0.0
