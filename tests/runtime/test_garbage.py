"""What a long-lived process has loaded is not looked through again and again, and nothing else is changed."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from django_jobs.runtime.garbage import YOUNGEST, rare_collections

# Each case looks through all that the test run has loaded.
pytestmark = pytest.mark.medium


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.freeze()


def test_collections_are_rarer_within_the_block_only() -> None:
    gc.set_threshold(700, 10, 10)
    with rare_collections():
        assert gc.get_threshold() == (YOUNGEST, 10, 10)
        assert gc.get_freeze_count() > 0
    assert gc.get_threshold() == (700, 10, 10)
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("youngest", [0, 5 * YOUNGEST])
def test_what_a_project_has_chosen_itself_stays(youngest: int) -> None:
    gc.set_threshold(youngest, 10, 10)
    with rare_collections():
        assert gc.get_threshold()[0] == youngest


def test_what_becomes_garbage_within_the_block_is_still_collected() -> None:
    class Loop:
        pass

    with rare_collections():
        loop = Loop()
        loop.itself = loop  # type: ignore[attr-defined]
        ident = id(loop)
        del loop
        gc.collect()
        assert not any(id(found) == ident and isinstance(found, Loop) for found in gc.get_objects())
