"""Which queues workers serve, alone and together, and what their rows say of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_jobs.served import Served
from tests.factories import JobExecutionFactory

QUEUES = ("a", "b", "c", "d")
names = st.frozensets(st.sampled_from(QUEUES[:3]))
some = st.builds(Served, names=names, is_any_but=st.booleans())


@pytest.mark.parametrize(
    ("queues", "exclude", "stored"),
    [
        (None, (), None),
        (None, ("mail", "bulk"), ["-bulk", "-mail"]),
        (("mail", "bulk"), (), ["bulk", "mail"]),
        (("mail", "bulk"), ("bulk",), ["mail"]),
        ((), (), []),
    ],
    ids=str,
)
def test_a_row_tells_what_its_process_was_told(
    queues: tuple[str, ...] | None, exclude: tuple[str, ...], stored: list[str] | None
) -> None:
    served = Served.of(queues, exclude)
    assert served.to_row() == stored
    assert Served.from_row(stored) == served


@given(some)
def test_nothing_is_lost_in_a_row(served: Served) -> None:
    assert Served.from_row(served.to_row()) == served


@given(some, some)
def test_two_serve_what_either_does(one: Served, other: Served) -> None:
    assert [queue in one | other for queue in QUEUES] == [queue in one or queue in other for queue in QUEUES]
    assert bool(one | other) == (bool(one) or bool(other))


@given(some, names)
def test_some_queues_can_be_taken_out(served: Served, out: frozenset[str]) -> None:
    assert [queue in served - out for queue in QUEUES] == [queue in served and queue not in out for queue in QUEUES]


@given(some)
def test_of_any_queue_those_that_are_known_have_names(served: Served) -> None:
    known = frozenset(QUEUES)
    assert served.among(known) == {queue for queue in QUEUES if queue in served}
    assert served.among(frozenset()) == (frozenset() if served.is_any_but else served.names)


@pytest.mark.django_db
def test_the_condition_on_rows_is_the_same() -> None:
    rows = [JobExecutionFactory(pending=True, queue=queue) for queue in QUEUES]
    found = type(rows[0]).objects.order_by("queue").values_list("queue", flat=True)
    for served in (
        Served(),
        Served(names=frozenset("ab")),
        Served(names=frozenset("ab"), is_any_but=True),
        Served(is_any_but=True),
    ):
        assert list(found.filter(served.condition())) == [queue for queue in QUEUES if queue in served]
