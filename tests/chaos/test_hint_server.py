"""What is done to Redis in a chaos run happens to it: a blow that misses would leave every promise untried."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chaos import plan
from tests.chaos.hint_server import HintServer
from tests.redis_servers import RedisServer, running_redis

pytestmark = pytest.mark.subprocess

HELD, NOTHING = b"$1\r\n1\r\n", b"$-1\r\n"


@pytest.fixture
def valkey_with_a_hint() -> Iterator[RedisServer]:
    with running_redis("valkey") as server:
        assert server.answer(b"SET hint 1") == b"+OK\r\n"
        yield server


@pytest.mark.parametrize(
    ("kind", "is_away", "afterwards"),
    [
        ("flush redis", False, NOTHING),
        ("hang redis", True, HELD),
        ("kill redis", True, NOTHING),
        ("restart redis", True, HELD),
    ],
)
def test_it_is_away_until_it_is_mended_and_then_holds_what_such_a_server_would(
    valkey_with_a_hint: RedisServer, kind: str, is_away: bool, afterwards: bytes
) -> None:
    struck = HintServer(valkey_with_a_hint)
    assert struck.strike(kind) == struck.is_away == is_away
    assert (valkey_with_a_hint.answer(b"PING") == b"") == is_away
    struck.mend()
    assert not struck.is_away
    assert valkey_with_a_hint.answer(b"GET hint") == afterwards


def test_the_monkey_does_nothing_to_redis_that_is_not_there() -> None:
    def kinds(*, has_redis: bool) -> set[str]:
        blows = plan.blows(
            1, workers=2, producers=2, has_server=True, can_sever=True, has_children=True, has_redis=has_redis
        )
        return {next(blows).kind for _ in range(500)}

    assert kinds(has_redis=True) - kinds(has_redis=False) == {
        "flush redis",
        "hang redis",
        "kill redis",
        "restart redis",
    }
