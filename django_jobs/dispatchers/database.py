"""The default dispatcher: workers poll the table; a push wakes those of its process, on PostgreSQL all of them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal
from uuid import UUID

from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from django_jobs.dispatchers.base import Dispatcher, call
from django_jobs.dispatchers.postgres.channel import Message
from django_jobs.dispatchers.postgres.peers import Peers
from django_jobs.served import Served


class DatabaseDispatcher(Dispatcher):
    """Carries hints within this process and, on PostgreSQL, to others; on other databases those find rows by polling.

    The option `LISTEN` names an alias that reaches the same database without a pooler, since no NOTIFY gets through one
    in transaction mode; False turns NOTIFY and LISTEN off.
    """

    kind = "database"

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self._via = _checked(options)
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        # Replaced, never changed: hint() reads it without the lock.
        self._subscriptions: tuple[_Subscription, ...] = ()
        self._peers = Peers(self._via, self._pass_on)

    def hint(self, queue: str, ids: Sequence[UUID], *, priority: int = 0) -> None:
        """Wake the workers that serve the queue."""
        peers = self._peers_of_this_process()
        for subscription in self._subscriptions:
            if queue in subscription.served:
                call(subscription.wake)
        peers.tell(queue=queue)

    def cancel_hint(self, ids: Sequence[UUID]) -> None:
        """Have the workers look at their cancel marks."""
        peers = self._peers_of_this_process()
        self._pass_on(Message(cancel=True))
        peers.tell(cancel=True)

    def subscribe(
        self,
        queues: Collection[str] | None,
        wake: Callable[[], None],
        look: Callable[[], None] | None = None,
        wanted: Callable[[], int] | None = None,
        *,
        exclude: Collection[str] = (),
    ) -> _Subscription:
        """See Dispatcher.subscribe(); a hint reaches every subscriber, so `wanted` does not matter."""
        peers = self._peers_of_this_process()
        subscription = _Subscription(self, wake, look, Served.of(queues, exclude))
        with self._lock:
            self._subscriptions = (*self._subscriptions, subscription)
            peers.listen()
        return subscription

    def unsubscribe(self, subscription: _Subscription) -> None:
        """Forget a subscription; called by its close()."""
        peers = self._peers_of_this_process()
        with self._lock:
            self._subscriptions = tuple(known for known in self._subscriptions if known is not subscription)
            if not self._subscriptions:
                peers.stop_listening()

    def problem(self) -> str | None:
        """See Subscription.problem()."""
        return self._peers_of_this_process().problem()

    def describe(self) -> str:
        """See Dispatcher.describe()."""
        peers = self._peers_of_this_process()
        if peers.are_reached:
            return "NOTIFY"
        problem = peers.problem()
        return f"within this process ({problem})" if problem else "within this process"

    def close(self) -> None:
        """Forget all subscriptions; see Dispatcher.close()."""
        peers = self._peers_of_this_process()
        with self._lock:
            self._subscriptions = ()
            peers.close()

    def _pass_on(self, message: Message) -> None:
        for subscription in self._subscriptions:
            if message.queues is None or any(queue in subscription.served for queue in message.queues):
                call(subscription.wake)
            if message.cancel and subscription.look is not None:
                call(subscription.look)

    def _peers_of_this_process(self) -> Peers:
        if self._pid != os.getpid():
            # After a fork: the parent's workers and threads do not exist here, and its locks may have been held.
            self._begin()
        return self._peers


class _Subscription:
    __slots__ = ("_dispatcher", "look", "served", "wake")

    def __init__(
        self,
        dispatcher: DatabaseDispatcher,
        wake: Callable[[], None],
        look: Callable[[], None] | None,
        served: Served,
    ) -> None:
        self._dispatcher, self.wake, self.look, self.served = dispatcher, wake, look, served

    def close(self) -> None:
        self._dispatcher.unsubscribe(self)

    def problem(self) -> str | None:
        return self._dispatcher.problem()


def _checked(options: Mapping[str, Any]) -> str | Literal[False] | None:
    """Return the option LISTEN; raise ImproperlyConfigured for wrong ones."""
    if unknown := set(options) - {"LISTEN"}:
        raise ImproperlyConfigured(
            f"DJANGO_JOBS: the database dispatcher has no option {', '.join(sorted(map(repr, unknown)))}; "
            "expected LISTEN."
        )
    via = options.get("LISTEN")
    if via is None or via is False or (isinstance(via, str) and via in connections.settings):
        return via
    raise ImproperlyConfigured(
        f"DJANGO_JOBS: the option LISTEN of the database dispatcher is {via!r}; expected an alias in DATABASES "
        f"({', '.join(connections.settings)}), or False to turn NOTIFY off."
    )
