"""The judgement over a chaos run can fail: each sentence is held against evidence in which it is not true."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from tests.chaos import judgement
from tests.chaos.actors import marker
from tests.chaos.history import Change
from tests.chaos.journal import Journal, Pushed
from tests.chaos.judgement import CHECKS, CRON, Death, Evidence, Left, judge
from tests.support import Entry


def ident(number: int) -> str:
    return str(UUID(int=number))


MARK, ATOMIC, TICK, LATER_TICK, UNDONE, NOBODY = (ident(number) for number in range(1, 7))
# A row's statuses, with run_no and attempt in each.
QUIET_LIFE = (("pending", 0, 0), ("running", 1, 1), ("ok", 1, 1))
FAILED = (("pending", 0, 0), ("running", 1, 1), ("error", 1, 1))
RETRIED = (*FAILED, ("pending", 1, 1), ("running", 2, 2), ("ok", 2, 2))
RESCUED = (("pending", 0, 0), ("running", 1, 1), ("pending", 1, 1), ("running", 2, 2), ("ok", 2, 2))
TRIMMED = ((None, None, None),)


def life(row_id: str, job_name: str, steps: Any = QUIET_LIFE, *, key: str | None = None, **more: Any) -> list[Change]:
    """The changes of one row that goes through these steps."""
    changes = []
    before: tuple[Any, Any, Any] = (None, None, None)
    held = None
    for step in steps:
        status, run_no, attempt = step
        holds = key if status in {"pending", "running", "scheduled"} else None
        changes.append(
            Change(
                row_id=row_id,
                job_name=job_name,
                old_status=before[0],
                status=status,
                old_run_no=before[1],
                run_no=run_no,
                old_attempt=before[2],
                attempt=attempt,
                old_key=held,
                key=holds,
                **more,
            )
        )
        before, held = step, holds
    return changes


def ran(row_id: str, times: int = 1, ended: int = 1) -> list[Entry]:
    events = ["START"] * times + ["END"] * ended
    return [Entry(event=event, row_id=row_id, attempt=1, pid=1, time=0.0, tag="") for event in events]


def pushed(row_id: str, job_name: str, token: str, **more: Any) -> Pushed:
    return Pushed(row_id=row_id, job_name=job_name, token=token, tag=token, **{"created": True, **more})


def story(**changes: Any) -> Evidence:
    """A run in which all went well: two orders, one of which was rolled back, and two ticks; but for the changes."""
    tick = {"tick_at": "12:00:00"}
    truth = Evidence(
        journal=Journal(
            pushes=(
                pushed(MARK, "acc.mark_retry", "a", key="k"),
                pushed(ATOMIC, "acc.atomic_thing", "a", thing="effect-a"),
                pushed(UNDONE, "acc.mark", "b"),
            ),
            fates={"a": "committed", "b": "rolled back"},
            cancels={},
            retries={},
        ),
        history=(
            *life(MARK, "acc.mark_retry", key="k"),
            *life(ATOMIC, "acc.atomic_thing", (*QUIET_LIFE, *TRIMMED)),
            *life(TICK, CRON, key="overlap", **tick),
            *life(LATER_TICK, CRON, key="overlap", tick_at="12:00:01"),
        ),
        ledger=tuple(entry for row_id in (MARK, ATOMIC, TICK, LATER_TICK) for entry in ran(row_id)),
        things=Counter({marker("a"): 1, "effect-a": 1}),
        left=(),
        deaths=(
            Death(name="worker-0", code=0, told=frozenset({signal.SIGTERM})),
            Death(name="worker-1", code=77, told=frozenset()),
        ),
        retrying=frozenset({"acc.mark_retry", "acc.atomic_thing"}),
        canaries={"acc.mark": "ok"},
    )
    return replace(truth, **changes)


def instead(row_id: str, changes: list[Change]) -> Evidence:
    """The story with another life of one row."""
    truth = story()
    return replace(truth, history=(*(change for change in truth.history if change.row_id != row_id), *changes))


def without_runs_of(row_id: str, event: str = "START", evidence: Evidence | None = None) -> Evidence:
    truth = evidence or story()
    kept = tuple(entry for entry in truth.ledger if (entry.row_id, entry.event) != (row_id, event))
    return replace(truth, ledger=kept)


def more_runs(evidence: Evidence, *entries: Entry) -> Evidence:
    return replace(evidence, ledger=(*evidence.ledger, *entries))


def journal(**changes: Any) -> Journal:
    return replace(story().journal, **changes)


def with_push(push: Pushed) -> Evidence:
    return story(journal=journal(pushes=(*story().journal.pushes, push)))


def doctored_changes(row_id: str, position: int, **fields: Any) -> Evidence:
    truth = story()
    changes = list(truth.lives[row_id])
    changes[position] = replace(changes[position], **fields)
    return instead(row_id, changes)


DOCTORED: list[tuple[Callable[[Evidence], Any], Evidence]] = [
    (judgement.transactions_are_as_their_producers_saw_them, story(things=Counter({"effect-a": 1}))),
    (
        judgement.transactions_are_as_their_producers_saw_them,
        story(things=Counter({marker("a"): 1, marker("b"): 1, "effect-a": 1})),
    ),
    # Lost with its transaction committed; there although that was rolled back; kept by a savepoint that was not.
    (judgement.a_push_is_there_exactly_if_its_transaction_was_committed, instead(MARK, [])),
    (judgement.a_push_is_there_exactly_if_its_transaction_was_committed, instead(UNDONE, life(UNDONE, "acc.mark"))),
    (
        judgement.a_push_is_there_exactly_if_its_transaction_was_committed,
        story(journal=journal(pushes=(pushed(MARK, "acc.mark_retry", "a", undone=True),))),
    ),
    (judgement.nothing_runs_that_is_not_there, more_runs(story(), *ran(UNDONE))),
    (judgement.everything_was_asked_for, instead(NOBODY, life(NOBODY, "acc.mark"))),
    (
        judgement.a_push_that_was_taken_for_another_is_about_a_row_that_was_there,
        with_push(pushed(NOBODY, "acc.mark", "a", created=False)),
    ),
    (judgement.everything_ends, instead(MARK, life(MARK, "acc.mark_retry", QUIET_LIFE[:2]))),
    (judgement.everything_ends, instead(MARK, life(MARK, "acc.mark_retry", (*QUIET_LIFE[:1], *TRIMMED)))),
    (
        judgement.nothing_is_left_to_do,
        story(left=(Left(row_id=MARK, job_name="acc.mark_retry", status="running", is_owned=False),)),
    ),
    (judgement.a_job_with_retry_runs_at_least_once_or_says_why_not, without_runs_of(MARK)),
    (
        judgement.a_job_with_retry_runs_at_least_once_or_says_why_not,
        without_runs_of(MARK, evidence=instead(MARK, life(MARK, "acc.mark_retry", FAILED))),
    ),
    # Twice without anybody's wish; three times with one manual retry.
    (
        judgement.a_job_without_retry_is_started_once_for_each_push_and_manual_retry,
        more_runs(instead(TICK, life(TICK, CRON, RESCUED)), *ran(TICK)),
    ),
    (
        judgement.a_job_without_retry_is_started_once_for_each_push_and_manual_retry,
        more_runs(instead(TICK, life(TICK, CRON, RETRIED)), *ran(TICK, 2)),
    ),
    (judgement.each_start_was_claimed, more_runs(story(), *ran(MARK))),
    (judgement.what_ended_well_ran_to_its_last_line, without_runs_of(MARK, "END")),
    # Also where the row is gone since.
    (judgement.what_ended_well_ran_to_its_last_line, without_runs_of(ATOMIC, "END")),
    # Ended well without effect, with two; ended ill with one.
    (
        judgement.effects_of_atomic_jobs_are_there_exactly_if_they_ended_well,
        story(things=Counter({marker("a"): 1})),
    ),
    (
        judgement.effects_of_atomic_jobs_are_there_exactly_if_they_ended_well,
        story(things=Counter({marker("a"): 1, "effect-a": 2})),
    ),
    (
        judgement.effects_of_atomic_jobs_are_there_exactly_if_they_ended_well,
        instead(ATOMIC, life(ATOMIC, "acc.atomic_thing", FAILED, error="ValueError")),
    ),
    (
        judgement.effects_have_a_cause,
        story(things=Counter({marker("a"): 1, "effect-a": 1, "effect-b": 1})),
    ),
    (
        judgement.errors_are_deserved,
        instead(MARK, life(MARK, "acc.mark_retry", FAILED, error="OperationalError: the connection is closed")),
    ),
    (
        judgement.every_move_is_legal,
        instead(MARK, life(MARK, "acc.mark_retry", (*QUIET_LIFE, ("running", 1, 1)))),
    ),
    (
        judgement.every_move_is_legal,
        instead(MARK, life(MARK, "acc.mark_retry", (("pending", 0, 0), ("ok", 0, 0)))),
    ),
    (
        judgement.every_move_is_legal,
        instead(MARK, life(MARK, "acc.mark_retry", (("pending", 0, 0), *TRIMMED))),
    ),
    (judgement.every_move_is_legal, instead(MARK, life(MARK, "acc.mark_retry", QUIET_LIFE[1:]))),
    (judgement.no_change_is_missing_from_the_history, doctored_changes(MARK, 1, old_status="scheduled")),
    (judgement.no_change_is_missing_from_the_history, doctored_changes(MARK, 0, old_status="pending")),
    (judgement.the_fence_rises_by_one_at_each_claim_and_never_else, doctored_changes(MARK, 1, run_no=0)),
    (judgement.the_fence_rises_by_one_at_each_claim_and_never_else, doctored_changes(MARK, 2, run_no=0)),
    (judgement.attempts_are_counted_at_claims_and_given_back_at_most_once, doctored_changes(MARK, 1, attempt=0)),
    (judgement.attempts_are_counted_at_claims_and_given_back_at_most_once, doctored_changes(MARK, 2, attempt=-1)),
    (
        judgement.attempts_are_counted_at_claims_and_given_back_at_most_once,
        instead(MARK, life(MARK, "acc.mark_retry", (*FAILED, ("pending", 1, 0)))),
    ),
    # A second holder; one that kept its key when it ended.
    (judgement.one_live_row_per_key, story(history=(*life(MARK, "j", key="k")[:2], *life(ATOMIC, "j", key="k")))),
    (judgement.one_live_row_per_key, doctored_changes(MARK, 2, key="k")),
    (judgement.pushes_with_a_key_hold_it_while_they_live, instead(MARK, life(MARK, "acc.mark_retry"))),
    (
        judgement.a_cron_tick_makes_one_row,
        instead(LATER_TICK, life(LATER_TICK, CRON, key="overlap", tick_at="12:00:00")),
    ),
    (judgement.a_cron_tick_makes_one_row, story(history=tuple(life(MARK, "acc.mark_retry", key="k")))),
    (
        judgement.no_two_ticks_live_at_once,
        story(history=(*life(TICK, CRON)[:2], *life(LATER_TICK, CRON))),
    ),
    (judgement.what_ended_is_moved_by_people_only, instead(MARK, life(MARK, "acc.mark_retry", RETRIED))),
    (
        judgement.what_ended_is_moved_by_people_only,
        instead(MARK, life(MARK, "acc.mark_retry", (("pending", 0, 0), ("cancelled", 0, 0)))),
    ),
    (judgement.processes_end_when_told, story(deaths=(Death(name="worker-0", code=1, told=frozenset()),))),
    (
        judgement.processes_end_when_told,
        story(deaths=(Death(name="worker-0", code=0, told=frozenset({signal.SIGSTOP})),)),
    ),
    (judgement.canaries_sing, story(canaries={"acc.mark": "pending"})),
    (judgement.canaries_sing, story(canaries={})),
]


def test_a_run_in_which_all_went_well_is_found_so() -> None:
    assert judge(story()) == {}


@pytest.mark.parametrize(
    "evidence",
    [
        pytest.param(
            more_runs(
                replace(
                    instead(MARK, life(MARK, "acc.mark_retry", RETRIED, key="k", error="WorkerLost: it was killed")),
                    journal=journal(retries={MARK: 1}),
                ),
                *ran(MARK),
            ),
            id="retried by a person",
        ),
        pytest.param(
            more_runs(instead(MARK, life(MARK, "acc.mark_retry", RESCUED, key="k")), *ran(MARK, ended=0)),
            id="rescued",
        ),
        pytest.param(
            without_runs_of(
                MARK,
                evidence=replace(
                    instead(
                        MARK,
                        life(MARK, "acc.mark_retry", (("pending", 0, 0), ("cancelled", 0, 0)), is_marked=True),
                    ),
                    journal=journal(
                        cancels={MARK: 1},
                        pushes=tuple(replace(push, key="") for push in story().journal.pushes),
                    ),
                ),
            ),
            id="cancelled before it ran",
        ),
        pytest.param(
            without_runs_of(
                MARK,
                evidence=instead(MARK, life(MARK, "acc.mark_retry", FAILED, key="k", error="WorkerLost: three")),
            ),
            id="never ran and says why",
        ),
        pytest.param(
            instead(MARK, life(MARK, "acc.mark_retry", (*QUIET_LIFE[:2], *TRIMMED), key="k")),
            id="deleted instead of written",
        ),
        pytest.param(story(journal=journal(fates={"a": "unknown", "b": "unknown"})), id="nobody saw the commit"),
    ],
)
def test_what_may_happen_is_no_fault(evidence: Evidence) -> None:
    assert judge(evidence) == {}


@pytest.mark.parametrize(("check", "evidence"), [pytest.param(*case, id=case[0].__name__) for case in DOCTORED])
def test_each_sentence_is_found_untrue_when_it_is(check: Callable[[Evidence], Any], evidence: Evidence) -> None:
    assert list(check(evidence))
    assert check.__name__.replace("_", " ") in judge(evidence)


def test_no_sentence_is_left_out_here() -> None:
    assert {check for check, _ in DOCTORED} == set(CHECKS)
