"""The order of assignments: MariaDB and MySQL evaluate SET from left to right, the other databases all at once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import connection

from django_jobs import clock, transitions
from django_jobs.models import JobExecution
from django_jobs.states import Status
from django_jobs.transitions import finishing
from tests.factories import JobExecutionFactory, ready_for
from tests.verbs import ENDINGS, VERBS, finish, only

COLUMNS = {field.column for field in JobExecution._meta.concrete_fields}


def top_level(text: str) -> str:
    """Return the text with everything in parentheses or in a literal blanked out, so that positions stay."""
    depth, quoted, shown = 0, False, []
    for character in text:
        if character == "'":
            quoted = not quoted
        depth += (character == "(" and not quoted) - (character == ")" and not quoted)
        shown.append(character if depth == 0 and not quoted else " ")
    return "".join(shown)


def assignments(statement: str) -> list[tuple[str, set[str]]]:
    """Return each assignment of an UPDATE in order: the column, and the columns that its value reads."""
    start = statement.index(" SET ") + len(" SET ")
    outline = top_level(statement[start:])
    end = re.search(r"\s(WHERE|FROM|ORDER BY|RETURNING)\s", outline)
    outline = outline[: end.start()] if end else outline
    found, begin = [], 0
    for stop in [*(match.start() for match in re.finditer(",", outline)), len(outline)]:
        target, _, value = statement[start + begin : start + stop].partition("=")
        words = set(re.findall(r"\w+", re.sub(r"'[^']*'", "", value)))
        found.append((re.findall(r"\w+", target)[-1], words & COLUMNS))
        begin = stop + 1
    return found


def faults(statement: str) -> list[str]:
    """Return what is wrong with the order of an UPDATE, a sentence each."""
    done: set[str] = set()
    wrong = []
    order = assignments(statement)
    for column, reads in order:
        wrong += [f"{column} reads {name}, which is assigned before it" for name in sorted(reads & done)]
        done.add(column)
    if "status" in done and order[-1][0] != "status":
        wrong.append("status is not assigned last")
    return wrong


@contextmanager
def updates() -> Iterator[list[str]]:
    """Collect the UPDATE statements of executions, in their order."""
    seen: list[str] = []

    def wrapper(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if re.search(rf"UPDATE \W?{JobExecution._meta.db_table}\W", sql):
            seen.append(sql)
        return execute(sql, params, many, context)

    with connection.execute_wrapper(wrapper):
        yield seen


@pytest.mark.django_db
@pytest.mark.parametrize("verb", VERBS)
def test_no_assignment_reads_a_column_assigned_before_it_and_status_comes_last(verb: str) -> None:
    now = clock.now("default")
    row = ready_for(verb, now)
    with updates() as seen:
        assert VERBS[verb](row, now) == 1
    assert seen
    for statement in seen:
        assert faults(statement) == [], statement
        assert "status" in dict(assignments(statement)), statement


@pytest.mark.django_db
@pytest.mark.parametrize("verb", ENDINGS)
def test_it_holds_for_batches_too(verb: str) -> None:
    now = clock.now("default")
    rows = JobExecutionFactory.create_batch(2, now=now, running=True, max_attempts=3)
    with updates() as seen:
        assert len(finish(*(ENDINGS[verb](row, now) for row in rows), now=now)) == 2
    assert seen
    assert [faults(statement) for statement in seen] == [[]] * len(seen)


@pytest.mark.django_db
def test_it_holds_for_the_mark_of_a_cancel() -> None:
    row = JobExecutionFactory(running=True)
    with updates() as seen:
        transitions.mark_cancel(only(row), now=row.started_at, by="", by_name="")
    (statement,) = seen
    assert faults(statement) == []
    assert "status" not in dict(assignments(statement))


def test_there_is_a_statement_for_every_way_to_leave_running() -> None:
    assert set(finishing._ENDED) == set(Status) - {Status.RUNNING}
    assert {target: faults(f"UPDATE t SET {ended} WHERE id = %s") for target, ended in finishing._ENDED.items()} == {
        target: [] for target in finishing._ENDED
    }


@pytest.mark.parametrize(
    ("statement", "wrong"),
    [
        ("UPDATE t SET error = %s, status = 'ok' WHERE id = %s", []),
        ('UPDATE "t" SET "attempt" = ("t"."attempt" + %s), "status" = %s WHERE "t"."attempt" = 1', []),
        ("UPDATE t SET status = 'ok', error = %s", ["status is not assigned last"]),
        (
            "UPDATE t SET completed_at = NULL, active_key = CASE WHEN (completed_at IS NULL) THEN 1 END, status = 'ok'",
            ["active_key reads completed_at, which is assigned before it"],
        ),
        (
            "UPDATE t SET error = 'status, rank', status = COALESCE(%s, error)",
            ["status reads error, which is assigned before it"],
        ),
        ("UPDATE t AS x SET run_no = run_no + 1, attempt = 2 FROM best WHERE x.run_no = best.run_no", []),
    ],
)
def test_a_wrong_order_is_seen(statement: str, wrong: list[str]) -> None:
    assert faults(statement) == wrong
