"""What the redis dispatcher keeps on the server: names, scores and limits."""

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

# A day without a hint, and nothing is left of a queue.
LIFETIME = 86400
# More ids than this are not kept: each of them only says that a worker is to look, and there are fewer idle ones.
MOST = 1000
# What is said on the channel.
LOOK = b"look"

# One step of priority weighs more than all milliseconds until the year 2109; with priorities of -100 to 100 every score
# is a whole number that a double holds.
_STEP = 2**42


class Keys:
    """The keys of one server and prefix."""

    def __init__(self, server: Server) -> None:
        self._server = server
        # A set of the queues that were ever hinted, for workers that serve any.
        self.queues = server.key("queues")
        # Told to look for cancel marks.
        self.channel = server.key("look")
        # Where there never is anything.
        self.nothing = server.key("nothing")
        # Keys of which it was logged that somebody else wrote to them.
        self._told: set[str] = set()

    def queue(self, name: str) -> str:
        """The sorted set of ids that wait in a queue."""
        return self._server.key(f"queue:{name}")

    def ask(self, client: redis.Redis, names: Iterable[str], do: Callable[[], T]) -> T:
        """Return what `do` returns; if it stumbles over what somebody else wrote to these keys, that is deleted first.

        The keys are ours, and left alone that would keep all hints from coming, for ever.
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
            if kind in {b"none", b"set" if name == self.queues else b"zset"}:
                continue
            client.delete(name)
            if name not in self._told:
                self._told.add(name)
                logger.warning(
                    "The key %s of django_jobs on Redis was a %s that somebody else wrote, and was deleted. Give who "
                    "writes there another KEY_PREFIX or database.",
                    name,
                    kind.decode(),
                )


def score(priority: int) -> int:
    """Return where an id of this priority goes that is hinted now: the lowest comes out first."""
    return -priority * _STEP + time.time_ns() // 1_000_000
