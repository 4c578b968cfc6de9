"""A dispatcher for tests: it records its calls, and runs nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.core.exceptions import ImproperlyConfigured

from django_jobs.dispatchers.base import Dispatcher

# How many hints are kept.
REMEMBERED = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """The arguments of one call of hint()."""

    queue: str
    ids: tuple[UUID, ...]
    priority: int


class DummyDispatcher(Dispatcher):
    """Keeps the newest ten thousand hints in memory, in `hints` and `cancels`; wakes nobody."""

    kind = "dummy"

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        if options:
            raise ImproperlyConfigured(f"DJANGO_JOBS: the dummy dispatcher has no options; found {dict(options)!r}.")
        self.hints: deque[Hint] = deque(maxlen=REMEMBERED)
        self.cancels: deque[UUID] = deque(maxlen=REMEMBERED)

    @property
    def ids(self) -> list[UUID]:
        """Every row that was hinted, in order."""
        return [pk for hint in self.hints for pk in hint.ids]

    def hint(self, queue: str, ids: Sequence[UUID], *, priority: int = 0) -> None:
        """Remember a hint."""
        self.hints.append(Hint(queue=queue, ids=tuple(ids), priority=priority))

    def cancel_hint(self, ids: Sequence[UUID]) -> None:
        """Remember which rows carry a cancel mark."""
        self.cancels.extend(ids)

    def clear(self) -> None:
        """Forget everything, e.g. between two tests."""
        self.hints.clear()
        self.cancels.clear()
