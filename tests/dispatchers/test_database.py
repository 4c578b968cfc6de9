"""The default dispatcher as it is on every engine; what PostgreSQL adds is in test_postgres.py."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured

from django_jobs.dispatchers.database import DatabaseDispatcher
from django_jobs.fields import uuid7
from tests.dispatchers.contract import DispatcherContract


class TestDatabaseDispatcher(DispatcherContract):
    """Without NOTIFY, as everywhere but on PostgreSQL."""

    @pytest.fixture
    def dispatcher(self) -> Iterator[DatabaseDispatcher]:
        made = DatabaseDispatcher({"LISTEN": False})
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

    def test_it_tells_that_it_reaches_this_process_only(self, dispatcher: DatabaseDispatcher) -> None:
        assert dispatcher.describe() == "within this process"
        assert dispatcher.subscribe(None, lambda: None).problem() is None


@pytest.mark.sqlite
@pytest.mark.mysql
def test_without_postgresql_there_is_nothing_to_listen_to() -> None:
    dispatcher = DatabaseDispatcher({})
    threads = threading.active_count()
    subscription = dispatcher.subscribe(None, lambda: None)
    dispatcher.hint("default", [uuid7()])
    assert (dispatcher.describe(), subscription.problem()) == ("within this process", None)
    assert threading.active_count() == threads
    dispatcher.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"LISTEN": "nowhere"}, r"LISTEN of the database dispatcher is 'nowhere'; expected an alias .*default"),
        ({"LISTEN": True}, "LISTEN of the database dispatcher is True; expected an alias"),
        ({"CHANNEL": "jobs"}, "has no option 'CHANNEL'; expected LISTEN"),
    ],
)
def test_wrong_options_are_refused_with_the_mend(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=message):
        DatabaseDispatcher(options)
