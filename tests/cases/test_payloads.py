"""Values that one database takes and another refuses, from the push through the run to the stored outcome."""

from __future__ import annotations

import inspect
import logging
import math
from decimal import Decimal
from typing import Any

import pytest
from django.db import transaction

from django_jobs import InvalidPayload, JobContext
from django_jobs.models import JobExecution
from django_jobs.states import Status
from tests.acc import jobs
from tests.acc.models import Thing
from tests.portable import task_backends
from tests.portable.fixtures import portable_tasks
from tests.runtime.workers import a_worker, ended, jobs_of
from tests.support import assert_consistent

logger = logging.getLogger(__name__)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    "value",
    [
        {"a": "x\x00y"},
        {"x\x00": 1},
        {"a": ["\x00"]},
        {"x": math.nan},
        [[math.inf]],
        -math.inf,
        {"x": [Decimal("NaN")]},
    ],
    ids=repr,
)
def test_a_refused_payload_leaves_the_callers_transaction_usable(value: Any) -> None:
    r"""JSON with \u0000 or NaN passes Python and fails in the caller's transaction, on some databases only.

    Sources: kestra-io/kestra#10326, Zipstack/unstract PR#2289, windmill-labs/windmill PR#10274,
    encode/django-rest-framework#5235, adamchainz/django-mysql PR#346.
    """

    def take(number: int, value: Any) -> None: ...

    with jobs_of(take) as [taking], transaction.atomic():
        Thing.objects.create(name="before")
        with pytest.raises(InvalidPayload, match=r"payload\.value"):
            taking.push(number=1, value=value)
        assert Thing.objects.count() == 1
    with portable_tasks() as tasks, transaction.atomic():
        with pytest.raises(InvalidPayload, match=r"payload\.kwargs\.value"):
            tasks.echo.enqueue(number=1, value=value)
        assert Thing.objects.count() == 1
    assert Thing.objects.count() == 1
    assert not JobExecution.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_what_a_handler_returns_logs_or_raises_ends_its_row_whatever_it_holds() -> None:
    r"""NaN, \u0000 or a lone surrogate in a result, a log line or an error leaves the row running for ever.

    Sources: kestra-io/kestra#10326, encode/django-rest-framework#5235, meeb/tubesync#263.
    """
    nasty = "💥 \x00 \ud800 NaN"

    def give(ctx: JobContext) -> Any:
        logger.warning("%s %r", nasty, math.nan, extra={"ratio": math.nan, "text": nasty})
        ctx.progress(1, 2, note=nasty)
        return {"ratio": math.nan, "text": nasty}

    def burst() -> None:
        logger.warning(nasty)
        raise ValueError(nasty)

    with jobs_of(give, burst) as [giving, bursting], a_worker():
        given = ended(giving.using(key="💥 é").push())
        burst_row = ended(bursting.push())
        assert (given.status, given.result) == (Status.OK, None)
        assert given.logs[0]["message"].startswith("💥 \ufffd \ufffd NaN nan")
        assert given.key == "💥 é"
        assert burst_row.status == Status.ERROR
        assert burst_row.error == "ValueError: 💥 \ufffd \ufffd NaN"
        assert ended(giving.push()).status == Status.OK
    # A task's value is asked for later: one that cannot be stored is an error, and no row is left running for it.
    with portable_tasks() as tasks, a_worker():
        for what in ("nan", "inf", "decimal", "nul", "surrogate"):
            row = ended(JobExecution.objects.get(pk=tasks.give.enqueue(what).id))
            assert (row.status, row.result) == (Status.ERROR, None)
            assert "its return value cannot be stored: result" in row.error
    assert_consistent()


@pytest.mark.django_db(transaction=True)
def test_arguments_named_like_internals_arrive_in_the_handler() -> None:
    """An argument whose name equals an internal one is silently dropped or overwritten.

    Source: coleifer/huey 3.0.2 changelog.
    """
    got: list[dict[str, Any]] = []

    def echo(
        task: int,
        job: int,
        self: int,
        key: int,
        delay: int,
        priority: int,
        payload: int,
        context: int,
        args: int,
        kwargs: int,
        id: int,  # noqa: A002 - as users call theirs
        logger: int,
    ) -> None:
        got.append({name: value for name, value in locals().items() if name != "got"})

    given = {name: number for number, name in enumerate(inspect.signature(echo).parameters)}
    with jobs_of(echo) as [echoing], a_worker():
        row = ended(echoing.using(key="K", priority="high").push(**given))
        assert (row.status, row.key, row.priority) == (Status.OK, "K", 50)
    assert got == [given]
    with portable_tasks() as tasks, a_worker():
        # By the backend: Task.enqueue() has a self of its own.
        enqueued = task_backends["default"].enqueue(tasks.echo, [], given)
        assert ended(JobExecution.objects.get(pk=enqueued.id)).result == given


@pytest.mark.django_db(transaction=True)
def test_rows_that_wait_survive_another_secret_key(settings: Any) -> None:
    """A payload signed with the secret key is unreadable after its rotation: queued tasks fail with BadSignature.

    Sources: django-q2/django-q2 PR#311, PR#332.
    """
    settings.SECRET_KEY = "of the day of the push"
    row = jobs.mark.using(key="K").push(tag="waits")
    settings.SECRET_KEY = "of the day of the run"
    with a_worker():
        assert ended(row).status == Status.OK
    assert_consistent()
