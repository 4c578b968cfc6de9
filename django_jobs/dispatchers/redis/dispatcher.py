"""The sending side: one round trip for each hint, and none while the server is down."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any
from uuid import UUID

from django.core.exceptions import ImproperlyConfigured
from redis.exceptions import ConnectionError as ServerGone

from django_jobs.dispatchers.base import Dispatcher, Unavailable
from django_jobs.dispatchers.redis.bounds import answers_by, connect_within_bounds, within
from django_jobs.dispatchers.redis.breaker import Breaker
from django_jobs.dispatchers.redis.keys import LIFETIME, LOOK, MOST, MOST_QUEUES, Keys, score
from django_jobs.dispatchers.redis.server import Server
from django_jobs.dispatchers.redis.subscription import RedisSubscription
from django_jobs.dispatchers.redis.upkeep import Upkeep
from django_jobs.served import Served

# Seconds that a push waits for a part of an answer, and in all: answers may have many parts, and if it finds no
# connection, a name is looked up, one address or sentinel after the other is tried, and the login takes some answers.
ANSWER_TIMEOUT = 0.4
TIMEOUT = 0.8
# Seconds for one address.
CONNECT_TIMEOUT = 0.3


class RedisDispatcher(Dispatcher):
    """Puts the ids of pending rows into a sorted set per queue, from which idle workers take them.

    An id only makes the worker that takes it look at the table; a row whose id is lost is found there by polling.
    """

    kind = "queue"

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Take `CACHE`, the alias of a django-redis cache (default: "default")."""
        super().__init__(options)
        if unknown := set(options) - {"CACHE"}:
            raise ImproperlyConfigured(
                f"DJANGO_JOBS: the redis dispatcher has no option {', '.join(sorted(map(repr, unknown)))}; expected "
                "CACHE, the alias of a django-redis cache."
            )
        self._server = Server(options.get("CACHE", "default"))
        self._keys = Keys(self._server)
        self._process = _Process(self._server)

    def hint(self, queue: str, ids: Sequence[UUID], *, priority: int = 0) -> None:
        """Put the ids where a worker of the queue takes them; ids that are already there keep their place."""
        if not ids:
            return
        key, at = self._keys.queue(queue), score(priority)
        members = {str(id_): at for id_ in ids[:MOST]}

        def send(process: _Process) -> None:
            self._keys.ask(process.client, [key, self._keys.names], lambda: add(process))

        def add(process: _Process) -> None:
            if not process.upkeep.is_due(queue, len(members)):
                process.client.zadd(key, members)
                return
            pipe = process.client.pipeline(transaction=False)
            pipe.zadd(key, members)
            pipe.zremrangebyrank(key, MOST, -1)
            pipe.expire(key, LIFETIME)
            pipe.zadd(self._keys.names, {queue: time.time()})
            pipe.zremrangebyrank(self._keys.names, 0, -MOST_QUEUES - 1)
            pipe.expire(self._keys.names, LIFETIME)
            pipe.execute()

        self._send(send)

    def cancel_hint(self, ids: Sequence[UUID]) -> None:
        """Have all workers look at their cancel marks."""
        if ids:
            self._send(lambda process: process.client.publish(self._keys.channel, LOOK))

    def subscribe(
        self,
        queues: Collection[str] | None,
        wake: Callable[[], None],
        look: Callable[[], None] | None = None,
        wanted: Callable[[], int] | None = None,
        *,
        exclude: Collection[str] = (),
    ) -> RedisSubscription:
        """See Dispatcher.subscribe(); connects in a thread of its own, now and whenever the connection is lost."""
        process = self._here()
        subscription = RedisSubscription(
            self._server,
            self._keys,
            process.breaker,
            wake=wake,
            look=look,
            wanted=wanted,
            served=Served.of(queues, exclude),
            on_close=process.subscriptions.discard,
        )
        process.subscriptions.add(subscription)
        return subscription

    def describe(self) -> str:
        """Return which server it is."""
        return f"redis at {self._server}"

    def close(self) -> None:
        """Close subscriptions and connections."""
        process = self._here()
        for subscription in tuple(process.subscriptions):
            subscription.close()
        process.client.connection_pool.disconnect()

    def _send(self, send: Callable[[_Process], Any]) -> None:
        process = self._here()

        def bounded() -> None:
            until = time.monotonic() + TIMEOUT
            with self._server.faults():
                try:
                    with answers_by(until):
                        send(process)
                except ServerGone:
                    process.disconnect()
                    # Behind a new connection may be an empty server.
                    process.upkeep = Upkeep()
                    within(until - time.monotonic(), connect)

        def connect() -> None:
            send(process)
            # Perhaps after that time, and it is there for the next one.
            process.breaker.reset()

        try:
            process.breaker.call(bounded)
        except Unavailable:
            # The connections may lead to a server that has become a replica.
            process.disconnect()
            raise

    def _here(self) -> _Process:
        if self._process.pid != os.getpid():
            # After a fork: threads and connections belong to the parent, and a lock may have been held.
            self._process = _Process(self._server)
        return self._process


class _Process:
    """The connections of one process."""

    def __init__(self, server: Server) -> None:
        self.pid = os.getpid()
        self.client = server.client(connect=CONNECT_TIMEOUT, answer=ANSWER_TIMEOUT)
        connect_within_bounds(self.client.connection_pool)
        self.breaker = Breaker()
        self.upkeep = Upkeep()
        self.subscriptions: set[RedisSubscription] = set()

    def disconnect(self) -> None:
        """Close the connections that nobody uses now."""
        self.client.connection_pool.disconnect(inuse_connections=False)
