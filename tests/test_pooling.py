"""Django's pool of connections is for handlers: threads of ours go past it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import connections

from django_jobs.loop import Loop, start_thread
from django_jobs.pooling import pool_size


@pytest.fixture(autouse=True)
def _pool(set_pool: Callable[[Any], None]) -> None:
    set_pool({"max_size": 2})


def options() -> dict[str, Any]:
    return dict(connections["default"].settings_dict["OPTIONS"])


def test_threads_of_ours_have_connections_of_their_own() -> None:
    seen: list[dict[str, Any]] = []
    start_thread(lambda: seen.append(options()), name="test").join(5)
    loop = Loop(lambda now=None: seen.append(options()) or loop.stop() or 0.0, name="test")  # type: ignore[func-returns-value]
    loop.start()
    assert loop.join(5)
    assert seen == [{}] * 2


def test_threads_for_handlers_use_the_pool_and_nobody_takes_it_from_others() -> None:
    seen: list[dict[str, Any]] = []
    start_thread(lambda: None, name="test").join(5)
    start_thread(lambda: seen.append(options()), name="test", for_handlers=True).join(5)
    assert seen == [options()] == [{"pool": {"max_size": 2}}]


def test_the_size_of_a_pool_is_what_it_gives_out_at_most() -> None:
    assert pool_size("default") == 2
    assert pool_size("other") is None
