"""Bounded reads and isolated writes for all ticks: no tick reads a whole table, and no row stops the others."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from uuid import UUID

from django.db import DatabaseError, Error, transaction
from django.db.models import QuerySet

from django_jobs.contention import is_connection_loss, passes_over_locks, retried
from django_jobs.models import JobExecution
from django_jobs.querysets import ExecutionQuerySet
from django_jobs.rows import by_id

logger = logging.getLogger("django_jobs.runtime")

T = TypeVar("T")
PAGE = 500


def portions(items: Sequence[T], size: int = PAGE) -> Iterator[Sequence[T]]:
    """Yield the items in runs of at most `size`."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def distinct(queryset: QuerySet[Any], field: str, *, limit: int = 1000) -> list[str]:
    """Return the distinct values of a column, at most `limit`, with one probe of its index for each.

    SELECT DISTINCT would read every row: few databases skip from value to value.
    """
    values: list[str] = []
    rest = queryset
    while len(values) < limit:
        value = rest.order_by(field).values_list(field, flat=True).first()
        if value is None:
            break
        values.append(value)
        rest = queryset.filter(**{f"{field}__gt": value})
    return values


@contextlib.contextmanager
def contained(logger: logging.Logger, what: str, *, using: str) -> Iterator[None]:
    """Log what the block raises, in the words of `what`, and go on after it; only a lost connection ends the tick."""
    try:
        yield
    except Error as error:
        if is_connection_loss(error, using):
            raise
        logger.error("%s: %s", what, error)  # noqa: TRY400 - one line
    except Exception:
        logger.exception("%s", what)


@dataclass(slots=True, kw_only=True)
class Unmoved:
    """Rows that were not moved: refused by the database, or held by another transaction."""

    refused: list[UUID] = field(default_factory=list)
    held: list[UUID] = field(default_factory=list)


def move(ids: Sequence[UUID], verb: Callable[[ExecutionQuerySet], Any], *, using: str) -> Unmoved:
    """Apply a verb to rows, all at once or, if the database refuses that, one by one; return those left out."""
    try:
        return Unmoved(held=_move_unlocked(ids, verb, using=using))
    except DatabaseError as error:
        if is_connection_loss(error, using):
            raise
        if len(ids) == 1:
            logger.error("execution %s cannot be moved and is left out for a while: %s", ids[0], error)  # noqa: TRY400
            return Unmoved(refused=list(ids))
    parts = [move([pk], verb, using=using) for pk in ids]
    return Unmoved(
        refused=[pk for part in parts for pk in part.refused], held=[pk for part in parts for pk in part.held]
    )


@retried
def _move_unlocked(ids: Sequence[UUID], verb: Callable[[ExecutionQuerySet], Any], *, using: str) -> list[UUID]:
    """Apply a verb to the rows that no other transaction holds; return the others.

    Without waiting: one transaction that stays open after touching a single row would hold up all of them.
    """
    rows = JobExecution.objects.using(using).filter(pk__in=ids)
    if not passes_over_locks(using):
        verb(rows)
        return []
    with transaction.atomic(using=using):
        free = set(rows.select_for_update(skip_locked=True).values_list("pk", flat=True))
        if free:
            with by_id(using):
                verb(JobExecution.objects.using(using).filter(pk__in=free))
    return [pk for pk in ids if pk not in free]
