"""The real table driven by verbs in any order: several workers and connections, clock jumps, keys, late endings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar
from uuid import UUID

import hypothesis
import pytest
from django.db import IntegrityError, connections, transaction
from django.db.models import Q
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from django_jobs import transitions
from django_jobs.models import JobExecution, Worker
from django_jobs.querysets import key_digest
from django_jobs.states import FINAL, LIVE, TRANSITIONS, Status
from django_jobs.transitions import Ending
from tests.factories import JobExecutionFactory, WorkerFactory
from tests.moves import is_legal
from tests.verbs import LOST

T = TypeVar("T")
Row = dict[str, Any]

NAMES = ["acc.mark", "acc.slow"]
COLUMNS = [field.attname for field in JobExecution._meta.concrete_fields]

HOW = ["succeed", "drop", "fail", "reschedule", "later", "release", "abort"]

index = st.integers(0, 2)


class Lane:
    """A thread with a connection of its own, as a process has it."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1)

    def start(self, call: Callable[[], T]) -> Future[T]:
        return self._pool.submit(call)

    def do(self, call: Callable[[], T]) -> T:
        return self._pool.submit(call).result(30)

    def close(self) -> None:
        self._pool.submit(connections.close_all).result(30)
        self._pool.shutdown()


def reachable(source: Status, moves: int) -> set[Status]:
    """Return where a row may be after up to so many moves."""
    found = {source}
    for _ in range(moves):
        found |= {target for target in Status for start in found if is_legal(start, target)}
    return found


class ExecutionMachine(RuleBasedStateMachine):
    """Each rule is one act of one process; what it must do to the table is worked out from the table before it."""

    lanes: list[Lane]

    rows = Bundle("rows")
    # What each claim brought, as its worker holds it: runs grow old there, and are ended all the same. A list for each
    # claim, since what is drawn next must not depend on who won a race.
    hands = Bundle("hands")

    def __init__(self) -> None:
        super().__init__()
        JobExecution.objects.all().delete()
        Worker.objects.all().delete()
        self.now = datetime(2026, 3, 1, 12, tzinfo=UTC)
        self.workers = [WorkerFactory(now=self.now).pk for _ in range(3)]
        self.table: dict[UUID, Row] = {}
        self.held: list[JobExecution] = []

    # Reading

    def read(self) -> dict[UUID, Row]:
        return {row["id"]: row for row in JobExecution.objects.values(*COLUMNS)}

    def fresh(self, worker_id: UUID) -> bool:
        return Worker.objects.fresh(self.now).filter(pk=worker_id).exists()

    def owns(self, run: JobExecution) -> bool:
        row = self.table.get(run.pk)
        return row is not None and row["status"] == Status.RUNNING and row["run_no"] == run.run_no

    def moved(self, expected: set[UUID], *verbs: str) -> None:
        """Check that exactly the expected rows moved, as one of the verbs moves them; read the table anew."""
        before, after = self.table, self.read()
        assert {pk for pk in before if pk not in after or before[pk] != after[pk]} == expected
        for pk in expected & set(after):
            source, target = before[pk]["status"], after[pk]["status"]
            moves = [TRANSITIONS[verb] for verb in verbs]
            assert any(source in move.sources and target in move.targets for move in moves), (verbs, source, target)
        self.check_history(before, after)
        self.table = after

    def check_history(self, before: dict[UUID, Row], after: dict[UUID, Row]) -> None:
        for pk in set(before) & set(after):
            assert after[pk]["run_no"] >= before[pk]["run_no"]
            # The budget is frozen at push; only a person's retry sets it anew.
            assert after[pk]["max_attempts"] == before[pk]["max_attempts"] or after[pk]["retried_at"] == self.now

    # What people and programs do

    @initialize(target=rows)
    def some_rows_are_there(self) -> Any:
        return multiple(
            *(
                self.push(lane=0, key=key, name=name, priority=0, delay=delay, attempts=attempts)
                for key, name, delay, attempts in [
                    ("", "acc.mark", 0, 1),
                    ("a", "acc.mark", 0, 5),
                    ("", "acc.slow", 0, 2),
                    ("", "acc.mark", 30, 2),
                ]
            )
        )

    @rule(
        target=rows,
        lane=index,
        key=st.sampled_from(["", "", "a", "b"]),
        name=st.sampled_from(NAMES),
        priority=st.sampled_from([-50, 0, 0, 100]),
        delay=st.sampled_from([0, 0, 30]),
        attempts=st.integers(1, 3),
    )
    def push(self, lane: int, key: str, name: str, priority: int, delay: int, attempts: int) -> UUID:
        row = JobExecutionFactory.build(
            job_name=name,
            key=key,
            priority=priority,
            max_attempts=attempts,
            scheduled_at=self.now + timedelta(seconds=delay),
        )
        taken = any(
            other["job_name"] == name and other["active_key"] == row.active_key is not None
            for other in self.table.values()
        )

        def insert() -> bool:
            try:
                with transaction.atomic():
                    transitions.insert([row], now=self.now, using="default")
            except IntegrityError:
                return False
            return True

        assert self.lanes[lane].do(insert) == (not taken)
        after = self.read()
        assert set(after) - set(self.table) == (set() if taken else {row.pk})
        if taken:
            return row.pk
        assert is_legal(None, Status(after[row.pk]["status"]))
        assert after[row.pk]["status"] == (Status.SCHEDULED if delay else Status.PENDING)
        self.table[row.pk] = after[row.pk]
        self.moved(set())
        return row.pk

    @rule(seconds=st.sampled_from([1, 20, 31, 50, -1, -40, 3600, -3600]))
    def the_clock_jumps(self, seconds: int) -> None:
        self.now += timedelta(seconds=seconds)

    @rule(lane=index, pk=rows)
    def cancel(self, lane: int, pk: UUID) -> None:
        status = self.table[pk]["status"] if pk in self.table else None
        waits = status in {Status.PENDING, Status.SCHEDULED}
        one = JobExecution.objects.filter(pk=pk)
        assert self.lanes[lane].do(lambda: transitions.cancel(one, now=self.now, by="7", by_name="Ada")) == int(waits)
        self.moved({pk} if waits else set(), "cancel")

    @rule(lane=index, name=st.sampled_from(NAMES))
    def mark_cancel(self, lane: int, name: str) -> None:
        marks = {
            pk
            for pk, row in self.table.items()
            if row["job_name"] == name and row["status"] == Status.RUNNING and row["cancel_requested_at"] is None
        }
        rows = JobExecution.objects.filter(job_name=name)
        count = self.lanes[lane].do(lambda: transitions.mark_cancel(rows, now=self.now, by="7", by_name="Ada"))
        assert count == len(marks)
        after = self.read()
        for pk in marks:
            assert (after[pk]["status"], after[pk]["cancel_requested_at"]) == (Status.RUNNING, self.now)
            self.table[pk] = after[pk]
        self.moved(set())

    @rule(lane=index, pk=rows, retries=st.integers(0, 1))
    def retry(self, lane: int, pk: UUID, retries: int) -> None:
        row = self.table.get(pk)
        ended = row is not None and row["status"] in {Status.ERROR, Status.CANCELLED}
        digest = key_digest(None, row["key"]) if row is not None and row["key"] else None
        taken = ended and any(
            other["job_name"] == row["job_name"] and other["active_key"] == digest is not None
            for other in self.table.values()
        )
        one = JobExecution.objects.filter(pk=pk)

        def again() -> int:
            try:
                with transaction.atomic():
                    return transitions.retry(
                        one, now=self.now, retries=retries, by="7", by_name="Ada", active_key=digest
                    )
            except IntegrityError:
                return -1

        assert self.lanes[lane].do(again) == (-1 if taken else int(ended))
        moves = ended and not taken
        self.moved({pk} if moves else set(), "retry")
        if moves:
            assert self.table[pk]["max_attempts"] == self.table[pk]["attempt"] + 1 + retries
            assert self.table[pk]["cancel_requested_at"] is None

    @rule(lane=index, pk=rows)
    def start_now(self, lane: int, pk: UUID) -> None:
        waits = pk in self.table and self.table[pk]["status"] == Status.SCHEDULED
        one = JobExecution.objects.filter(pk=pk)
        assert self.lanes[lane].do(lambda: transitions.start_now(one, now=self.now)) == int(waits)
        self.moved({pk} if waits else set(), "start_now")

    # What stage does

    @rule(lane=index)
    def promote(self, lane: int) -> None:
        due = {
            pk
            for pk, row in self.table.items()
            if row["status"] == Status.SCHEDULED and not row["parked_reason"] and row["scheduled_at"] <= self.now
        }
        everything = JobExecution.objects.all()
        assert self.lanes[lane].do(lambda: transitions.promote(everything, now=self.now)) == len(due)
        self.moved(due, "promote")

    @rule(lane=index, name=st.sampled_from(NAMES))
    def park(self, lane: int, name: str) -> None:
        pending = {pk for pk, row in self.table.items() if row["status"] == Status.PENDING and row["job_name"] == name}
        rows = JobExecution.objects.filter(job_name=name)
        assert self.lanes[lane].do(lambda: transitions.park(rows, "paused", now=self.now)) == len(pending)
        self.moved(pending, "park")

    @rule(lane=index)
    def unpark(self, lane: int) -> None:
        parked = {pk for pk, row in self.table.items() if row["parked_reason"]}
        everything = JobExecution.objects.all()
        assert self.lanes[lane].do(lambda: transitions.unpark(everything, now=self.now)) == len(parked)
        self.moved(parked, "unpark")

    # What workers do

    @rule(target=hands, worker=index, limit=st.integers(1, 4), bound=st.sampled_from([None, None, None, 0]))
    def claim(self, worker: int, limit: int, bound: int | None) -> list[JobExecution]:
        worker_id = self.workers[worker]
        best = sorted(
            (row["rank"], row["scheduled_at"], pk)
            for pk, row in self.table.items()
            if row["status"] == Status.PENDING and (bound is None or row["rank"] <= bound)
        )[: limit if self.fresh(worker_id) else 0]
        claimed = self.lanes[worker].do(lambda: self.take(worker_id, limit, bound))
        assert [row.pk for row in claimed] == [pk for _, _, pk in best]
        before = self.table
        self.moved({pk for _, _, pk in best}, "claim")
        for run in claimed:
            row = self.table[run.pk]
            assert (run.run_no, run.attempt) == (row["run_no"], row["attempt"])
            assert row["run_no"] == before[run.pk]["run_no"] + 1
            assert row["worker_id"] == worker_id
        return claimed

    def take(self, worker_id: UUID, limit: int, bound: int | None = None) -> list[JobExecution]:
        claimed = transitions.claim(
            queue="default",
            names=NAMES,
            worker_id=worker_id,
            limit=limit,
            now=self.now,
            using="default",
            max_rank=bound,
        )
        self.held += claimed
        return claimed

    def ending(self, run: JobExecution, how: str) -> Ending:
        at = self.now + timedelta(seconds=30)
        if how == "succeed" or how == "drop":
            return transitions.succeed(run, result={"n": 1}, drop=how == "drop")
        if how == "reschedule" and run.attempt < run.max_attempts:
            return transitions.reschedule(run, at=at, error="boom", entry={"message": "boom"})
        if how == "later":
            return transitions.reschedule(run, at=at, refund=True)
        if how == "release":
            return transitions.release(run)
        if how == "abort":
            return transitions.abort(run)
        return transitions.fail(run, error="boom", entry={"message": "boom"})

    @rule(
        lane=index,
        acts=st.lists(st.tuples(hands, index, st.sampled_from(HOW)), min_size=1, max_size=4),
    )
    def finish(self, lane: int, acts: list[tuple[list[JobExecution], int, str]]) -> None:
        chosen = {}
        for hand, place, how in acts:
            if hand:
                run = hand[place % len(hand)]
                chosen[run.pk, run.run_no] = (run, how)
        self.end(lane, list(chosen.values()))

    @rule(lane=index, first=st.integers(0, len(HOW) - 1))
    def finish_all_that_runs(self, lane: int, first: int) -> None:
        owned = [run for run in self.held if self.owns(run)]
        self.end(lane, [(run, HOW[(first + n) % len(HOW)]) for n, run in enumerate(owned)])

    def end(self, lane: int, ended: list[tuple[JobExecution, str]]) -> None:
        batch = [self.ending(run, how) for run, how in ended]
        own = {run.pk: ending for (run, _), ending in zip(ended, batch, strict=True) if self.owns(run)}
        marked = {pk for pk in own if self.table[pk]["cancel_requested_at"] is not None}
        before = self.table
        answer = self.lanes[lane].do(lambda: transitions.finish(batch, now=self.now, using="default"))
        verbs = ("succeed", "fail", "reschedule", "release", "abort")
        self.moved(set(own), *verbs)
        assert set(answer) == set(own)
        for pk, ending in own.items():
            turned = pk in marked and ending.status not in {Status.OK, Status.CANCELLED}
            assert answer[pk] == (Status.CANCELLED if turned else ending.status)
            if ending.drop:
                assert pk not in self.table
                continue
            assert self.table[pk]["status"] == answer[pk]
            assert self.table[pk]["attempt"] == before[pk]["attempt"] - int(ending.refund)

    @rule(lane=index, how=st.sampled_from(HOW))
    def frozen_workers_thaw(self, lane: int, how: str) -> None:
        """Every run that was lost is ended now by those that still hold it: nothing may change."""
        late = [self.ending(run, how) for run in self.held if not self.owns(run)]
        assert self.lanes[lane].do(lambda: transitions.finish(late, now=self.now, using="default")) == {}
        self.moved(set())

    @rule(worker=index)
    def beat(self, worker: int) -> None:
        Worker.objects.filter(pk=self.workers[worker]).update(heartbeat_at=self.now)

    @rule(worker=index)
    def boot(self, worker: int) -> None:
        self.workers[worker] = WorkerFactory(now=self.now).pk

    @rule(worker=index)
    def stop(self, worker: int) -> None:
        Worker.objects.filter(pk=self.workers[worker]).update(stopped_at=self.now)

    # What rescue does

    @rule(worker=index, lane=index)
    def crash(self, worker: int, lane: int) -> None:
        """A process dies, its rows are rescued, and its successor comes: what it held is old now."""
        self.stop(worker)
        self.rescue(lane)
        self.boot(worker)

    @rule(lane=index)
    def rescue(self, lane: int) -> None:
        fresh = Worker.objects.fresh(self.now).values("pk")
        silent = set(Worker.objects.exclude(pk__in=fresh).values_list("pk", flat=True))
        lost = {
            pk
            for pk, row in self.table.items()
            if row["status"] == Status.RUNNING and (row["worker_id"] in silent or row["worker_id"] is None)
        }
        may_run = {
            pk
            for pk in lost
            if self.table[pk]["attempt"] < self.table[pk]["max_attempts"] and self.table[pk]["rescues"] < 2
        }
        orphans = JobExecution.objects.running().filter(Q(worker_id__in=silent) | Q(worker_id__isnull=True))
        assert set(self.lanes[lane].do(lambda: transitions.rescue(orphans, now=self.now, **LOST))) == may_run
        self.moved(may_run, "rescue")
        buried = lost - may_run
        assert set(self.lanes[lane].do(lambda: transitions.bury(orphans, now=self.now, **LOST))) == buried
        self.moved(buried, "bury")

    # Two at once

    @rule(
        target=hands,
        pk=rows,
        hand=hands,
        how=st.sampled_from(["succeed", "fail", "release"]),
        acts=st.lists(st.sampled_from(["claim", "cancel", "finish", "rescue", "park"]), min_size=2, max_size=2),
    )
    def race(self, pk: UUID, hand: list[JobExecution], how: str, acts: list[str]) -> list[JobExecution]:
        one = JobExecution.objects.filter(pk=pk)
        everything = JobExecution.objects.all()
        batch = [self.ending(run, how) for run in hand]
        calls: dict[str, Callable[[UUID], Any]] = {
            "claim": lambda worker_id: self.take(worker_id, 2),
            "cancel": lambda worker_id: transitions.cancel(one, now=self.now, by="", by_name=""),
            "finish": lambda worker_id: transitions.finish(batch, now=self.now, using="default"),
            "rescue": lambda worker_id: transitions.rescue(everything, now=self.now, **LOST),
            "park": lambda worker_id: transitions.park(everything, "paused", now=self.now),
        }
        owned = sum(self.owns(run) for run in hand)
        futures = [
            self.lanes[n].start(lambda n=n, act=act: calls[act](self.workers[n]))  # type: ignore[misc]
            for n, act in enumerate(acts)
        ]
        answers = [future.result(30) for future in futures]
        before, self.table = self.table, self.read()
        assert set(before) == set(self.table)
        for each, row in self.table.items():
            assert row["status"] in reachable(Status(before[each]["status"]), 2)
        self.check_history(before, self.table)
        claimed = [row for act, answer in zip(acts, answers, strict=True) if act == "claim" for row in answer]
        held = [(row.pk, row.run_no) for row in claimed]
        assert len(held) == len(set(held))
        ends = sum(len(answer) for act, answer in zip(acts, answers, strict=True) if act == "finish")
        # A run that was lost before the race stays lost, and none ends twice.
        assert ends <= owned
        return claimed

    # What holds at every moment

    @invariant()
    def rows_are_consistent(self) -> None:
        live = set()
        for row in self.table.values():
            final = row["status"] in FINAL
            assert (row["completed_at"] is not None) == final
            assert row["active_key"] is None or not final
            if not final:
                assert row["active_key"] == (key_digest(None, row["key"]) if row["key"] else None)
            assert 0 <= row["attempt"] <= row["max_attempts"]
            assert row["attempt"] <= row["run_no"]
            assert row["rescues"] <= 3
            assert row["parked_reason"] == "" or row["status"] == Status.SCHEDULED
            if row["status"] == Status.RUNNING:
                assert row["worker_id"] is not None
                assert row["started_at"] is not None
                assert row["attempt"] >= 1
            if row["status"] in LIVE and row["active_key"] is not None:
                assert (row["job_name"], row["active_key"]) not in live
                live.add((row["job_name"], row["active_key"]))


@pytest.fixture
def lanes() -> Iterator[None]:
    ExecutionMachine.lanes = [Lane() for _ in range(3)]
    yield
    for lane in ExecutionMachine.lanes:
        lane.close()


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("examples", "steps"),
    [pytest.param(8, 40, marks=pytest.mark.medium), pytest.param(80, 80, marks=pytest.mark.slow(30))],
    ids=["short", "long"],
)
def test_verbs_in_any_order_keep_the_table_consistent(lanes: None, examples: int, steps: int) -> None:
    run_state_machine_as_test(
        ExecutionMachine,
        settings=hypothesis.settings(
            max_examples=examples,
            stateful_step_count=steps,
            # One store of failed examples would mix up the three engines.
            database=None,
            # Rows in a real database take too long to look for the shortest example.
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
