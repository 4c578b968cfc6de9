"""What the redis dispatcher keeps on the server: names, scores and limits."""

from __future__ import annotations

import time

from django_jobs.dispatchers.redis.server import Server

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

    def queue(self, name: str) -> str:
        """The sorted set of ids that wait in a queue."""
        return self._server.key(f"queue:{name}")


def score(priority: int) -> int:
    """Return where an id of this priority goes that is hinted now: the lowest comes out first."""
    return -priority * _STEP + time.time_ns() // 1_000_000
