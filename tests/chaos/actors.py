"""The processes that push jobs, and the one that cancels and retries them: `python -m tests.chaos.actors NAME SEED`."""

from __future__ import annotations

import sys
import time
from typing import Any

import django
from django.db import Error, connection, transaction

from tests.chaos import journal, plan


class RollBack(Exception):
    """The plan says that this transaction is not to be kept."""


def marker(token: str) -> str:
    """Return the name of the Thing that is there exactly if the transaction of this order was committed."""
    return f"order-{token}"


def produce(name: str, seed: int) -> None:
    for order in plan.orders(seed, name):
        time.sleep(order.pause)
        try:
            fate = "committed" if carry_out(order) else "rolled back"
        except RollBack:
            fate = "rolled back"
        except Exception as error:
            passes(error, order.token)
            fate = "unknown"
        journal.write(event="end", token=order.token, fate=fate)


def carry_out(order: plan.Order) -> bool:
    """Make the pushes of an order; return whether they were committed.

    Not to raise does not mean that: when the connection is lost while a savepoint is rolled back, Django keeps the
    exception that led to the rollback, and rolls everything back at the end without a word.
    """
    from tests.acc.models import Thing

    committed: list[bool] = []
    with transaction.atomic():
        transaction.on_commit(lambda: committed.append(True))
        Thing.objects.create(name=marker(order.token))
        push(order, order.wishes)
        if order.undone:
            try:
                with transaction.atomic():
                    push(order, order.undone, undone=True)
                    raise RollBack
            except RollBack:
                pass
        time.sleep(order.linger)
        if order.rolls_back:
            raise RollBack
    return bool(committed)


def push(order: plan.Order, wishes: tuple[plan.Wish, ...], *, undone: bool = False) -> None:
    from django_jobs import services
    from tests.acc import jobs

    named = [(wish, getattr(jobs, wish.job).using(**wish.options)) for wish in wishes]
    if order.in_bulk:
        rows = services.push_many([job.item(**wish.payload) for wish, job in named])
    else:
        rows = [job.push(**wish.payload) for wish, job in named]
    for wish, row in zip(wishes, rows, strict=True):
        journal.write(
            event="push",
            row_id=str(row.pk),
            token=order.token,
            job_name=row.job_name,
            tag=wish.tag,
            created=bool(row.created),
            undone=undone,
            key=wish.options.get("key", ""),
            thing=wish.thing,
        )


def meddle(name: str, seed: int) -> None:
    for meddling in plan.meddlings(seed, name):
        time.sleep(meddling.pause)
        try:
            if meddling.linger is None:
                act(meddling)
                continue
            with transaction.atomic():
                act(meddling)
                time.sleep(meddling.linger)
                if meddling.rolls_back:
                    raise RollBack
        except RollBack:
            continue
        except Exception as error:
            passes(error, meddling.verb)


def act(meddling: plan.Meddling) -> None:
    from django_jobs import services
    from django_jobs.models import JobExecution
    from tests.acc import jobs

    rows = JobExecution.objects
    match meddling.verb:
        case "trigger":
            jobs.tick.trigger(by="meddler")
        case "start_now":
            for row in some(rows.scheduled(), meddling):
                services.start_now(row, by="meddler")
        case "cancel" | "cancel running":
            for row in some(rows.running() if meddling.verb == "cancel running" else rows.live(), meddling):
                journal.write(event="ask", verb="cancel", row_id=str(row.pk))
                services.cancel(row, by="meddler")
        case "retry":
            for row in some(rows.filter(status__in=("error", "cancelled")), meddling):
                journal.write(event="ask", verb="retry", row_id=str(row.pk))
                services.retry(row, by="meddler")
        case "cancel_many" | "retry_many":
            verb = meddling.verb.removesuffix("_many")
            chosen = some(rows.live() if verb == "cancel" else rows.filter(status__in=("error", "cancelled")), meddling)
            for row in chosen:
                journal.write(event="ask", verb=verb, row_id=str(row.pk))
            getattr(services, meddling.verb)(rows.filter(pk__in=[row.pk for row in chosen]), by="meddler")


def some(queryset: Any, meddling: plan.Meddling) -> list[Any]:
    """Return as many rows as are asked for from the place that is asked for."""
    found = list(queryset.order_by("-pk")[:200])
    start = int(meddling.where * len(found))
    return found[start : start + meddling.count]


def passes(error: Exception, what: str) -> None:
    """Go on after what is to be expected: a refusal, a database that is away or was busy; raise anything else."""
    from django_jobs import Conflict

    print(f"{time.time():.3f} {what}: {type(error).__name__}: {error}", flush=True)
    if not isinstance(error, Conflict | Error):
        raise error
    connection.close()
    time.sleep(0.3)


def main() -> None:
    name, seed = sys.argv[1], int(sys.argv[2])
    django.setup()
    actor = meddle if name.startswith("meddler") else produce
    actor(name, seed)


if __name__ == "__main__":
    main()
