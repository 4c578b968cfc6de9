"""For how long the redis dispatcher waits, by a clock that stands still."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from redis.exceptions import TimeoutError as NoAnswer

from django_jobs.dispatchers.redis import bounds
from django_jobs.dispatchers.redis.bounds import ALONE, _Impatient, answers_by, within

NOW = 100.0
USUAL = 0.4


class Socket:
    """Notes for how long each read would wait."""

    def __init__(self, timeout: float = USUAL) -> None:
        self.timeout = timeout
        self.waits: list[float] = []
        self.is_silent = False

    def gettimeout(self) -> float:
        return self.timeout

    def settimeout(self, timeout: float) -> None:
        self.timeout = timeout

    def recv(self, *args: Any) -> str:
        self.waits.append(self.timeout)
        if self.is_silent:
            raise TimeoutError
        return "received"

    recv_into = recv


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "time", SimpleNamespace(monotonic=lambda: NOW))


# 0 would mean not to wait, of which the client makes another error, and less is refused.
@pytest.mark.parametrize(("left", "waits"), [(9.0, USUAL), (USUAL / 2, USUAL / 2), (0.0, 0.001), (-9.0, 0.001)])
@pytest.mark.parametrize("read", ["recv", "recv_into"])
def test_a_read_waits_no_longer_than_its_thread_may(read: str, left: float, waits: float) -> None:
    socket = Socket()
    with answers_by(NOW + left):
        assert getattr(_Impatient(socket), read)(1) == "received"
    assert socket.waits == pytest.approx([waits])


@pytest.mark.parametrize("is_silent", [False, True])
def test_later_reads_wait_as_long_as_ever(is_silent: bool) -> None:
    socket = Socket()
    socket.is_silent = is_silent
    for until in (NOW, NOW + 9.0):
        with answers_by(until):
            try:
                _Impatient(socket).recv(1)
            except TimeoutError:
                assert is_silent
    socket.is_silent = False
    with answers_by(NOW):
        pass
    _Impatient(socket).recv(1)
    assert socket.waits == [0.001, USUAL, USUAL]


def test_what_is_opened_without_anybody_waiting_has_its_own_time() -> None:
    socket = Socket(timeout=3600.0)
    with answers_by(NOW):
        within(10, lambda: _Impatient(socket).recv(1))
    assert socket.waits == [ALONE]


def test_nobody_waits_for_a_connection_when_the_time_for_it_is_over() -> None:
    is_over = threading.Event()
    with pytest.raises(NoAnswer, match="no connection within"):
        within(-1.0, lambda: is_over.wait(10))
    is_over.set()
