"""What every dispatcher must do: a test module per technology subclasses DispatcherContract."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_jobs.dispatchers import Dispatcher, Subscription
from django_jobs.fields import uuid7
from tests.support import wait_for


def when_ready(subscription: Subscription, forget: Callable[[], None] = lambda: None) -> None:
    """Wait until hints come, and forget the calls that stand for those that may have been missed before."""
    wait_for(lambda: subscription.problem() is None, 20, f"wake-ups arrive, not {subscription.problem()}")
    forget()


class DispatcherContract:
    # Does a hint wake a worker that subscribed in this process?
    wakes = True
    # Does a cancel hint make it look?
    looks = True
    # Does one hint reach all of them, or only one that wants rows?
    reaches_all = True

    @pytest.fixture
    def dispatcher(self) -> Iterator[Dispatcher]:
        raise NotImplementedError

    def test_its_kind_is_a_word(self, dispatcher: Dispatcher) -> None:
        assert dispatcher.kind.isidentifier()

    def test_it_tells_in_one_line_how_workers_learn_of_rows(self, dispatcher: Dispatcher) -> None:
        assert dispatcher.describe().strip()
        assert "\n" not in dispatcher.describe()

    def test_a_hint_may_be_about_rows_that_are_gone_or_about_none(self, dispatcher: Dispatcher) -> None:
        dispatcher.hint("default", [uuid7()])
        dispatcher.hint("default", [])
        dispatcher.cancel_hint([uuid7()])
        dispatcher.cancel_hint([])

    def test_the_same_hint_may_come_twice_and_with_many_ids(self, dispatcher: Dispatcher) -> None:
        ids = [uuid7() for _ in range(1000)]
        dispatcher.hint("default", ids, priority=100)
        dispatcher.hint("default", ids, priority=-100)

    @pytest.mark.django_db
    def test_inside_a_transaction_a_hint_asks_the_database_nothing(self, dispatcher: Dispatcher) -> None:
        with CaptureQueriesContext(connection) as queries:
            dispatcher.hint("default", [uuid7()])
            dispatcher.cancel_hint([uuid7()])
        assert len(queries) == 0

    @pytest.mark.parametrize("queues", [["mail"], None], ids=["named", "any"])
    def test_a_hint_wakes_a_worker_of_its_queue(self, dispatcher: Dispatcher, queues: list[str] | None) -> None:
        woken = threading.Event()
        subscription = dispatcher.subscribe(queues, woken.set)
        try:
            when_ready(subscription, woken.clear)
            dispatcher.hint("mail", [uuid7()])
            assert woken.wait(5 if self.wakes else 0.02) == self.wakes
        finally:
            subscription.close()

    def test_hints_wake_all_workers_of_their_queue(self, dispatcher: Dispatcher) -> None:
        named, anything = threading.Event(), threading.Event()
        first, second = dispatcher.subscribe(["mail"], named.set), dispatcher.subscribe(None, anything.set)
        try:
            when_ready(first, named.clear)
            when_ready(second, anything.clear)
            dispatcher.hint("mail", [uuid7()])
            if not self.reaches_all:
                assert named.wait(0.1) + anything.wait(0.1) == 1
                # Who was woken first may also be the first to wait again.
                wait_for(
                    lambda: dispatcher.hint("mail", [uuid7()]) or (named.is_set() and anything.is_set()),
                    5,
                    "both are woken",
                )
            assert named.wait(5 if self.wakes else 0.02) == self.wakes
            assert anything.wait(5 if self.wakes else 0.02) == self.wakes
        finally:
            first.close()
            second.close()

    def test_a_worker_for_any_queue_but_one_is_not_woken_for_that_one(self, dispatcher: Dispatcher) -> None:
        calls: list[str] = []
        woken = threading.Event()
        without = dispatcher.subscribe(None, lambda: calls.append("wake"), exclude=["mail"])
        named = dispatcher.subscribe(["mail"], woken.set)
        try:
            when_ready(without, calls.clear)
            when_ready(named, woken.clear)
            dispatcher.hint("mail", [uuid7()])
            assert woken.wait(5 if self.wakes else 0.02) == self.wakes
            assert calls == []
        finally:
            without.close()
            named.close()

    def test_a_worker_that_tells_what_it_wants_is_woken_too(self, dispatcher: Dispatcher) -> None:
        woken = threading.Event()
        subscription = dispatcher.subscribe(["mail"], woken.set, None, lambda: 3)
        try:
            when_ready(subscription, woken.clear)
            dispatcher.hint("mail", [uuid7() for _ in range(5)])
            assert woken.wait(5 if self.wakes else 0.02) == self.wakes
        finally:
            subscription.close()

    def test_a_subscription_that_works_has_no_problem(self, dispatcher: Dispatcher) -> None:
        subscription = dispatcher.subscribe(None, lambda: None)
        try:
            wait_for(lambda: subscription.problem() is None, 20, "wake-ups arrive")
        finally:
            subscription.close()

    def test_a_cancel_hint_makes_the_workers_look(self, dispatcher: Dispatcher) -> None:
        looked = threading.Event()
        subscription = dispatcher.subscribe(["mail"], lambda: None, looked.set)
        try:
            when_ready(subscription, looked.clear)
            dispatcher.cancel_hint([uuid7()])
            assert looked.wait(5 if self.looks else 0.02) == self.looks
        finally:
            subscription.close()

    def test_a_hint_from_another_thread_arrives(self, dispatcher: Dispatcher) -> None:
        woken = threading.Event()
        subscription = dispatcher.subscribe(None, woken.set)
        try:
            when_ready(subscription, woken.clear)
            pusher = threading.Thread(target=dispatcher.hint, args=("default", [uuid7()]))
            pusher.start()
            pusher.join()
            assert woken.wait(5 if self.wakes else 0.02) == self.wakes
        finally:
            subscription.close()

    @pytest.mark.medium
    def test_a_worker_whose_callback_raises_keeps_no_other_one_asleep(self, dispatcher: Dispatcher) -> None:
        def broken() -> None:
            raise RuntimeError("a worker in pieces")

        woken = threading.Event()
        first = dispatcher.subscribe(None, broken)
        second = dispatcher.subscribe(None, woken.set)
        try:
            when_ready(first)
            when_ready(second, woken.clear)
            for _ in range(1 if self.reaches_all else 10):
                dispatcher.hint("default", [uuid7()])
                if woken.wait(5 if self.reaches_all and self.wakes else 0.2):
                    break
            assert woken.is_set() == self.wakes
        finally:
            first.close()
            second.close()

    def test_a_closed_subscription_is_not_called_and_closes_twice(self, dispatcher: Dispatcher) -> None:
        calls: list[str] = []
        woken = threading.Event()
        closed = dispatcher.subscribe(None, lambda: calls.append("wake"), lambda: calls.append("look"))
        when_ready(closed)
        closed.close()
        closed.close()
        calls.clear()
        other = dispatcher.subscribe(None, woken.set)
        try:
            when_ready(other, woken.clear)
            dispatcher.hint("default", [uuid7()])
            dispatcher.cancel_hint([uuid7()])
            if self.wakes:
                wait_for(woken.is_set, 20, "the subscription that is still open is called")
            assert calls == []
        finally:
            other.close()

    def test_it_closes_twice(self, dispatcher: Dispatcher) -> None:
        dispatcher.subscribe(None, lambda: None)
        dispatcher.close()
        dispatcher.close()
