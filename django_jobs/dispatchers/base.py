"""The contract of a dispatcher; every technology subclasses it and passes the same tests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, Protocol
from uuid import UUID


class Subscription(Protocol):
    """What subscribe() returns."""

    def close(self) -> None:
        """Stop the calls; safe to repeat, and from any thread."""


class Dispatcher(ABC):
    """Carries hints from processes that push to processes that run jobs.

    The table is the truth. A hint that is lost costs latency, until a worker polls; one that is doubled, late or about
    a row that is gone costs a look. So a dispatcher never retries for long, never blocks for long and keeps nothing
    that must survive. It is called after commit, from any thread, and never reads or writes executions.
    """

    # What Job.mode shows: "database", "queue" or "direct" for those that come with django_jobs.
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
    ) -> Subscription:
        """Have `wake` called when a hint for one of `queues` (None: any) comes, and `look` at a cancel hint.

        Both are called from any thread, also from the one that pushes; they set an event and return. One call may stand
        for many hints, and calls without a reason are allowed. A dispatcher that cannot wake anybody returns a
        subscription that never calls.
        """
        return _Silent()

    def close(self) -> None:
        """Let go of connections and threads; called when the settings name another dispatcher. Safe to repeat."""


class _Silent:
    def close(self) -> None:
        """Nothing was opened."""
