"""What the actors of a chaos run do: every decision comes from the seed, so a seed gives the same plan again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

KEYS = 5
# With which a handler ends its worker, to be told from an end of the worker's own.
EXIT_CODE = 77


def stream(seed: int, actor: str) -> random.Random:
    """Return the decisions of one actor: how long another one took has no influence on them."""
    return random.Random(f"{seed} {actor}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """One push."""

    job: str
    tag: str
    payload: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    # The name of the Thing that its run makes.
    thing: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One transaction of a producer."""

    token: str
    pause: float
    wishes: tuple[Wish, ...]
    # Pushed in a savepoint that is rolled back.
    undone: tuple[Wish, ...]
    # How long the transaction stays open after its pushes.
    linger: float
    rolls_back: bool
    in_bulk: bool


def orders(seed: int, producer: str) -> Iterator[Order]:
    """Yield the transactions of one producer, without end."""
    rng = stream(seed, producer)
    number = 0
    while True:
        number += 1
        token = f"{producer}-{number}"
        wishes = tuple(_wish(rng, f"{token}-{n}") for n in range(rng.choice((1, 1, 2, 3))))
        undone = (_wish(rng, f"{token}-undone"),) if rng.random() < 0.1 else ()
        yield Order(
            token=token,
            pause=rng.expovariate(9),
            wishes=wishes,
            undone=undone,
            linger=rng.choice((0, 0, 0, 0.02)),
            rolls_back=rng.random() < 0.15,
            in_bulk=rng.random() < 0.2,
        )


def _wish(rng: random.Random, tag: str) -> Wish:
    payload: dict[str, Any] = {"tag": tag}
    options: dict[str, Any] = {}
    thing = ""
    job = rng.choices(
        ("mark", "mark_retry", "slow", "slow_retry", "boom", "boom_retry", "async_mark", "atomic_thing", "deadly"),
        (25, 25, 10, 15, 4, 6, 10, 25, 0.25),
    )[0]
    match job:
        case "slow" | "slow_retry":
            payload |= {"s": round(rng.uniform(0.05, 2.5), 2), "heed": rng.random() < 0.5}
        case "async_mark":
            payload |= {"s": round(rng.uniform(0, 1), 2)}
        case "atomic_thing":
            thing = f"effect-{tag}"
            payload |= {"name": thing, "s": rng.choice((0, 0, 0.05, 0.4)), "fail": rng.random() < 0.15}
        case "deadly":
            job = rng.choice(("scripted", "scripted_retry"))
            payload |= {"act": rng.choice(("exit", "kill")), "exit_code": EXIT_CODE}
    if job in ("mark", "mark_retry", "slow_retry") and rng.random() < 0.3:
        options["key"] = f"key-{rng.randrange(KEYS)}"
    if rng.random() < 0.15:
        options["delay"] = round(rng.uniform(0.1, 4), 2)
    if rng.random() < 0.3:
        options["priority"] = rng.choice(("low", "high", "critical", 7))
    return Wish(job=job, tag=tag, payload=payload, options=options, thing=thing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blow:
    """Something bad that happens to a process or to a server."""

    pause: float
    kind: str
    # Which worker or producer, by its place.
    target: int = 0
    # For how long a process is frozen, or a server away.
    length: float = 0.0


def blows(
    seed: int, *, workers: int, producers: int, has_server: bool, can_sever: bool, has_children: bool
) -> Iterator[Blow]:
    """Yield what the monkey does, without end."""
    rng = stream(seed, "monkey")
    weights = {"kill": 3.0, "term": 3.0, "freeze": 3.0, "long freeze": 1.5, "kill producer": 0.7, "freeze meddler": 0.7}
    if can_sever:
        weights["sever"] = 2.0
    if has_server:
        weights |= {"restart": 1.0, "crash": 1.2}
    if has_children:
        weights |= {"kill child": 4.0, "freeze child": 1.5}
    kinds, by_weight = tuple(weights), tuple(weights.values())
    while True:
        kind = rng.choices(kinds, by_weight)[0]
        length = {
            "freeze": rng.uniform(0.3, 2.5),
            # Longer than it takes the others to declare it dead.
            "long freeze": rng.uniform(6, 10),
            "freeze child": rng.uniform(0.3, 8),
            # Perhaps inside a transaction that holds locks.
            "freeze meddler": rng.uniform(1, 6),
            "restart": rng.uniform(0, 2),
            "crash": rng.uniform(0, 2),
        }.get(kind, 0.0)
        target = rng.randrange(producers if kind == "kill producer" else workers)
        yield Blow(pause=rng.uniform(0.3, 2.5), kind=kind, target=target, length=length)


def blows_to_redis(seed: int) -> Iterator[Blow]:
    """Yield what happens to the server of the redis dispatcher, without end; a pause begins when it is back."""
    rng = stream(seed, "redis")
    while True:
        kind = rng.choices(("flush redis", "hang redis", "kill redis", "restart redis"), (3, 2, 1.5, 1.5))[0]
        length = {
            "flush redis": 0.0,
            # From a hiccup to more than the clients wait for an answer.
            "hang redis": rng.uniform(0.1, 5),
        }.get(kind, rng.uniform(0, 3))
        yield Blow(pause=rng.uniform(0.3, 4), kind=kind, length=length)


@dataclass(frozen=True, slots=True, kw_only=True)
class Meddling:
    """What a person does to executions."""

    pause: float
    verb: str
    # Which of the rows that qualify, 0 to 1, and how many of them.
    where: float
    count: int
    # Done in a transaction that stays open for so long, and is perhaps not kept; None is none.
    linger: float | None
    rolls_back: bool


def meddlings(seed: int, actor: str) -> Iterator[Meddling]:
    """Yield what a person does, without end."""
    rng = stream(seed, actor)
    while True:
        verb = rng.choices(
            ("cancel", "cancel running", "retry", "start_now", "cancel_many", "retry_many", "trigger"),
            (3, 2, 4, 1, 0.5, 1, 1),
        )[0]
        count = rng.randint(2, 6) if verb.endswith("_many") else 1
        linger = rng.choice((None, None, 0, rng.uniform(0, 1)))
        yield Meddling(
            pause=rng.expovariate(3),
            verb=verb,
            where=rng.random(),
            count=count,
            linger=linger,
            rolls_back=linger is not None and rng.random() < 0.3,
        )
