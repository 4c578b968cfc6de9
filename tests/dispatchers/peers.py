"""Other processes on the same database, as far as dispatchers are concerned."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from django_jobs.dispatchers.database import DatabaseDispatcher
from tests.support import wait_for


class Peer:
    """A dispatcher as another process has it, and what it heard."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.dispatcher = DatabaseDispatcher(options)
        self.woken, self.looked = threading.Event(), threading.Event()
        self.subscription = self.dispatcher.subscribe(None, self.woken.set, self.looked.set)

    def hear_nothing_yet(self) -> None:
        """Wait until it listens, and forget that this woke everybody."""
        wait_for(lambda: self.subscription.problem() is None, 20, "it listens")
        wait_for(self.looked.is_set, 20, "it woke everybody when it began to listen")
        self.woken.clear()
        self.looked.clear()


@pytest.fixture
def make_peer() -> Iterator[Callable[..., Peer]]:
    made: list[Peer] = []

    def make(**options: Any) -> Peer:
        made.append(Peer(options))
        return made[-1]

    yield make
    for peer in made:
        peer.dispatcher.close()
