"""The default dispatcher: workers poll the table; those in the pushing process itself are woken at once."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any
from uuid import UUID

from django_jobs.dispatchers.base import Dispatcher

logger = logging.getLogger("django_jobs")


class DatabaseDispatcher(Dispatcher):
    """Carries hints within this process; other processes find the rows at their next poll."""

    kind = "database"

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        # Replaced, never changed: hint() reads it without the lock.
        self._subscriptions: tuple[_Subscription, ...] = ()

    def hint(self, queue: str, ids: Sequence[UUID], *, priority: int = 0) -> None:
        """Wake the workers of this process that serve the queue."""
        for subscription in self._in_this_process():
            if subscription.serves(queue):
                _call(subscription.wake)

    def cancel_hint(self, ids: Sequence[UUID]) -> None:
        """Have the workers of this process look at their cancel marks."""
        for subscription in self._in_this_process():
            if subscription.look is not None:
                _call(subscription.look)

    def subscribe(
        self,
        queues: Collection[str] | None,
        wake: Callable[[], None],
        look: Callable[[], None] | None = None,
        wanted: Callable[[], int] | None = None,
        *,
        exclude: Collection[str] = (),
    ) -> _Subscription:
        """See Dispatcher.subscribe(); a hint reaches everybody, so what anybody wants does not matter."""
        self._in_this_process()
        subscription = _Subscription(
            self, wake, look, queues=None if queues is None else frozenset(queues), exclude=frozenset(exclude)
        )
        with self._lock:
            self._subscriptions = (*self._subscriptions, subscription)
        return subscription

    def unsubscribe(self, subscription: _Subscription) -> None:
        """Forget a subscription; called by its close()."""
        with self._lock:
            self._subscriptions = tuple(known for known in self._subscriptions if known is not subscription)

    def close(self) -> None:
        """Forget all subscriptions."""
        with self._lock:
            self._subscriptions = ()

    def _in_this_process(self) -> tuple[_Subscription, ...]:
        if self._pid != os.getpid():
            # After a fork: the parent's workers are not here, and its lock may have been held.
            self._pid, self._lock, self._subscriptions = os.getpid(), threading.Lock(), ()
        return self._subscriptions


class _Subscription:
    __slots__ = ("_dispatcher", "_exclude", "_queues", "look", "wake")

    def __init__(
        self,
        dispatcher: DatabaseDispatcher,
        wake: Callable[[], None],
        look: Callable[[], None] | None,
        *,
        queues: frozenset[str] | None,
        exclude: frozenset[str],
    ) -> None:
        self._dispatcher, self.wake, self.look = dispatcher, wake, look
        self._queues, self._exclude = queues, exclude

    def serves(self, queue: str) -> bool:
        return queue not in self._exclude and (self._queues is None or queue in self._queues)

    def close(self) -> None:
        self._dispatcher.unsubscribe(self)

    def problem(self) -> str | None:
        # Nothing lies between this process and itself.
        return None


def _call(callback: Callable[[], None]) -> None:
    try:
        callback()
    except Exception:
        # One broken worker must not keep the others asleep.
        logger.exception("A worker's wake-up callback raised.")
