"""The redis dispatcher's data on the server: names, scores and limits."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import redis
from redis.exceptions import NoPermissionError, ResponseError

from django_jobs.dispatchers.redis.server import Server

logger = logging.getLogger("django_jobs")

T = TypeVar("T")

# Seconds without a hint after which a queue's set expires: a day.
LIFETIME = 86400
# The most ids in a set: each only tells one worker to look, and there are fewer idle workers than this.
MOST = 1000
# The most queues whose names are kept, those that were pushed to last: a worker for any queue waits for all of them.
MOST_QUEUES = 1000
# The message on the channel.
LOOK = b"look"

# One step of priority outweighs all milliseconds until the year 2109, and with priorities of -100 to 100 every score
# is an integer that a double holds exactly.
_STEP = 2**42


class Keys:
    """The keys of one server and prefix."""

    def __init__(self, server: Server) -> None:
        self._server = server
        # The names of queues by the time of their last hint, for workers that serve any queue.
        self.names = server.key("names")
        # The channel of messages to look for cancel marks.
        self.channel = server.key("look")
        # A key that never holds anything.
        self.nothing = server.key("nothing")
        # Keys for which it was logged that something else wrote to them.
        self._told: set[str] = set()

    def queue(self, name: str) -> str:
        """Return the key of the sorted set of ids that wait in a queue."""
        return self._server.key(f"queue:{name}")

    def ask(self, client: redis.Redis, names: Iterable[str], do: Callable[[], T]) -> T:
        """Return the result of `do`; if these keys hold another type of value, delete that first and try again.

        The keys are ours, and a foreign value would keep all hints from arriving, for ever.
        """
        try:
            return do()
        except ResponseError as error:
            if "WRONGTYPE" not in str(error):
                raise
            try:
                self._clear(client, names)
            except NoPermissionError:
                raise error from None
        return do()

    def _clear(self, client: redis.Redis, names: Iterable[str]) -> None:
        for name in names:
            kind: bytes = client.type(name)  # type: ignore[assignment]  # It is synchronous.
            if kind in {b"none", b"zset"}:
                continue
            client.delete(name)
            if name not in self._told:
                self._told.add(name)
                logger.warning(
                    "the key %s of django_jobs on Redis held a %s that something else wrote; it was deleted; give the "
                    "other writer another KEY_PREFIX or database",
                    name,
                    kind.decode(),
                )


def score(priority: int) -> int:
    """Return the score of an id of this priority that is hinted now: the lowest comes out first."""
    return -priority * _STEP + time.time_ns() // 1_000_000
