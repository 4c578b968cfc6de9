from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from django_jobs import registry
from django_jobs.dispatchers.redis import RedisDispatcher, hints, keys, upkeep
from django_jobs.dispatchers.redis import dispatcher as sending
from django_jobs.fields import uuid7
from tests.dispatchers.contract import DispatcherContract, when_ready
from tests.redis_servers import RedisServer, use_cache
from tests.support import wait_for

if TYPE_CHECKING:
    from pytest_django import Settings

pytestmark = pytest.mark.subprocess


MAIL = ":1:{django_jobs}:queue:mail"


@pytest.fixture
def dispatcher(redis_server: RedisServer) -> Iterator[RedisDispatcher]:
    made = RedisDispatcher({"CACHE": "redis"})
    yield made
    made.close()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a queue that no job declares be found soon."""
    monkeypatch.setattr(hints, "WAIT", 0.2)


class TestRedisDispatcher(DispatcherContract):
    reaches_all = False

    @pytest.fixture
    def dispatcher(self, redis_server: RedisServer) -> Iterator[RedisDispatcher]:
        made = RedisDispatcher({"CACHE": "redis"})
        yield made
        made.close()


class Taker:
    """A worker that wants so many rows, and counts how often it is woken."""

    def __init__(self, dispatcher: RedisDispatcher, *, wants: int = 10, **options: Any) -> None:
        self.wants = wants
        self.calls = 0
        self._subscription = dispatcher.subscribe(
            options.pop("queues", ["mail"]), self._wake, None, lambda: self.wants, **options
        )
        when_ready(self._subscription, self._forget)

    def _wake(self) -> None:
        self.calls += 1

    def _forget(self) -> None:
        self.calls = 0


class Runner(Taker):
    """A worker of one slot, which is full for a moment whenever it is woken."""

    def _wake(self) -> None:
        super()._wake()
        self.wants = 0
        threading.Timer(0.02, setattr, (self, "wants", 1)).start()


def left_of(server: RedisServer, key: str = MAIL) -> list[str]:
    with server.client() as client:
        found: Any = client.zrange(key, 0, -1)
        return list(found)


def test_a_worker_takes_no_more_than_it_wants_and_leaves_the_rest_to_others(
    dispatcher: RedisDispatcher, redis_server: RedisServer
) -> None:
    taker = Taker(dispatcher, wants=3)

    def is_full() -> None:
        taker.calls += 1
        taker.wants = 0

    taker._subscription._sessions[0]._wake = is_full  # type: ignore[attr-defined]
    dispatcher.hint("mail", [uuid7() for _ in range(5)])
    wait_for(lambda: taker.calls == 1, 20, "it is woken once")
    assert len(left_of(redis_server)) == 2


def test_a_worker_that_wants_nothing_takes_nothing(dispatcher: RedisDispatcher, redis_server: RedisServer) -> None:
    full, idle = Taker(dispatcher, wants=0), Taker(dispatcher)
    for number in range(1, 6):
        dispatcher.hint("mail", [uuid7()])
        wait_for(lambda number=number: idle.calls == number, 20, "the idle one takes it")
    assert left_of(redis_server) == []
    assert full.calls == 0


def test_workers_of_one_slot_take_one_each_however_often_they_have_run(
    dispatcher: RedisDispatcher, redis_server: RedisServer
) -> None:
    runners = [Runner(dispatcher, wants=1) for _ in range(2)]
    for number in range(1, 9):
        wait_for(lambda: all(runner.wants for runner in runners), 20, "both are free")
        dispatcher.hint("mail", [uuid7(), uuid7()])
        wait_for(lambda number=number: sum(runner.calls for runner in runners) >= 2 * number, 20, "each is taken")
    assert sum(runner.calls for runner in runners) == 16


def test_what_a_worker_was_given_when_it_had_filled_up_goes_to_another(
    dispatcher: RedisDispatcher, redis_server: RedisServer
) -> None:
    filled, id_ = Taker(dispatcher, wants=10), uuid7()
    with redis_server.client() as client:
        wait_for(lambda: client.info("clients")["blocked_clients"], 20, "it waits in the name of ten free slots")
        filled.wants = 0
        dispatcher.hint("mail", [id_], priority=50)
        wait_for(lambda: left_of(redis_server) == [str(id_)], 20, "it gives back what it was given")
        assert keys.score(51) < client.zscore(MAIL, str(id_)) < keys.score(49)
    Taker(dispatcher)
    wait_for(lambda: not left_of(redis_server), 20, "the idle one takes it")
    assert filled.calls == 0


def test_a_worker_that_is_full_or_serves_nothing_asks_ever_less_often(dispatcher: RedisDispatcher) -> None:
    full, useless = Taker(dispatcher, wants=0), Taker(dispatcher, queues=None, exclude=registry.queues())
    sessions = [taker._subscription._sessions[0] for taker in (full, useless)]
    dispatcher.close()
    naps = [[session._listen() for _ in range(10)] for session in sessions]
    assert naps[0][-1] == hints.LONGEST_NAP
    assert set(naps[1]) == {hints.WAIT}


@pytest.mark.parametrize("key", [MAIL, ":1:{django_jobs}:names"])
def test_what_somebody_else_wrote_to_a_key_of_ours_is_deleted_by_a_push_and_told_once(
    dispatcher: RedisDispatcher, redis_server: RedisServer, caplog: pytest.LogCaptureFixture, key: str
) -> None:
    """Fault: a SET there kept all hints from coming, for ever."""
    for _ in range(2):
        with redis_server.client() as client:
            client.set(key, "not ours")
        RedisDispatcher._here(dispatcher).upkeep = upkeep.Upkeep()
        id_ = uuid7()
        dispatcher.hint("mail", [id_])
        assert str(id_) in left_of(redis_server)
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith(f"the key {key} of django_jobs on Redis held a string that something else wrote")


@pytest.mark.parametrize("key", [MAIL, ":1:{django_jobs}:names"])
def test_what_somebody_else_wrote_to_a_key_of_ours_is_deleted_by_a_worker(
    dispatcher: RedisDispatcher, redis_server: RedisServer, key: str
) -> None:
    taker = Taker(dispatcher, queues=None if key.endswith("names") else ["mail"])
    with redis_server.client() as client:
        client.set(key, "not ours")
        wait_for(lambda: not client.exists(key), 20, "it is gone")
    assert taker._subscription.problem() is None
    dispatcher.hint("mail", [uuid7()])
    wait_for(lambda: taker.calls, 20, "it is woken")


def test_a_hint_that_comes_twice_is_kept_once_and_the_urgent_come_first(
    dispatcher: RedisDispatcher, redis_server: RedisServer
) -> None:
    usual, urgent, low = uuid7(), uuid7(), uuid7()
    dispatcher.hint("mail", [low], priority=-50)
    dispatcher.hint("mail", [usual])
    dispatcher.hint("mail", [urgent], priority=50)
    dispatcher.hint("mail", [usual])
    assert left_of(redis_server) == [str(urgent), str(usual), str(low)]


@pytest.mark.parametrize("priority", [-100, 0, 100])
def test_every_score_is_a_whole_number_that_a_double_holds(priority: int) -> None:
    assert int(float(keys.score(priority))) - keys.score(priority) in (0, -1)
    assert keys.score(priority) < keys.score(priority - 1) - 2**41


def test_a_queue_that_nobody_serves_keeps_a_bounded_number_of_ids_for_a_bounded_time(
    dispatcher: RedisDispatcher, redis_server: RedisServer
) -> None:
    urgent = uuid7()
    dispatcher.hint("mail", [urgent], priority=50)
    for _ in range(3):
        dispatcher.hint("mail", [uuid7() for _ in range(1500)])
    assert len(left_of(redis_server)) == keys.MOST
    for _ in range(250):
        dispatcher.hint("mail", [uuid7()])
    assert left_of(redis_server)[0] == str(urgent)
    assert len(left_of(redis_server)) <= keys.MOST + upkeep.PORTION
    with redis_server.client() as client:
        assert client.ttl(MAIL) > 0
        assert client.ttl(":1:{django_jobs}:names") > 0


def test_ids_of_rows_that_were_claimed_long_ago_are_soon_gone_and_wake_nobody_for_each(
    dispatcher: RedisDispatcher, redis_server: RedisServer
) -> None:
    dispatcher.hint("mail", [uuid7() for _ in range(keys.MOST)])
    taker = Taker(dispatcher, wants=10)
    wait_for(lambda: not left_of(redis_server), 20, "nothing is left")
    assert taker.calls < 12
    taker.calls = 0
    dispatcher.hint("mail", [uuid7()])
    wait_for(lambda: taker.calls == 1, 20, "it is woken for what is new")


def test_a_worker_for_any_queue_learns_of_queues_that_no_job_declares(
    dispatcher: RedisDispatcher,
) -> None:
    taker = Taker(dispatcher, queues=None)
    dispatcher.hint("made-up", [uuid7()])
    wait_for(lambda: taker.calls, 20, "it is woken")


def test_of_queues_without_number_those_of_the_last_hints_are_kept(
    dispatcher: RedisDispatcher, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a worker waited for every name that was ever used, with a queue per upload for a hundred thousand."""
    monkeypatch.setattr(sending, "MOST_QUEUES", 3)
    for number in (1, 2, 3, 1, 4, 5):
        RedisDispatcher._here(dispatcher).upkeep = upkeep.Upkeep()
        dispatcher.hint(f"upload-{number}", [uuid7()])
    assert left_of(redis_server, ":1:{django_jobs}:names") == ["upload-1", "upload-4", "upload-5"]


def test_a_worker_for_any_queue_survives_the_loss_of_every_key(
    dispatcher: RedisDispatcher, redis_server: RedisServer
) -> None:
    taker = Taker(dispatcher, queues=None)
    for _ in range(3):
        with redis_server.client() as client:
            client.flushall()
        before = taker.calls
        dispatcher.hint("default", [uuid7()])
        wait_for(lambda before=before: taker.calls > before, 20, "it is woken")


def test_what_is_kept_for_a_queue_is_seen_to_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    due = upkeep.Upkeep()
    asked = [due.is_due("mail", 40) for _ in range(6)]
    assert asked == [True, False, False, True, False, False]
    assert due.is_due("sms", 1)
    monkeypatch.setattr(upkeep, "INTERVAL", -1.0)
    assert [due.is_due("chat", 1) for _ in range(3)] == [True, True, True]
    monkeypatch.setattr(upkeep, "QUEUES", 10)
    assert all(due.is_due(f"queue {number}", 1) for number in range(50))
    assert len(due._good) <= 12


def test_keys_and_channel_carry_prefix_and_version_of_the_cache(redis_server: RedisServer, settings: Settings) -> None:
    use_cache(settings, redis_server.url, KEY_PREFIX="shop", VERSION=7)
    made = RedisDispatcher({"CACHE": "redis"})
    subscription = made.subscribe(["mail"], lambda: None, lambda: None)
    when_ready(subscription)
    made.hint("sms", [uuid7()])
    with redis_server.client() as client:
        assert set(client.keys()) == {"shop:7:{django_jobs}:queue:sms", "shop:7:{django_jobs}:names"}
        assert client.pubsub_channels() == ["shop:7:{django_jobs}:look"]
    made.close()


def test_projects_with_prefixes_of_their_own_do_not_wake_each_other(
    dispatcher: RedisDispatcher, redis_server: RedisServer, settings: Settings
) -> None:
    use_cache(settings, redis_server.url, KEY_PREFIX="shop")
    other = RedisDispatcher({"CACHE": "redis"})
    ours, theirs = Taker(dispatcher), Taker(other)
    other.hint("mail", [uuid7()])
    wait_for(lambda: theirs.calls, 20, "the other project's worker is woken")
    assert ours.calls == 0
    other.close()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # It does nothing with what the threads hold.
def test_a_forked_child_has_connections_of_its_own_and_none_of_its_parents_workers(
    dispatcher: RedisDispatcher, redis_server: RedisServer
) -> None:
    taker = Taker(dispatcher, wants=0)
    dispatcher.hint("mail", [uuid7()])
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        woken = threading.Event()
        answer = b"failed"
        try:
            dispatcher.hint("mail", [uuid7(), uuid7()])
            subscription = dispatcher.subscribe(["child"], woken.set)
            when_ready(subscription, woken.clear)
            dispatcher.hint("child", [uuid7()])
            if woken.wait(20):
                answer = b"woken"
            dispatcher.close()
        finally:
            os.write(writer, answer)
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 10) == b"woken"
    # What the child closed is not what the parent has.
    dispatcher.hint("mail", [uuid7()])
    assert len(left_of(redis_server)) == 4
    taker.wants = 10
    wait_for(lambda: taker.calls, 20, "the parent's worker is woken")
    os.close(reader)
    os.close(writer)


def test_closing_a_subscription_ends_its_threads_at_once(dispatcher: RedisDispatcher) -> None:
    before = set(threading.enumerate())
    subscription = dispatcher.subscribe(["mail"], lambda: None, lambda: None)
    when_ready(subscription)
    threads = set(threading.enumerate()) - before
    assert {thread.name for thread in threads} == {"django_jobs redis hints", "django_jobs redis channel"}
    assert all(thread.daemon for thread in threads)
    subscription.close()
    wait_for(lambda: not any(thread.is_alive() for thread in threads), 1, "the threads have ended")
    assert dispatcher._here().subscriptions == set()


def test_many_threads_push_at_once(dispatcher: RedisDispatcher, redis_server: RedisServer) -> None:
    sent: list[bool] = []

    def push() -> None:
        for _ in range(20):
            dispatcher.hint("mail", [uuid7()])
            sent.append(True)

    threads = [threading.Thread(target=push) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(sent) == len(left_of(redis_server)) == 160
