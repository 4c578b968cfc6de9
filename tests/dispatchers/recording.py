"""Dispatchers for tests: one that remembers what it was told, one that fails, and things that are no dispatchers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any
from uuid import UUID

from django_jobs.dispatchers import Dispatcher

RECORDING = f"{__name__}.RecordingDispatcher"
FAILING = f"{__name__}.FailingDispatcher"


class RecordingDispatcher(Dispatcher):
    kind = "recording"

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self.hints: list[tuple[str, list[UUID], int]] = []
        self.cancels: list[UUID] = []
        self.closed = False

    def hint(self, queue: str, ids: Sequence[UUID], *, priority: int = 0) -> None:
        self.hints.append((queue, list(ids), priority))

    def cancel_hint(self, ids: Collection[UUID]) -> None:
        self.cancels.extend(ids)

    def close(self) -> None:
        self.closed = True


class FailingDispatcher(Dispatcher):
    kind = "failing"

    def hint(self, queue: str, ids: Sequence[UUID], *, priority: int = 0) -> None:
        raise ConnectionError("the broker is down")

    def cancel_hint(self, ids: Collection[UUID]) -> None:
        raise ConnectionError("the broker is down")


def no_dispatcher() -> None:
    """Importable, and not a class."""
