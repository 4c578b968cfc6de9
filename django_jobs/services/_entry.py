"""Shared by all services: how they are entered, and helpers for the transaction they are called in."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

from django.core.exceptions import SynchronousOnlyOperation
from django.db import connections, transaction

from django_jobs.contention import in_transaction
from django_jobs.context import shielded

logger = logging.getLogger("django_jobs")

P = ParamSpec("P")
R = TypeVar("R")


def service(function: Callable[P, R]) -> Callable[P, R]:
    """Shield the call from interrupts of the run it is made in; in a running event loop, name the async twin."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            with shielded():
                return function(*args, **kwargs)
        except SynchronousOnlyOperation as error:
            name = function.__name__
            twin = f"a{name}()" if f"a{name}" in function.__globals__ else f"sync_to_async({name})(…)"
            raise SynchronousOnlyOperation(
                f"{name}() was called from a running event loop, where Django refuses to use the database; "
                f"await {twin} instead."
            ) from error

    return call


def savepoint(connection: Any) -> AbstractContextManager[Any]:
    """Keep an open transaction usable when the statement inside fails; does nothing outside of one."""
    return transaction.atomic(using=connection.alias) if in_transaction(connection) else nullcontext()


def after_commit(connection: Any, action: Callable[[], object]) -> None:
    """Run `action` once the writes are visible to others; never with autocommit off, where that moment is unknown."""
    if connection.in_atomic_block or connection.get_autocommit():
        connection.on_commit(action, robust=True)


def note(what: str, by_name: str, *, using: str) -> None:
    """Log, once it is committed, what somebody did of which no row tells."""
    who = " ".join(by_name.split()) or "somebody"
    after_commit(connections[using], partial(logger.info, "%s by %s", what, who))
