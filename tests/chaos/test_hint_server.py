"""What is done to Redis in a chaos run happens to it: a blow that misses would leave every promise untried."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chaos import plan
from tests.chaos.hint_server import HintServer
from tests.redis_servers import RedisServer, running_redis

pytestmark = pytest.mark.subprocess

HELD, NOTHING = b"$1\r\n1\r\n", b"$-1\r\n"
# By what is done: whether it is away then, and what it holds when it is back.
AFTERWARDS = {
    "flush redis": (False, NOTHING),
    "hang redis": (True, HELD),
    "kill redis": (True, NOTHING),
    "restart redis": (True, HELD),
}


@pytest.fixture
def valkey_with_a_hint() -> Iterator[RedisServer]:
    with running_redis("valkey") as server:
        assert server.answer(b"SET hint 1") == b"+OK\r\n"
        yield server


@pytest.mark.parametrize("kind", AFTERWARDS)
def test_it_is_away_until_it_is_mended_and_then_holds_what_such_a_server_would(
    valkey_with_a_hint: RedisServer, kind: str
) -> None:
    is_away, afterwards = AFTERWARDS[kind]
    struck = HintServer(valkey_with_a_hint)
    struck.strike(kind)
    assert struck.is_away == is_away
    assert (valkey_with_a_hint.answer(b"PING") == b"") == is_away
    struck.mend()
    assert not struck.is_away
    assert valkey_with_a_hint.answer(b"GET hint") == afterwards


def test_all_of_it_happens_in_a_run() -> None:
    blows = plan.blows_to_redis(1)
    assert {next(blows).kind for _ in range(20)} == set(AFTERWARDS)
