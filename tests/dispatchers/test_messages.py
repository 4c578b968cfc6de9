"""What is said on the channel between processes."""

from __future__ import annotations

import pytest

from django_jobs.dispatchers.postgres.channel import MAX_LENGTH, Message


@pytest.mark.parametrize(
    "message",
    [
        Message(sender="a", queues=frozenset({"default", "café ☕"})),
        Message(sender="a", queues=None),
        Message(sender="a", cancel=True),
        Message(sender="a", probe=7),
        Message(sender="a", queues=frozenset({"mail"}), cancel=True),
    ],
)
def test_a_message_arrives_as_it_was_sent(message: Message) -> None:
    assert Message.decode(message.encode()) == message
    assert message.encode().isascii()


def test_more_queues_than_a_notify_can_name_are_any() -> None:
    many = Message(
        sender="a", queues=frozenset(f"a queue with quite a long name {n}" for n in range(1000)), cancel=True
    )
    assert len(many.encode()) < MAX_LENGTH
    assert Message.decode(many.encode()) == Message(sender="a", queues=None, cancel=True)


@pytest.mark.parametrize(
    "payload",
    [
        *("", "hello", "[]", "null", "{}", '{"from": "a", "queues": 7}', '{"from": "a", "probe": "x"}'),
        *('{"from": "a", "probe": 1e999}', 5000 * "["),
    ],
)
def test_what_is_not_understood_makes_everybody_look(payload: str) -> None:
    assert Message.decode(payload) == Message(queues=None, cancel=True)
