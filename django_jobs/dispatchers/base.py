"""The contract of a dispatcher; each technology has a subclass, and all of them pass the same tests."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, Protocol
from uuid import UUID

logger = logging.getLogger("django_jobs")


class Unavailable(Exception):
    """The server that carries hints cannot do so now; the text says why, in one line without a password."""


class Subscription(Protocol):
    """What subscribe() returns."""

    def close(self) -> None:
        """Stop the calls; safe to repeat, and from any thread."""

    def problem(self) -> str | None:
        """Return in one line, without secrets, why no wake-ups arrive now; None while they do. Answers at once."""


class Dispatcher(ABC):
    """Carries hints from processes that push to processes that run jobs.

    The table is the truth. A hint that is lost costs latency, until a worker polls; one that comes twice, late or for a
    row that is gone costs a query. So a dispatcher never retries or blocks for long, and keeps nothing that must
    survive. It is called after commit and from any thread; it never reads or writes executions, and never queries the
    database inside a transaction. Dispatchers that run the jobs themselves are exempt, see without_running().
    """

    # Shown by Job.mode. Ours are "database", "queue" (redis) and "direct"; for tests, "immediate" and "dummy".
    kind: ClassVar[str]

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Take the setting's `OPTIONS`; raise ImproperlyConfigured for wrong ones. Opens and starts nothing."""
        self.options = options

    @abstractmethod
    def hint(self, queue: str, ids: Sequence[UUID], *, priority: int = 0) -> None:
        """Tell workers of `queue` that these rows, all of one priority, are pending. May raise: callers log it."""

    def cancel_hint(self, ids: Sequence[UUID]) -> None:
        """Tell workers that these running rows carry a cancel mark; without the hint they look once a second."""

    def subscribe(
        self,
        queues: Collection[str] | None,
        wake: Callable[[], None],
        look: Callable[[], None] | None = None,
        wanted: Callable[[], int] | None = None,
        *,
        exclude: Collection[str] = (),
    ) -> Subscription:
        """Have `wake` called when a hint for one of `queues` (None: any but `exclude`) comes, `look` at a cancel hint.

        Both may be called from any thread, even the pushing one; they set an event and return. One call may stand for
        many hints, and spurious calls are allowed. A dispatcher that cannot wake anybody returns a subscription that
        never calls.

        `wanted` returns how many rows the subscriber could start now, 0 while it is full (None: any number); at once,
        and in any thread. A dispatcher whose hints reach only one subscriber each takes no more than that many from its
        queue, and leaves the rest to others.
        """
        return _Silent()

    def without_running(self) -> AbstractContextManager[None]:
        """Do not begin to run jobs in this process while the block runs; for dispatchers that run jobs themselves.

        Entered by runjobs, where the worker, if there is one, starts jobs, and by commands that end soon. If jobs run
        in this process already, that goes on: a web process whose platform calls runjobs in it still serves requests.
        Blocks may overlap, in any threads.
        """
        return nullcontext()

    def describe(self) -> str:
        """Return how workers learn of new rows: one phrase without secrets, for the first lines of runjobs."""
        return self.kind

    def close(self) -> None:
        """Close connections and end threads; called when the settings name another dispatcher. Safe to repeat."""


class Suspensions:
    """The blocks of without_running() that are open now, in any threads."""

    def __init__(self) -> None:
        # One object for each block: a counter could miss some of those that begin at the same time.
        self._open: set[object] = set()

    def __bool__(self) -> bool:
        return bool(self._open)

    @contextmanager
    def block(self) -> Iterator[None]:
        """Count as open while the block runs."""
        mine = object()
        self._open.add(mine)
        try:
            yield
        finally:
            self._open.discard(mine)


def call(callback: Callable[[], None]) -> None:
    """Call a subscriber's callback; if it raises, that is logged, so that the other workers are still woken."""
    try:
        callback()
    except Exception:
        logger.exception("a worker's wake-up callback raised")


class _Silent:
    def close(self) -> None:
        """Nothing was opened."""

    def problem(self) -> str | None:
        return None
