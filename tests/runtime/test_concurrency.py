"""`concurrency=n`: never more runs of a job at once, whoever claims, and nobody else pays for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import Error, connection, transaction

from django_jobs import clock, concurrency, contention, job, registry, transitions
from django_jobs.contention import is_connection_loss
from django_jobs.definition import Job
from django_jobs.models import JobExecution, JobState
from django_jobs.runtime import surplus
from django_jobs.runtime.limited_claims import FIRST_REST, LimitedClaims
from django_jobs.runtime.once import _has_work
from django_jobs.runtime.stage import Stage
from django_jobs.runtime.worker import Worker
from django_jobs.served import Served
from django_jobs.states import Status
from django_jobs.transitions import claims
from tests.factories import JobExecutionFactory, JobStateFactory, QueueStateFactory, WorkerFactory
from tests.runtime.support import held, rests, statuses
from tests.runtime.test_runner import once
from tests.runtime.workers import a_liveness, a_worker, ended, jobs_of
from tests.support import wait_for
from tests.threads import in_thread, race

pytestmark = pytest.mark.django_db


@pytest.fixture
def limited() -> Iterator[Job[...]]:
    """A job of which three may run at once, and which had another name."""
    with registry.isolated():

        @job(name="acc.three", aliases=["acc.three_of_old"], concurrency=3)
        def three() -> None: ...

        # Otherwise the first claim only makes it.
        JobStateFactory(job_name="acc.three")
        yield three


def nothing() -> None:
    """Do nothing."""


def rows_of(limited: Job[...], count: int, **fields: Any) -> list[JobExecution]:
    return [JobExecutionFactory(job_name=limited.name, **fields) for _ in range(count)]


def claim(limited: Job[...], ids: list[Any], worker: Any = None, now: datetime | None = None) -> list[JobExecution]:
    now = now or clock.now("default")
    return transitions.claim_within(
        limited,
        queue="default",
        ids=ids,
        worker_id=(worker or WorkerFactory(now=now)).pk,
        limit=len(ids),
        now=now,
        using="default",
    )


def unstarted(**options: Any) -> Worker:
    """A worker that claims when it is told to."""
    return Worker(liveness=a_liveness(), served=Served(is_any_but=True), concurrency=4, using="default", **options)


def test_rows_are_claimed_up_to_the_limit_best_first(limited: Job[...]) -> None:
    low = rows_of(limited, 3, priority=-10)
    high = rows_of(limited, 2)
    ids = [row.pk for row in (*low, *high)]
    claimed = claim(limited, ids)
    assert [row.pk for row in claimed] == [high[0].pk, high[1].pk, low[0].pk]
    assert claim(limited, ids) == []


def test_rows_under_an_old_name_and_those_of_a_dead_worker_count(limited: Job[...], now: datetime) -> None:
    dead = WorkerFactory(dead=True)
    JobExecutionFactory(job_name="acc.three_of_old", running=True)
    lost = JobExecutionFactory(job_name="acc.three", running=True, worker=dead, max_attempts=3)
    ids = [row.pk for row in rows_of(limited, 5)]
    assert len(claim(limited, ids)) == 1
    # Its handler may be alive as long as nobody has rescued it.
    transitions.rescue(JobExecution.objects.filter(pk=lost.pk), now=now, error="gone", entry={})
    assert len(claim(limited, ids)) == 1


def test_a_run_that_waits_for_its_retry_makes_room(limited: Job[...], now: datetime) -> None:
    ids = [row.pk for row in rows_of(limited, 5)]
    first, *_ = claim(limited, ids)
    later = transitions.reschedule(first, at=now + timedelta(minutes=1))
    transitions.finish([later], now=now, using="default")
    assert len(claim(limited, ids)) == 1


def test_a_job_without_a_limit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"acc\.mark has no concurrency="):
        transitions.claim_within(registry.get("acc.mark"), limit=1, using="default")


@pytest.mark.django_db(transaction=True)
def test_the_first_claim_ever_makes_the_state_that_the_next_ones_lock(limited: Job[...]) -> None:
    JobState.objects.all().delete()
    ids = [row.pk for row in rows_of(limited, 5)]
    assert claim(limited, ids) == []
    assert JobState.objects.get().job_name == "acc.three"
    assert len(claim(limited, ids)) == 3


@pytest.mark.parametrize(
    "level",
    [
        "READ COMMITTED",
        pytest.param("REPEATABLE READ", marks=[pytest.mark.postgres, pytest.mark.mysql]),
        pytest.param("SERIALIZABLE", marks=pytest.mark.postgres),
    ],
)
@pytest.mark.django_db(transaction=True)
@pytest.mark.medium
def test_processes_that_claim_at_once_start_no_more_than_may_run(limited: Job[...], level: str) -> None:
    ids = [row.pk for row in rows_of(limited, 30)]
    workers = [WorkerFactory() for _ in range(4)]

    def work(worker: Any) -> list[JobExecution]:
        if connection.vendor == "postgresql":
            with connection.cursor() as cursor:
                cursor.execute(f"SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL {level}")
        elif connection.vendor == "mysql":
            with connection.cursor() as cursor:
                cursor.execute(f"SET SESSION TRANSACTION ISOLATION LEVEL {level}")
        claimed = []
        for _ in range(15):
            mine = claim(limited, ids, worker)
            assert JobExecution.objects.running().count() <= 3
            claimed += mine
            endings = [transitions.succeed(row) for row in mine]
            transitions.finish(endings, now=clock.now("default"), using="default")
        return claimed

    claimed = [row.pk for mine in race(*(lambda w=worker: work(w) for worker in workers)) for row in mine]
    assert len(claimed) == len(set(claimed)) > 3


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_what_was_committed_before_the_lock_was_free_counts_at_any_level(limited: Job[...], monkeypatch: Any) -> None:
    rows, hold = rows_of(limited, 5), claims._hold_state

    def hold_late(*args: Any) -> bool:
        is_held = hold(*args)
        in_thread(lambda: JobExecutionFactory(job_name=limited.name, running=True))
        return is_held

    monkeypatch.setattr(claims, "_hold_state", hold_late)
    with connection.cursor() as cursor:
        cursor.execute("SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    try:
        assert len(claim(limited, [row.pk for row in rows])) == 2
    finally:
        connection.close()


@pytest.mark.postgres
@pytest.mark.mysql
@pytest.mark.django_db(transaction=True)
def test_a_state_that_another_transaction_holds_keeps_nobody_waiting(limited: Job[...]) -> None:
    """One that is frozen in the midst of a claim must not stop the other jobs of every worker."""
    ids = [row.pk for row in rows_of(limited, 5)]
    worker = WorkerFactory()
    with transaction.atomic():
        JobState.objects.select_for_update().get(job_name="acc.three")
        begun = time.monotonic()
        assert in_thread(lambda: claim(limited, ids, worker)) == []
        assert time.monotonic() - begun < 5
    assert len(claim(limited, ids, worker)) == 3


@pytest.mark.django_db(transaction=True)
class TestWorker:
    @pytest.mark.medium
    def test_runs_of_a_limited_job_go_one_by_one_and_others_beside_them(self) -> None:
        lock, overlaps, met = threading.Lock(), [], threading.Barrier(3)

        def alone() -> None:
            overlaps.append(not lock.acquire(blocking=False))
            time.sleep(0.02)
            lock.release()

        def meet() -> None:
            met.wait(10)

        with jobs_of(alone, concurrency=1) as [one], registry.isolated():
            other = job(name="tests.meet")(meet)
            rows = [one.push() for _ in range(8)] + [other.push() for _ in range(3)]
            with a_worker(concurrency=4):
                assert {ended(row).status for row in rows} == {Status.OK}
        assert overlaps == [False] * 8

    def test_they_start_in_order_of_priority_among_the_others(self) -> None:
        with jobs_of(nothing, concurrency=1) as [one], registry.isolated():
            other = job(name="tests.plain")(nothing)
            JobStateFactory(job_name=one.name)
            rows = [(one if n % 2 else other).using(priority=-n).push() for n in range(6)]
            tick = Stage(using="default", watch_queues=True)
            tick.tick()
            worker = unstarted(observed=tick)
            claimed = []
            for _ in rows:
                ((row,),) = worker.claims(1)
                claimed.append(row.pk)
                transitions.finish([transitions.succeed(row)], now=clock.now("default"), using="default")
        assert claimed == [row.pk for row in rows]

    def test_what_is_behind_a_job_at_its_limit_starts(self) -> None:
        with jobs_of(nothing, concurrency=1) as [one], registry.isolated():
            other = job(name="tests.plain")(nothing)
            JobStateFactory(job_name=one.name)
            first, *_ = [one.using(priority=50).push() for _ in range(3)]
            rows = [other.push() for _ in range(2)]
            tick = Stage(using="default", watch_queues=True)
            tick.tick()
            claimed = chain.from_iterable(unstarted(observed=tick).claims(3))
            assert [row.pk for row in claimed] == [first.pk, *(row.pk for row in rows)]

    @pytest.mark.medium
    def test_short_runs_are_not_held_up_by_the_limit(self) -> None:
        def short() -> None: ...

        with jobs_of(short, concurrency=2) as [one]:
            rows = one.push_many([{}] * 40)
            with a_worker(concurrency=4):
                begun = time.monotonic()
                wait_for(lambda: not JobExecution.objects.live().exists(), 20, "all ended")
                assert time.monotonic() - begun < 10
        assert len(rows) == 40

    def test_jobs_without_a_limit_cost_the_same_statements_beside_one(self, django_assert_num_queries: Any) -> None:
        with jobs_of(nothing, concurrency=1), registry.isolated():
            other = job(name="tests.plain")(nothing)
            rows = [other.push() for _ in range(2)]
            worker = unstarted()
            # MariaDB takes two, in a transaction.
            with django_assert_num_queries(4 if connection.vendor == "mysql" else 1):
                assert [[row.pk for row in claimed] for claimed in worker.claims(2)] == [[row.pk for row in rows]]


def test_a_job_that_is_full_rests_ever_longer_and_is_woken_by_its_end(limited: Job[...]) -> None:
    found = LimitedClaims(using="default")
    assert found.ready(["acc.three"]) == ["acc.three"]
    found._note("acc.three", all_taken=False)
    assert found.ready(["acc.three", "acc.three_of_old"]) == []
    found.wake(["acc.three"])
    assert found.ready(["acc.three"]) == ["acc.three"]
    rests_for = []
    for all_taken in (False, False, True, False):
        found._note("acc.three", all_taken=all_taken)
        rests_for.append(found._rests.get("acc.three", (0.0, 0.0))[1])
    assert rests_for == [FIRST_REST, 2 * FIRST_REST, 0.0, FIRST_REST]


def test_no_more_rows_are_claimed_from_all_queues_together_than_there_are_slots(
    limited: Job[...], now: datetime
) -> None:
    rows_of(limited, 2, queue="b")
    best = rows_of(limited, 2, queue="a", priority=50)
    owner = {"worker_id": WorkerFactory().pk, "now": now}
    claimed = LimitedClaims(using="default").claims([limited.name], [], ["a", "b"], 2, **owner)
    assert {row.pk for some in claimed for row in some} == {row.pk for row in best}


class TestSurplus:
    @pytest.fixture(autouse=True)
    def few(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(surplus, "KEPT", 6)

    def test_what_is_more_is_parked_and_the_best_stay(self, limited: Job[...], now: datetime) -> None:
        normal = rows_of(limited, 20, now=now)
        high = rows_of(limited, 4, now=now, priority=50)
        other = JobExecutionFactory(now=now)
        tick = Stage(using="default")
        assert rests(tick.tick(now))
        found = {row.pk: row for row in JobExecution.objects.all()}
        pending = {pk for pk, row in found.items() if row.status == Status.PENDING}
        assert pending == {row.pk for row in (*high, *normal[:2], other)}
        assert {found[row.pk].parked_reason for row in normal[2:]} == {"concurrency"}
        assert tick.limited_jobs == {"acc.three", "acc.three_of_old"}

    def test_a_few_more_than_are_kept_stay(self, limited: Job[...], now: datetime) -> None:
        rows_of(limited, 12, now=now)
        Stage(using="default").tick(now)
        assert set(statuses().values()) == {Status.PENDING}

    def test_it_comes_back_best_first_when_few_are_left(self, limited: Job[...], now: datetime) -> None:
        rows = rows_of(limited, 30, now=now)
        urgent = rows[-1]
        tick = Stage(using="default")
        tick.tick(now)
        JobExecution.objects.filter(pk=urgent.pk).update(rank=-100)
        left = JobExecution.objects.pending().order_by("scheduled_at", "pk")
        # As many as are kept: nothing is to do.
        assert rests(tick.tick(now))
        started = [row.pk for row in left[:4]]
        JobExecution.objects.filter(pk__in=started).delete()
        assert tick.tick(now) == surplus.SOON
        pending = set(JobExecution.objects.pending().values_list("pk", flat=True))
        assert pending == {urgent.pk, *(row.pk for row in rows[4:9])}

    def test_another_process_brings_back_what_one_has_parked(self, limited: Job[...], now: datetime) -> None:
        rows_of(limited, 20, now=now)
        Stage(using="default").tick(now)
        JobExecution.objects.pending().delete()
        other = Stage(using="default")
        other.tick(now)
        assert JobExecution.objects.pending().count() == 6

    def test_each_queue_keeps_rows_of_its_own(self, limited: Job[...], now: datetime) -> None:
        rows_of(limited, 20, now=now, queue="a")
        rows_of(limited, 20, now=now, queue="b", priority=-50)
        tick = Stage(using="default")
        # On a slow machine it gets to the second queue in its second tick.
        while not tick.tick(now):
            pass
        pending = list(JobExecution.objects.pending().values_list("queue", flat=True))
        assert sorted(pending) == ["a"] * 6 + ["b"] * 6

    def test_many_are_parked_window_after_window(
        self, limited: Job[...], now: datetime, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(surplus, "WINDOW", 20)
        rows = rows_of(limited, 60, now=now)
        tick = Stage(using="default")
        for _ in range(10):
            if tick.tick(now) > 0:
                break
        pending = set(JobExecution.objects.pending().values_list("pk", flat=True))
        assert pending == {row.pk for row in rows[:6]}

    def test_rows_behind_many_others_are_left_where_they_are(
        self, limited: Job[...], now: datetime, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(surplus, "WINDOW", 10)
        for _ in range(10):
            JobExecutionFactory(now=now, priority=10)
        parked = rows_of(limited, 3, now=now, parked=True, parked_reason="concurrency")
        tick = Stage(using="default")
        tick.tick(now)
        assert {statuses()[row.pk] for row in parked} == {Status.SCHEDULED}
        assert tick.limited_jobs == set()

    def test_after_a_pause_rows_come_back_a_few_at_a_time(self, limited: Job[...], now: datetime) -> None:
        limited.pause()
        rows_of(limited, 20, now=now)
        tick = Stage(using="default")
        tick.tick(now)
        assert set(JobExecution.objects.values_list("parked_reason", flat=True)) == {"paused"}
        limited.resume()
        tick.tick(now + timedelta(seconds=1))
        assert JobExecution.objects.pending().count() == 6

    def test_rows_of_a_paused_job_stay_parked_for_whatever_reason(self, limited: Job[...], now: datetime) -> None:
        rows_of(limited, 20, now=now)
        tick = Stage(using="default")
        tick.tick(now)
        limited.pause()
        for second in range(1, 4):
            tick.tick(now + timedelta(seconds=second))
        assert not JobExecution.objects.pending().exists()

    def test_all_come_back_when_the_limit_is_taken_away(self, now: datetime) -> None:
        with registry.isolated():

            @job(name="acc.free")
            def free() -> None: ...

            rows_of(free, 20, now=now, parked=True, parked_reason="concurrency")
            # Of a job that this process does not know another one may know the limit.
            JobExecutionFactory(job_name="acc.elsewhere", parked=True, parked_reason="concurrency")
            Stage(using="default").tick(now)
        assert JobExecution.objects.pending().count() == 20

    @pytest.mark.postgres
    @pytest.mark.mysql
    @pytest.mark.django_db(transaction=True)
    def test_a_surplus_row_that_a_transaction_holds_keeps_no_other_waiting(
        self, limited: Job[...], now: datetime
    ) -> None:
        rows = rows_of(limited, 20, now=now)
        process = Stage(using="default")
        with held(rows[-1]):
            in_thread(lambda: process.tick(now))
        assert JobExecution.objects.pending().count() == 7


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_a_process_that_freezes_with_the_lock_loses_it(limited: Job[...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: one that was stopped, or cut off, while it claimed kept all others from the job for as long."""
    monkeypatch.setattr(contention, "SILENCE", 0.3)
    ids = [row.pk for row in rows_of(limited, 5)]
    frozen, thaws = threading.Event(), threading.Event()
    errors: list[Exception] = []

    def freeze(**options: Any) -> list[JobExecution]:
        frozen.set()
        thaws.wait(20)
        return claims(**options)

    def work() -> None:
        try:
            claim(limited, ids)
        except Error as error:
            errors.append(error)
        finally:
            connection.close()

    claims = transitions.claim
    with monkeypatch.context() as patch:
        patch.setattr(transitions.claims, "claim", freeze)
        thread = threading.Thread(target=work)
        thread.start()
        assert frozen.wait(10)
    worker = WorkerFactory(now=clock.now("default"))
    try:
        assert wait_for(lambda: claim(limited, ids, worker), 10, "the lock is free")
    finally:
        thaws.set()
        thread.join(20)
    assert errors and is_connection_loss(errors[0], "default")
    assert JobExecution.objects.running().count() == 3


@pytest.mark.django_db(transaction=True)
class TestOnce:
    @pytest.mark.medium
    def test_it_runs_all_rows_of_a_limited_job(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(surplus, "KEPT", 2)
        with jobs_of(nothing, concurrency=1) as [one]:
            one.push_many([{}] * 12)
            assert once() == 0
        assert not JobExecution.objects.live().exists()

    def test_it_looks_again_when_a_run_of_a_limited_job_came_and_went_while_it_looked(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with jobs_of(nothing, concurrency=1) as [one]:
            one.push()
            tick = Stage(using="default", watch_queues=True)
            worker = unstarted(observed=tick)
            parts: Any = SimpleNamespace(stage=tick, liveness=worker._liveness, using="default")

            def full(*args: Any, **options: Any) -> frozenset[str]:
                # The run that fills the job now has ended before its row is looked for.
                worker.claimed += 1
                return frozenset({one.name})

            monkeypatch.setattr(concurrency, "full", full)
            assert _has_work(parts, worker)

    @pytest.mark.parametrize("kind", ["claimed", "due"])
    def test_a_row_that_is_on_its_way_is_work(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """A claim whose rows are not in their slots yet, and one that came due after stage had looked."""
        tick = Stage(using="default", watch_queues=True)
        worker = unstarted(observed=tick)
        parts: Any = SimpleNamespace(stage=tick, liveness=worker._liveness, using="default")
        assert not _has_work(parts, worker)
        monkeypatch.setattr(tick, "tick", lambda: 1.0)
        if kind == "claimed":
            row = JobExecutionFactory(running=True)
            JobExecution.objects.filter(pk=row.pk).update(worker_id=worker._liveness.worker_id)
        else:
            JobExecutionFactory(scheduled=True, now=clock.now("default") - timedelta(hours=1))
        assert _has_work(parts, worker)

    def test_a_row_that_waits_wakes_the_worker(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It looks seldom while nobody tells it of rows."""
        tick = Stage(using="default", watch_queues=True)
        worker, wakes = unstarted(observed=tick), []
        parts: Any = SimpleNamespace(stage=tick, liveness=worker._liveness, using="default")
        monkeypatch.setattr(worker, "wake", lambda: wakes.append(1))
        JobExecutionFactory()
        assert _has_work(parts, worker)
        assert wakes == [1]

    def test_it_does_not_wait_for_runs_of_other_processes(self) -> None:
        with jobs_of(nothing, concurrency=1) as [one]:
            JobExecutionFactory(job_name=one.name, running=True)
            waiting = one.push()
            parked = JobExecutionFactory(job_name=one.name, parked=True, parked_reason="concurrency")
            assert once() == 0
            # One may be pending, the other may be back.
            assert {statuses()[row.pk] for row in (waiting, parked)} <= {Status.PENDING, Status.SCHEDULED}

    @pytest.mark.parametrize("options", [{}, {"queues": ["default"]}, {"exclude": ["crm"]}], ids=str)
    def test_it_does_not_wait_for_surplus_in_queues_that_it_does_not_serve(
        self, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Fault: of a hundred rows of a job with a limit in a paused queue some are parked, and it waited for them."""
        monkeypatch.setattr(surplus, "KEPT", 2)
        if not options:
            QueueStateFactory(queue="crm", paused_at=clock.now("default"))
        with jobs_of(nothing, concurrency=1) as [one]:
            one.using(queue="crm").push_many([{}] * 12)
            with caplog.at_level("INFO"):
                assert once(max_time=5, **options) == 0
        assert "stopping: nothing left to do" in caplog.text
        assert JobExecution.objects.live().count() == 12
