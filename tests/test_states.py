"""The statuses and the legal moves between them."""

from __future__ import annotations

import pytest

from django_jobs.states import FINAL, LIVE, TRANSITIONS, Status
from tests.moves import is_legal

P, R, S, O, E, C = Status.PENDING, Status.RUNNING, Status.SCHEDULED, Status.OK, Status.ERROR, Status.CANCELLED  # noqa: E741

LEGAL = {
    (None, P), (None, S),
    (P, R), (P, S), (P, C),
    (S, P), (S, C),
    (R, P), (R, S), (R, O), (R, E), (R, C),
    (E, P), (C, P),
}  # fmt: skip


def test_the_legal_moves_are_those_of_the_diagram() -> None:
    found = {(source, target) for source in (None, *Status) for target in Status if is_legal(source, target)}
    assert found == LEGAL


def test_nothing_moves_out_of_ok() -> None:
    assert not any(is_legal(Status.OK, target) for target in Status)


def test_a_row_is_either_live_or_final() -> None:
    assert (set(Status), set()) == (FINAL | LIVE, FINAL & LIVE)


def test_every_verb_knows_its_own_name() -> None:
    assert {name: move.verb for name, move in TRANSITIONS.items()} == {name: name for name in TRANSITIONS}


def test_every_status_but_ok_has_a_way_out_and_every_status_a_way_in() -> None:
    assert {status for move in TRANSITIONS.values() for status in move.sources} == set(Status) - {Status.OK}
    assert {status for move in TRANSITIONS.values() for status in move.targets} == set(Status)


@pytest.mark.parametrize("status", list(Status))
def test_a_status_is_stored_as_its_own_name_in_small_letters(status: Status) -> None:
    assert status.value == status.name.lower()
    assert len(status.value) <= 16
