"""The line between a supervisor and its child: what counts as silence, and that each notices the other's end."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from django_jobs.runtime import lifeline as module
from django_jobs.runtime.lifeline import MOST_AT_ONCE, START, Lifeline, hold_lifeline
from tests.support import wait_for

Hold = Callable[..., threading.Event]


@pytest.fixture
def line() -> Iterator[Lifeline]:
    line = Lifeline()
    yield line
    line.close()


@pytest.fixture
def hold(line: Lifeline, monkeypatch: Any) -> Iterator[Hold]:
    """Hold the child's end in this process; returns what is set when the other end is gone."""
    place = os.open(os.devnull, os.O_RDONLY)
    monkeypatch.setattr(module, "STANDARD_INPUT", place)
    monkeypatch.setattr(module, "EVERY", 0.05)
    gone = threading.Event()

    def start(report: bytes = b"") -> threading.Event:
        os.dup2(line.child_end, place)
        hold_lifeline(lambda: report, gone.set)
        return gone

    yield start
    line.close()
    assert gone.wait(20)
    os.close(place)


def show_life(line: Lifeline) -> None:
    os.write(line.child_end, b"\n")


def test_silence_is_counted_from_the_last_sign(line: Lifeline) -> None:
    show_life(line)
    assert line.silence(100.0) == 0.0
    assert line.silence(100.5) == 0.5
    assert line.silence(101.0) == 1.0
    show_life(line)
    show_life(line)
    assert line.silence(101.5) == 0.0
    assert line.silence(102.0) == 0.5


def test_time_in_which_nobody_listened_counts_for_little(line: Lifeline) -> None:
    show_life(line)
    assert line.silence(100.0) == 0.0
    assert line.silence(4000.0) == MOST_AT_ONCE
    assert line.silence(4000.5) == MOST_AT_ONCE + 0.5


def test_a_start_may_take_long_but_not_for_ever(line: Lifeline) -> None:
    began = time.monotonic()
    assert line.silence(began) <= -START + 1
    for second in range(1, int(START)):
        assert line.silence(began + second) < 1
    assert line.silence(began + START) == pytest.approx(0.0, abs=1)
    assert line.silence(began + START + 1) == pytest.approx(1.0, abs=1)
    show_life(line)
    assert line.silence(began + START + 2) == 0.0


def test_a_child_shows_life_again_and_again(line: Lifeline, hold: Hold) -> None:
    gone = hold()
    for _ in range(3):
        wait_for(line.hear, 20, "a sign comes")
    assert not gone.is_set()


def test_a_child_of_which_nobody_takes_note_goes_on(line: Lifeline, hold: Hold) -> None:
    os.set_blocking(line.child_end, False)
    with pytest.raises(BlockingIOError):
        while True:
            show_life(line)
    gone = hold()
    assert not gone.wait(0.3)
    while line.hear():
        pass
    wait_for(line.hear, 20, "signs come again")
    assert not gone.is_set()


def test_the_last_report_that_came_whole_is_kept(line: Lifeline) -> None:
    assert line.report == b""
    for part, last in ((b"\nfi", b""), (b"rst\nsec", b"first"), (b"ond\nthird\n\n", b"third"), (b"\n", b"third")):
        os.write(line.child_end, part)
        assert line.hear()
        assert line.report == last


def test_a_report_that_the_line_takes_only_in_parts_comes_whole(line: Lifeline, hold: Hold) -> None:
    long = b"far more than a socket holds" * 100_000
    hold(long)
    wait_for(lambda: line.hear() and line.report, 10, "it comes")
    assert line.report == long


@pytest.mark.parametrize("are_signs_left", [True, False])
def test_a_child_notices_the_end_of_its_supervisor(are_signs_left: bool, line: Lifeline, hold: Hold) -> None:
    if are_signs_left:
        show_life(line)
    gone = hold()
    line.close()
    assert gone.wait(20)


def test_standard_input_of_a_child_leads_nowhere(hold: Hold) -> None:
    hold()
    assert os.read(module.STANDARD_INPUT, 1) == b""
