"""The contract of a dispatcher; every technology subclasses it and passes the same tests."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Protocol
from uuid import UUID

logger = logging.getLogger("django_jobs")


class Unavailable(Exception):
    """The server that carries hints cannot do so now; the text says why, in one line that holds no password."""


class Subscription(Protocol):
    """What subscribe() returns."""

    def close(self) -> None:
        """Stop the calls; safe to repeat, and from any thread."""

    def problem(self) -> str | None:
        """Return in one line, without secrets, why no wake-ups come now; None while they do. Asks nobody."""


class Dispatcher(ABC):
    """Carries hints from processes that push to processes that run jobs.

    The table is the truth. A hint that is lost costs latency, until a worker polls; one that is doubled, late or about
    a row that is gone costs a look. So a dispatcher never retries for long, never blocks for long and keeps nothing
    that must survive. It is called after commit, from any thread, never reads or writes executions, and asks the
    database nothing inside a transaction; all this unless it runs the jobs itself, see without_running().
    """

    # What Job.mode shows. Those of django_jobs: "database", "queue" (redis), "direct"; for tests "immediate", "dummy".
    kind: ClassVar[str]

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Take `OPTIONS` of the setting; raise ImproperlyConfigured for wrong ones. Opens nothing, starts nothing."""
        self.options = options

    @abstractmethod
    def hint(self, queue: str, ids: Sequence[UUID], *, priority: int = 0) -> None:
        """Tell workers of `queue` that these rows, all of one priority, are pending; may raise, which callers log."""

    def cancel_hint(self, ids: Sequence[UUID]) -> None:
        """Tell workers that these running rows carry a cancel mark; without it they look once a second."""

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

        Both are called from any thread, also from the one that pushes; they set an event and return. One call may stand
        for many hints, and calls without a reason are allowed. A dispatcher that cannot wake anybody returns a
        subscription that never calls.

        `wanted` tells how many rows the subscriber could start now, 0 while it is full (None: any number). It answers
        at once and from any thread. A dispatcher whose hint reaches one subscriber only takes no more than that many
        from its queue, and leaves the rest to others.
        """
        return _Silent()

    def without_running(self) -> AbstractContextManager[None]:
        """Start no job in this process while the block runs; for dispatchers that run jobs themselves.

        Entered by runjobs: its worker, if it has one, starts jobs.
        """
        return nullcontext()

    def describe(self) -> str:
        """Return how workers learn of new rows: one phrase without secrets, for the lines that runjobs starts with."""
        return self.kind

    def close(self) -> None:
        """Let go of connections and threads; called when the settings name another dispatcher. Safe to repeat."""


def call(callback: Callable[[], None]) -> None:
    """Call what a worker subscribed with; one that raises is logged, and keeps no other worker asleep."""
    try:
        callback()
    except Exception:
        logger.exception("A worker's wake-up callback raised.")


class _Silent:
    def close(self) -> None:
        """Nothing was opened."""

    def problem(self) -> str | None:
        return None
