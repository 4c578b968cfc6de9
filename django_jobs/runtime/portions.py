"""Bounded reads and isolated writes, which all ticks share: no tick reads a whole table, no row stops the others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar
from uuid import UUID

from django.db import DatabaseError
from django.db.models import QuerySet

from django_jobs import dispatchers
from django_jobs.contention import is_connection_loss
from django_jobs.models import JobExecution
from django_jobs.querysets import ExecutionQuerySet

logger = logging.getLogger("django_jobs.runtime")

T = TypeVar("T")
PAGE = 500


def portions(items: Sequence[T], size: int = PAGE) -> Iterator[Sequence[T]]:
    """Yield the items in runs of at most `size`."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def distinct(queryset: QuerySet[Any], field: str, *, limit: int = 1000) -> list[str]:
    """Return the different values of a column, at most `limit`, by one probe of its index each.

    SELECT DISTINCT would read every row; only some databases skip from value to value by themselves.
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


def move(ids: Sequence[UUID], verb: Callable[[ExecutionQuerySet], Any], *, using: str) -> list[UUID]:
    """Apply a verb to rows, all at once or, when the database refuses that, one by one; return those it refuses."""
    rows = JobExecution.objects.using(using)
    try:
        verb(rows.filter(pk__in=ids))
        return []
    except DatabaseError as error:
        if is_connection_loss(error, using):
            raise
        if len(ids) == 1:
            logger.error("execution %s cannot be moved and is left out for a while: %s", ids[0], error)  # noqa: TRY400
            return list(ids)
    return [refused for pk in ids for refused in move([pk], verb, using=using)]


def hint(rows: Iterable[tuple[str, int, UUID]]) -> None:
    """Announce pending rows, given as queue, rank and id, in one batch for each queue and rank."""
    batches: dict[tuple[int, str], list[UUID]] = {}
    for queue, rank, pk in rows:
        batches.setdefault((rank, queue), []).append(pk)
    for (rank, queue), ids in sorted(batches.items()):
        dispatchers.announce(queue, ids, priority=-rank)
