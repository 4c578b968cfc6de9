"""Take ids from the queues of one worker while it wants rows, and wake it for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from django_jobs import registry
from django_jobs.dispatchers.base import call
from django_jobs.dispatchers.redis.breaker import Breaker
from django_jobs.dispatchers.redis.keys import MOST, Keys
from django_jobs.dispatchers.redis.server import Server
from django_jobs.dispatchers.redis.session import WAIT, Session
from django_jobs.served import Served

# Seconds for a woken worker to claim, so that what it still wants is known before more is taken.
PAUSE = 0.002
# After this many pops that made no difference, with growing pauses, more is taken than is wanted.
PATIENCE = 2
# A full worker is asked again after 1, 2, 4 ms …: with short handlers hints are hardly delayed, and with long ones
# asking costs nothing.
FIRST_NAP, LONGEST_NAP = 0.001, 0.05


class Hints(Session):
    """Pops ids, never more than the worker wants: a hint reaches one worker, and others may be idle."""

    name = "hints"

    def __init__(
        self,
        server: Server,
        keys: Keys,
        breaker: Breaker,
        *,
        wake: Callable[[], None],
        wanted: Callable[[], int],
        served: Served,
    ) -> None:
        super().__init__(server, breaker)
        self._keys, self._wake, self._wanted = keys, wake, wanted
        self._served = served
        # The keys of its queues, and when they were found.
        self._found: list[str] = []
        self._found_at = 0.0
        self._nap = FIRST_NAP
        # How much was wanted before the last pop, if that brought as much as it could; and how many such pops in a row
        # made no difference.
        self._was_wanted: int | None = None
        self._fruitless = 0

    def _open(self) -> None:
        self._find_queues()
        # Fails on a server that does not know the command, and on a replica, which allows no pop.
        self._pop([self._keys.nothing], seconds=0.001, count=1)
        call(self._wake)

    def _listen(self) -> float:
        wanted = self._wanted()
        if wanted <= 0:
            self._was_wanted = None
            self._nap = min(2 * self._nap, LONGEST_NAP)
            return self._nap
        self._nap = FIRST_NAP / 2
        if time.monotonic() > self._found_at + WAIT:
            self._find_queues()
        if not self._found:
            return WAIT
        return self._take(wanted)

    def _take(self, wanted: int) -> float:
        self._fruitless = self._fruitless + 1 if self._was_wanted is not None and wanted >= self._was_wanted else 0
        # One full pop after another, and the worker, though it looked, wants no less: polling workers have claimed
        # these rows already. Popping twice as much each time clears the rest with few looks.
        generosity = 1 << min(max(self._fruitless - PATIENCE, 0), 10)
        count = min(wanted * generosity, MOST)
        key, popped = self._pop(self._found, seconds=WAIT, count=count)
        self._was_wanted = wanted if len(popped) == count else None
        if not popped:
            return 0.0
        # The worker may have filled up, or be about to end, while this waited.
        surplus = popped[max(self._wanted(), 0) * generosity :]
        if surplus:
            self._client.zadd(key, {member: float(score) for member, score in surplus})
        if len(surplus) < len(popped):
            call(self._wake)
        return PAUSE * (1 << min(self._fruitless, 3))

    def _pop(self, keys: list[str], *, seconds: float, count: int) -> tuple[str, list[Any]]:
        command = ("BZMPOP", seconds, len(keys), *keys, "MIN", "COUNT", count)
        answer = self._keys.ask(self._client, keys, lambda: self._client.execute_command(*command))
        return ("", []) if answer is None else (answer[0], answer[1])

    def _find_queues(self) -> None:
        self._found_at = time.monotonic()
        known: frozenset[str] = frozenset()
        if self._served.is_any_but:
            key = self._keys.names
            hinted = self._keys.ask(self._client, [key], lambda: self._client.zrange(key, 0, -1))
            known = registry.queues().union(name.decode() for name in hinted)
        self._found = [self._keys.queue(name) for name in sorted(self._served.among(known))]
