from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from django_jobs.dispatchers.database import DatabaseDispatcher
from django_jobs.fields import uuid7
from tests.dispatchers.contract import DispatcherContract


class TestDatabaseDispatcher(DispatcherContract):
    @pytest.fixture
    def dispatcher(self) -> Iterator[DatabaseDispatcher]:
        made = DatabaseDispatcher({})
        yield made
        made.close()

    def test_a_hint_for_another_queue_wakes_nobody(self, dispatcher: DatabaseDispatcher) -> None:
        woken = threading.Event()
        dispatcher.subscribe(["mail"], woken.set)
        dispatcher.hint("default", [uuid7()])
        assert not woken.is_set()

    def test_a_forked_child_has_none_of_its_parents_workers(
        self, dispatcher: DatabaseDispatcher, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        woken = threading.Event()
        dispatcher.subscribe(None, woken.set)
        pid = os.getpid()
        monkeypatch.setattr(os, "getpid", lambda: pid + 1)
        dispatcher.hint("default", [uuid7()])
        assert not woken.is_set()
        dispatcher.subscribe(None, woken.set)
        dispatcher.hint("default", [uuid7()])
        assert woken.is_set()
