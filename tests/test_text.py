from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_jobs.text import clean_middle, clean_text, one_line, some

REPLACED = "\ufffd"


class Unprintable:
    def __str__(self) -> str:
        raise SystemExit


class OddText(str):
    __slots__ = ()

    def __len__(self) -> int:
        raise AssertionError

    def __str__(self) -> str:
        raise AssertionError


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain", "plain"),
        ("déjà 🙂", "déjà 🙂"),
        (12, "12"),
        ("a\0b", f"a{REPLACED}b"),
        ("a\ud800b\udfff", f"a{REPLACED}b{REPLACED}"),
        (Unprintable(), "<str() failed>"),
        ("x" * 11, "x" * 9 + "…"),
    ],
)
def test_text_is_made_storable(value: Any, text: str) -> None:
    assert clean_text(value, 10 if len(text) == 10 else 100) == text
    assert type(clean_text(value, 100)) is str


def test_a_subclass_of_str_becomes_plain_text() -> None:
    assert clean_text(OddText("odd"), 100) == "odd"


def test_a_long_text_keeps_both_ends() -> None:
    text = clean_middle("a" * 5000 + "b" * 5000, 100)
    assert text == f"{'a' * 50}\n… 9900 characters left out …\n{'b' * 50}"


@pytest.mark.medium
@given(st.text(st.characters(codec=None), max_size=50), st.integers(0, 30))
def test_any_text_becomes_one_that_every_database_takes(text: str, limit: int) -> None:
    for cleaned in (clean_text(text, limit), clean_middle(text, limit)):
        assert "\0" not in cleaned
        assert json.loads(json.dumps(cleaned).encode()) == cleaned.encode().decode()
    assert len(clean_text(text, limit)) <= limit


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError("connection refused\n\tIs the server running?"), "connection refused Is the server running?"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_an_error_for_the_log_is_one_line_and_never_empty(error: Exception, line: str) -> None:
    assert one_line(error) == line


@pytest.mark.parametrize(("most", "text"), [(0, "…"), (1, "a, …"), (2, "a, 2"), (3, "a, 2")])
def test_names_are_listed_up_to_a_number(most: int, text: str) -> None:
    assert some(["a", 2], most) == text
