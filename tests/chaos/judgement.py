"""What must be true after a chaos run, a function for each sentence; each returns what is wrong, a line per fault.

The functions read nothing but the evidence, so that tests can hand them doctored evidence and see them complain.
"""

from __future__ import annotations

import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from django_jobs.runtime.exits import NO_DATABASE
from django_jobs.states import FINAL, LIVE, Status
from tests.chaos.actors import marker
from tests.chaos.history import Change
from tests.chaos.journal import Journal, Pushed
from tests.chaos.plan import EXIT_CODE
from tests.moves import is_legal
from tests.support import Entry

CRON = "acc.tick"
# Their handlers raise nothing: what ends them with an error is the end of a worker, and the error says so.
HARMLESS = frozenset({"acc.mark", "acc.mark_retry", "acc.slow", "acc.slow_retry", "acc.async_mark", CRON})
ENDING = {signal.SIGTERM, signal.SIGKILL}
EXCUSES = ("WorkerLost: ", "interrupted by shutdown")


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """An execution that is not finished when everything is over."""

    row_id: str
    job_name: str
    status: str
    # Is its worker alive?
    is_owned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A process that ended during the run."""

    name: str
    code: int
    # The signals it was sent.
    told: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that is known after a run."""

    journal: Journal
    history: tuple[Change, ...]
    ledger: tuple[Entry, ...]
    # How many rows of each name are in the table of effects.
    things: Counter[str]
    left: tuple[Left, ...]
    deaths: tuple[Death, ...]
    # Jobs that have retry.
    retrying: frozenset[str]
    # What was pushed at the end, and the status it came to.
    canaries: dict[str, str]

    @cached_property
    def lives(self) -> dict[str, list[Change]]:
        """The changes of each row, in order."""
        lives: dict[str, list[Change]] = defaultdict(list)
        for change in self.history:
            lives[change.row_id].append(change)
        return dict(lives)

    @cached_property
    def starts(self) -> Counter[str]:
        """How often each row's handler began."""
        return Counter(entry.row_id for entry in self.ledger if entry.event == "START")

    @cached_property
    def ends(self) -> Counter[str]:
        """How often each row's handler came to its last line."""
        return Counter(entry.row_id for entry in self.ledger if entry.event == "END")

    def is_committed(self, push: Pushed) -> bool:
        """Whether the push counts: the other row that its transaction wrote says so."""
        return not push.undone and self.things[marker(push.token)] == 1

    def made(self) -> Iterator[Pushed]:
        """Yield the pushes that made a row and were committed."""
        return (push for push in self.journal.pushes if push.created and self.is_committed(push))

    def waits(self) -> Iterator[float]:
        """Yield, in seconds, from when each row that was to run at once was made to when it was claimed."""
        for made, *later in self.lives.values():
            claims = (change.at for change in later if change.status == Status.RUNNING)
            if made.status == Status.PENDING and (at := next(claims, None)) is not None:
                yield at - made.at


def end_of(life: list[Change]) -> Status | None:
    """Return the status in which a row ended; None when it did not.

    A row that is deleted while it runs ended well: its job keeps no more of those.
    """
    last = life[-1]
    if last.status is not None:
        status = Status(last.status)
    else:
        status = Status.OK if last.old_status == Status.RUNNING else Status(last.old_status or "")
    return status if status in FINAL else None


def manual_retries(life: list[Change]) -> int:
    return sum(change.old_status in FINAL and change.status in LIVE for change in life)


def was_cancelled(life: list[Change]) -> bool:
    return any(change.is_marked or change.status == Status.CANCELLED for change in life)


def transactions_are_as_their_producers_saw_them(evidence: Evidence) -> Iterator[str]:
    for token, fate in evidence.journal.fates.items():
        found = evidence.things[marker(token)]
        if fate != "unknown" and found != (fate == "committed"):
            yield f"order {token} was {fate}, and its own row is there {found} times"


def a_push_is_there_exactly_if_its_transaction_was_committed(evidence: Evidence) -> Iterator[str]:
    for push in evidence.journal.pushes:
        if not push.created:
            continue
        is_there = push.row_id in evidence.lives
        if evidence.is_committed(push) and not is_there:
            yield f"{push.job_name} {push.row_id} was committed and was never there"
        elif not evidence.is_committed(push) and is_there:
            yield f"{push.job_name} {push.row_id} was rolled back and is there"


def nothing_runs_that_is_not_there(evidence: Evidence) -> Iterator[str]:
    for row_id, count in evidence.starts.items():
        if row_id not in evidence.lives:
            yield f"{row_id} ran {count} times and was never there"


def everything_was_asked_for(evidence: Evidence) -> Iterator[str]:
    asked = {push.row_id for push in evidence.made()}
    # Producers are killed between a commit and the line about it, so pushes of unknown orders may be missing.
    for row_id, life in evidence.lives.items():
        if row_id not in asked and life[0].job_name != CRON:
            yield f"{life[0].job_name} {row_id} is there and nobody pushed it"


def a_push_that_was_taken_for_another_is_about_a_row_that_was_there(evidence: Evidence) -> Iterator[str]:
    for push in evidence.journal.pushes:
        if not push.created and evidence.is_committed(push) and push.row_id not in evidence.lives:
            yield f"{push.job_name} with key {push.key} was taken for {push.row_id}, which was never there"


def everything_ends(evidence: Evidence) -> Iterator[str]:
    for row_id, life in evidence.lives.items():
        if end_of(life) is None:
            yield f"{life[0].job_name} {row_id} has not ended: it is {life[-1].status or 'deleted'}"


def nothing_is_left_to_do(evidence: Evidence) -> Iterator[str]:
    for row in evidence.left:
        owned = "" if row.status != Status.RUNNING or row.is_owned else " and its worker is not alive"
        yield f"{row.job_name} {row.row_id} is {row.status}{owned}"


def a_job_with_retry_runs_at_least_once_or_says_why_not(evidence: Evidence) -> Iterator[str]:
    for push in evidence.made():
        life = evidence.lives.get(push.row_id)
        if life is None or push.job_name not in evidence.retrying or was_cancelled(life):
            continue
        if not evidence.starts[push.row_id] and not (end_of(life) == Status.ERROR and life[-1].error):
            yield f"{push.job_name} {push.row_id} never ran, and does not say why"


def a_job_without_retry_is_started_once_for_each_push_and_manual_retry(evidence: Evidence) -> Iterator[str]:
    for row_id, life in evidence.lives.items():
        allowed = 1 + manual_retries(life)
        if life[0].job_name not in evidence.retrying and evidence.starts[row_id] > allowed:
            yield f"{life[0].job_name} {row_id} was started {evidence.starts[row_id]} times, {allowed} were asked for"


def each_start_was_claimed(evidence: Evidence) -> Iterator[str]:
    for row_id, count in evidence.starts.items():
        claims = sum(change.status == Status.RUNNING for change in moves(evidence.lives.get(row_id, [])))
        if count > claims:
            yield f"{row_id} was started {count} times and claimed {claims} times"


def what_ended_well_ran_to_its_last_line(evidence: Evidence) -> Iterator[str]:
    for row_id, life in evidence.lives.items():
        if end_of(life) == Status.OK and not evidence.ends[row_id]:
            yield f"{life[0].job_name} {row_id} is ok, and its handler never came to its end"


def effects_of_atomic_jobs_are_there_exactly_if_they_ended_well(evidence: Evidence) -> Iterator[str]:
    for push in evidence.made():
        life = evidence.lives.get(push.row_id)
        if not push.thing or life is None:
            continue
        found, wanted = evidence.things[push.thing], int(end_of(life) == Status.OK)
        if found != wanted:
            yield f"{push.job_name} {push.row_id} ended {end_of(life)} with {found} effects, {wanted} were to be there"


def effects_have_a_cause(evidence: Evidence) -> Iterator[str]:
    causes = {push.thing for push in evidence.made()}
    for name in evidence.things:
        if name.startswith("effect-") and name not in causes:
            yield f"the effect {name} is there, and what makes it was not pushed"


def errors_are_deserved(evidence: Evidence) -> Iterator[str]:
    for row_id, life in evidence.lives.items():
        for change in moves(life):
            excused = any(excuse in change.error for excuse in EXCUSES)
            if change.job_name in HARMLESS and change.status == Status.ERROR and not excused:
                yield f"{change.job_name} {row_id} ended with an error it cannot have: {change.error!r}"


def moves(life: list[Change]) -> list[Change]:
    """Return the changes that moved the row to another status."""
    return [change for change in life if change.old_status != change.status]


def every_move_is_legal(evidence: Evidence) -> Iterator[str]:
    for row_id, life in evidence.lives.items():
        for change in moves(life):
            source = Status(change.old_status) if change.old_status else None
            if change.status is None:
                # Deleted: finished, or finished by this very statement.
                legal = source in FINAL or source == Status.RUNNING
            else:
                legal = is_legal(source, Status(change.status))
            if not legal:
                yield f"{change.job_name} {row_id} moved from {change.old_status} to {change.status}"


def no_change_is_missing_from_the_history(evidence: Evidence) -> Iterator[str]:
    for row_id, life in evidence.lives.items():
        if life[0].old_status is not None:
            yield f"{row_id} was {life[0].old_status} before it was there"
        for before, after in pairwise(life):
            if (before.status, before.run_no, before.key) != (after.old_status, after.old_run_no, after.old_key):
                yield f"{row_id} was left {before.status}, run {before.run_no}, and found {after.old_status}"


def the_fence_rises_by_one_at_each_claim_and_never_else(evidence: Evidence) -> Iterator[str]:
    for row_id, life in evidence.lives.items():
        for change in life:
            if change.run_no is None or change.old_run_no is None:
                continue
            claimed = change.old_status == Status.PENDING and change.status == Status.RUNNING
            if change.run_no != change.old_run_no + claimed:
                yield f"{row_id}: run_no went from {change.old_run_no} to {change.run_no} with {change.status}"


def attempts_are_counted_at_claims_and_given_back_at_most_once(evidence: Evidence) -> Iterator[str]:
    for row_id, life in evidence.lives.items():
        for change in life:
            if change.attempt is None or change.old_attempt is None:
                continue
            step = change.attempt - change.old_attempt
            if change.old_status == Status.PENDING and change.status == Status.RUNNING:
                fair = step == 1
            elif change.old_status == Status.RUNNING and change.status != Status.RUNNING:
                fair = step in (0, -1)
            else:
                fair = step == 0
            if not fair or change.attempt < 0:
                yield f"{row_id}: attempt went from {change.old_attempt} to {change.attempt} with {change.status}"


def one_live_row_per_key(evidence: Evidence) -> Iterator[str]:
    holders: dict[tuple[str, str], str] = {}
    for change in evidence.history:
        if change.old_key is not None and change.old_key != change.key:
            holders.pop((change.job_name, change.old_key), None)
        if change.key is not None:
            holder = holders.setdefault((change.job_name, change.key), change.row_id)
            if holder != change.row_id:
                yield f"{change.job_name}: {change.row_id} got the key {change.key} while {holder} held it"
        if change.key is not None and change.status in FINAL:
            yield f"{change.job_name} {change.row_id} is {change.status} and holds its key"


def pushes_with_a_key_hold_it_while_they_live(evidence: Evidence) -> Iterator[str]:
    for push in evidence.made():
        for change in evidence.lives.get(push.row_id, []):
            if push.key and change.status in LIVE and change.key is None:
                yield f"{push.job_name} {push.row_id} is {change.status} without its key {push.key}"


def a_cron_tick_makes_one_row(evidence: Evidence) -> Iterator[str]:
    inserted = [change for change in evidence.history if change.old_status is None and change.tick_at is not None]
    for (job_name, tick_at), count in Counter((change.job_name, change.tick_at) for change in inserted).items():
        if count > 1:
            yield f"{job_name} has {count} rows of its tick at {tick_at}"
    if not inserted:
        yield "no cron tick was fired"


def no_two_ticks_live_at_once(evidence: Evidence) -> Iterator[str]:
    living: set[str] = set()
    for change in evidence.history:
        if change.job_name != CRON:
            continue
        if change.status in LIVE:
            living.add(change.row_id)
        else:
            living.discard(change.row_id)
        if len(living) > 1:
            yield f"{CRON}: {' and '.join(sorted(living))} lived at once"


def what_ended_is_moved_by_people_only(evidence: Evidence) -> Iterator[str]:
    for row_id, life in evidence.lives.items():
        asked, happened = evidence.journal.retries.get(row_id, 0), manual_retries(life)
        if happened > asked:
            yield f"{life[0].job_name} {row_id} was retried {happened} times, and {asked} times somebody asked for it"
        if was_cancelled(life) and row_id not in evidence.journal.cancels:
            yield f"{life[0].job_name} {row_id} was cancelled, and nobody asked for it"


def processes_end_when_told(evidence: Evidence) -> Iterator[str]:
    for death in evidence.deaths:
        # Some handlers end their process, and a start that meets a database on its way down is over.
        excused = death.code in (EXIT_CODE, -signal.SIGKILL, NO_DATABASE)
        if not death.told & ENDING and not excused:
            yield f"{death.name} ended by itself with exit code {death.code}"


def canaries_sing(evidence: Evidence) -> Iterator[str]:
    for name, status in evidence.canaries.items():
        if status != Status.OK:
            yield f"{name}, pushed when all was quiet again, is {status}"
    if not evidence.canaries:
        yield "no canary was sent"


CHECKS: tuple[Callable[[Evidence], Iterator[str]], ...] = (
    transactions_are_as_their_producers_saw_them,
    a_push_is_there_exactly_if_its_transaction_was_committed,
    nothing_runs_that_is_not_there,
    everything_was_asked_for,
    a_push_that_was_taken_for_another_is_about_a_row_that_was_there,
    everything_ends,
    nothing_is_left_to_do,
    a_job_with_retry_runs_at_least_once_or_says_why_not,
    a_job_without_retry_is_started_once_for_each_push_and_manual_retry,
    each_start_was_claimed,
    what_ended_well_ran_to_its_last_line,
    effects_of_atomic_jobs_are_there_exactly_if_they_ended_well,
    effects_have_a_cause,
    errors_are_deserved,
    every_move_is_legal,
    no_change_is_missing_from_the_history,
    the_fence_rises_by_one_at_each_claim_and_never_else,
    attempts_are_counted_at_claims_and_given_back_at_most_once,
    one_live_row_per_key,
    pushes_with_a_key_hold_it_while_they_live,
    a_cron_tick_makes_one_row,
    no_two_ticks_live_at_once,
    what_ended_is_moved_by_people_only,
    processes_end_when_told,
    canaries_sing,
)


def judge(evidence: Evidence) -> dict[str, list[str]]:
    """Return what is wrong, by the sentence that does not hold."""
    verdict = {check.__name__.replace("_", " "): list(check(evidence)) for check in CHECKS}
    return {sentence: faults for sentence, faults in verdict.items() if faults}
