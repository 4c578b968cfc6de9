from __future__ import annotations

import threading
from typing import Any

import pytest

from django_jobs.execution.errors import fingerprint, stack_text
from tests.execution.runs import STARTED, outcome_of


def raiser(exception: BaseException) -> Any:
    def handler() -> None:
        raise exception

    return handler


class TwoArguments(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


class Unprintable(Exception):
    def __str__(self) -> str:
        raise SystemExit

    def __repr__(self) -> str:
        raise ValueError


class Holder(Exception):
    def __init__(self) -> None:
        super().__init__("held")
        self.lock = threading.Lock()


def test_the_entry_tells_what_where_and_when() -> None:
    outcome = outcome_of(raiser(ValueError("no such order")), attempt=2, max_attempts=4)
    entry = outcome.error
    assert entry["exception"] == "ValueError"
    assert entry["message"] == "no such order"
    assert entry["worker"] == "host.test pid 7"
    assert entry["attempt"] == 2
    assert entry["started_at"] == STARTED.isoformat()
    assert entry["failed_at"] >= entry["started_at"]
    assert outcome.message == "ValueError: no such order"


def test_the_traceback_begins_in_the_projects_code() -> None:
    lines = outcome_of(raiser(ValueError("no"))).error["traceback"].splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "test_errors.py" in lines[1]
    assert lines[-1] == "ValueError: no"
    assert not any("django_jobs/execution" in line for line in lines)


@pytest.mark.parametrize(
    ("exception", "name", "message"),
    [
        (TwoArguments(1, 2), "TwoArguments", "1 and 2"),
        (Unprintable(), "Unprintable", "<str() failed>"),
        (Holder(), "Holder", "held"),
        (type("Local", (Exception,), {})("local"), "Local", "local"),
    ],
)
def test_an_exception_that_cannot_be_rebuilt_or_shown_is_text_all_the_same(
    exception: Exception, name: str, message: str
) -> None:
    """Exceptions that could not be pickled or printed crashed the main process: celery/celery#6185, #6990, #2943."""
    outcome = outcome_of(raiser(exception))
    assert outcome.message == f"{name}: {message}"
    assert outcome.error["message"] == message
    assert name in outcome.error["traceback"]


def test_an_exception_without_a_text_is_named_by_its_class() -> None:
    assert outcome_of(raiser(ValueError())).message == "ValueError"


def test_causes_that_form_a_cycle_are_shown_once() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    outcome = outcome_of(raiser(first))
    assert outcome.message == "ValueError: first"
    assert outcome.error["traceback"].count("ValueError: second") == 1


def test_a_huge_message_is_cut() -> None:
    outcome = outcome_of(raiser(ValueError("x" * 5_000_000)))
    assert len(outcome.error["message"]) == 2_000
    assert len(outcome.error["traceback"]) < 17_000
    assert outcome.error["traceback"].startswith("Traceback")
    assert len(outcome.message) < 2_100


def test_what_databases_refuse_is_replaced() -> None:
    outcome = outcome_of(raiser(ValueError("a\0b\ud800")))
    assert outcome.message == "ValueError: a\ufffdb\ufffd"
    assert "\0" not in outcome.error["traceback"]


def caught(exception: Exception) -> Exception:
    try:
        raise exception
    except Exception as error:
        return error


def caught_elsewhere(exception: Exception) -> Exception:
    try:
        raise exception
    except Exception as error:
        return error


def test_a_fingerprint_is_of_job_class_and_place_and_not_of_the_text() -> None:
    one = fingerprint("shop.send", caught(ValueError("order 1")))
    assert one == fingerprint("shop.send", caught(ValueError("order 2")))
    others = {
        fingerprint("shop.other", caught(ValueError("order 1"))),
        fingerprint("shop.send", caught(KeyError("order 1"))),
        fingerprint("shop.send", caught_elsewhere(ValueError("order 1"))),
    }
    assert len(others | {one}) == 4


def test_the_place_is_the_innermost_code_of_the_project() -> None:
    import json

    def broken(text: str) -> Exception:
        try:
            json.loads(text)
        except ValueError as error:
            return error
        raise AssertionError

    # Two places inside the library, one in the project.
    assert fingerprint("shop.send", broken("[")) == fingerprint("shop.send", broken("{"))


def test_an_exception_that_was_never_raised_has_a_fingerprint() -> None:
    assert fingerprint("shop.send", ValueError("x")) == fingerprint("shop.send", ValueError("y"))


def test_there_is_no_stack_of_a_thread_that_is_gone() -> None:
    assert stack_text(None) == ""
