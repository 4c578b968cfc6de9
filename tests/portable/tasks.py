"""Tasks as a portable app has them: nothing here knows of django_jobs, but for what looks at its own run."""

from __future__ import annotations

import os
import threading
from decimal import Decimal
from pathlib import Path
from typing import Any

from django_jobs import current_context
from tests.acc.models import Thing
from tests.portable import TaskContext, task

# What ran in this process, in order.
ran: list[Any] = []
began, go_on = threading.Event(), threading.Event()


@task
def add(a: int, b: int = 1) -> int:
    """Return the sum."""
    return a + b


@task
async def add_later(a: int, b: int = 1) -> int:
    await Thing.objects.acount()
    return a + b


def _seen(context: TaskContext) -> dict[str, Any]:
    result = context.task_result
    assert result.started_at is not None
    assert result.last_attempted_at is not None
    assert result.started_at <= result.last_attempted_at
    return {
        "id": result.id,
        "attempt": context.attempt,
        "status": result.status,
        "args": result.args,
        "kwargs": result.kwargs,
        "queue": result.task.queue_name,
        "priority": result.task.priority,
        "pid": os.getpid(),
    }


@task(takes_context=True, queue_name="mail", priority=7)
def see(context: TaskContext, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return _seen(context)


@task(takes_context=True)
async def see_later(context: TaskContext, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return _seen(context)


@task
def boom(text: str = "boom") -> None:
    raise ValueError(text)


VALUES: dict[str, Any] = {
    "fine": None,
    "nan": [1.5, float("nan")],
    "inf": {"x": {"y": float("inf")}},
    "decimal": {"total": Decimal("NaN")},
    "object": object(),
    "nul": ["a", "b\x00"],
    "surrogate": "\ud800",
    "key": {1: "one"},
    "large": "x" * 300_000,
    "spaced": [1] * 120_000,
    "wide": 2**70,
    "bytes": b"\xff",
    "set": {1, 2},
}
VALUES["endless"] = [VALUES["nan"]]
VALUES["endless"].append(VALUES["endless"])


@task
def give(what: str) -> Any:
    return VALUES[what]


@task
def make_thing(name: str, what: str) -> Any:
    Thing.objects.create(name=name)
    return VALUES[what]


@task
async def give_later(what: str) -> Any:
    return VALUES[what]


@task
def pairs() -> Any:
    """Return what is no JSON as it is, but has a JSON form."""
    return {"tuple": (1, 2), "bytes": b"text", "level": Thing._meta.label, "flags": [True, None, 1.5]}


@task
def mark(tag: Any) -> None:
    ran.append(tag)


@task
def echo(**kwargs: Any) -> dict[str, Any]:
    return kwargs


@task
def hold() -> None:
    """Run until it is told to end, by the test or by a cancel."""
    began.set()
    context = current_context()
    assert context is not None
    while not go_on.wait(0.01):
        context.signal.raise_if_set()


@task
def write(path: str) -> str:
    with Path(path).open("a") as file:
        file.write(f"{os.getpid()}\n")
    return path


@task(backend="elsewhere")
def declared_elsewhere(a: int) -> int:
    return a
