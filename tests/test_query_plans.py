"""The plans of the statements that are asked all the time: each goes by its index, whatever else the table holds."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any
from uuid import UUID

import pytest
from django.db import connection, transaction

from django_jobs import registry, retention, transitions
from django_jobs.cli.tail import Ends
from django_jobs.fields import uuid7
from django_jobs.models import JobExecution, Worker
from django_jobs.querysets import key_digest
from django_jobs.reading.figures import collect
from django_jobs.runtime import stage
from django_jobs.runtime.heads import heads
from django_jobs.runtime.moves import Moves
from django_jobs.runtime.surplus import Surplus
from django_jobs.runtime.sweep import Sweep
from django_jobs.served import Served
from django_jobs.states import Status
from tests.factories import WorkerFactory
from tests.verbs import claim

# Medium for the table, which each process of a run fills for itself.
pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("table"), pytest.mark.medium]

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
# Finished and future rows make up nearly all of the table, as after a month of work. PostgreSQL weighs costs finely and
# gets 20,000 rows; the others choose by rules, and a part shows them.
SHARE = {"postgresql": 1, "mysql": 2, "sqlite": 10}[connection.vendor]
ROWS = {
    Status.OK: 14_000 // SHARE,
    Status.ERROR: 1_500 // SHARE,
    Status.CANCELLED: 500 // SHARE,
    Status.SCHEDULED: 4_000 // SHARE,
    Status.PENDING: 400 // SHARE,
}
RUNNING = 20
OWNER = UUID(int=7)


def fill() -> None:
    made = []
    for status, count in ROWS.items():
        for n in range(count):
            final = status in {Status.OK, Status.ERROR, Status.CANCELLED}
            made.append(
                JobExecution(
                    job_name="acc.mark" if n % 2 else f"acc.other{n % 20}",
                    status=status,
                    rank=n % 3 * 10,
                    key=f"k{n}" if n % 4 == 0 else "",
                    key_digest=key_digest(None, f"k{n}") if n % 4 == 0 else None,
                    scheduled_at=NOW + timedelta(seconds=n + 60 if status == Status.SCHEDULED else -n),
                    parked_reason="paused" if status == Status.SCHEDULED and n % 10 == 0 else "",
                    created_at=NOW,
                    updated_at=NOW,
                    hinted_at=NOW,
                    completed_at=NOW - timedelta(seconds=n) if final else None,
                    worker_id=OWNER if final else None,
                    fingerprint=f"f{n % 7}" if status == Status.ERROR else None,
                )
            )
    times = {"created_at": NOW, "updated_at": NOW, "hinted_at": NOW, "scheduled_at": NOW, "started_at": NOW}
    made += [
        JobExecution(
            job_name="acc.mark",
            status=Status.RUNNING,
            worker_id=OWNER if n % 2 else uuid7(),
            active_key=None if n else key_digest(None, "live"),
            **times,
        )
        for n in range(RUNNING)
    ]
    JobExecution.objects.bulk_create(made, batch_size=500)
    WorkerFactory(id=OWNER, now=NOW)
    with connection.cursor() as cursor:
        # What autovacuum and the like do in time.
        table = connection.ops.quote_name(JobExecution._meta.db_table)
        cursor.execute(f"ANALYZE {'TABLE ' if connection.vendor == 'mysql' else ''}{table}")


@pytest.fixture(scope="module")
def table(django_db_setup: None, django_db_blocker: Any) -> Iterator[None]:
    """One filled table for all tests of this file, which change nothing in it."""
    with django_db_blocker.unblock():
        fill()
        yield
        with connection.cursor() as cursor:
            for model in (JobExecution, Worker):
                cursor.execute(f"DELETE FROM {connection.ops.quote_name(model._meta.db_table)}")


@contextmanager
def statements() -> Iterator[list[tuple[str, Any]]]:
    """Collect what is asked of the table of executions."""
    seen: list[tuple[str, Any]] = []

    def wrapper(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if JobExecution._meta.db_table in sql and not sql.startswith(("SAVEPOINT", "RELEASE")):
            seen.append((sql, params))
        return execute(sql, params, many, context)

    with connection.execute_wrapper(wrapper):
        yield seen


# SQLite names the indexes of its constraints itself.
AUTOMATIC = {
    "sqlite_autoindex_django_jobs_jobexecution_1": "PRIMARY",
    "sqlite_autoindex_django_jobs_jobexecution_2": "django_jobs_active_key",
}


class Plan:
    """How the database answers one statement."""

    def __init__(self, sql: str, params: Any) -> None:
        prefix = {
            "postgresql": "EXPLAIN (FORMAT JSON)",
            "sqlite": "EXPLAIN QUERY PLAN",
            "mysql": "EXPLAIN FORMAT=TRADITIONAL",
        }
        with connection.cursor() as cursor:
            cursor.execute(f"{prefix[connection.vendor]} {sql}", params)
            names = [column[0] for column in cursor.description]
            self.lines: list[dict[str, Any]] = [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
        self.sql = sql
        self.nodes: list[dict[str, Any]] = []
        if connection.vendor == "postgresql":
            found = self.lines[0]["QUERY PLAN"]
            self._collect((json.loads(found) if isinstance(found, str) else found)[0]["Plan"])

    def _collect(self, node: dict[str, Any]) -> None:
        self.nodes.append(node)
        for child in node.get("Plans", []):
            self._collect(child)

    def __repr__(self) -> str:
        return f"{self.sql}\n{json.dumps(self.nodes or self.lines, indent=1, default=str)}"

    @property
    def indexes(self) -> set[str]:
        """The indexes by which executions are found; "PRIMARY" is the primary key's."""
        if connection.vendor == "postgresql":
            names = {node["Index Name"] for node in self.nodes if "Index Name" in node}
            return {"PRIMARY" if name.endswith("jobexecution_pkey") else name for name in names}
        if connection.vendor == "mysql":
            return {line["key"] for line in self.lines if self._is_ours(line["table"]) and line["key"]}
        found = set()
        for line in self.lines:
            if match := re.search(r"USING (?:COVERING )?INDEX (\w+)", line["detail"]):
                found.add(AUTOMATIC.get(match[1], match[1]))
        return found

    @property
    def reads_the_whole_table(self) -> bool:
        if connection.vendor == "postgresql":
            return any(node["Node Type"] == "Seq Scan" and self._is_ours(node["Relation Name"]) for node in self.nodes)
        if connection.vendor == "mysql":
            return any(line["type"] == "ALL" and self._is_ours(line["table"]) for line in self.lines)
        return any(re.match(rf"SCAN {JobExecution._meta.db_table}$", line["detail"]) for line in self.lines)

    @property
    def sorts(self) -> bool:
        if connection.vendor == "postgresql":
            return any("Sort" in node["Node Type"] for node in self.nodes)
        if connection.vendor == "mysql":
            return any("filesort" in (line["Extra"] or "") for line in self.lines)
        return any("USE TEMP B-TREE FOR ORDER BY" in line["detail"] for line in self.lines)

    @staticmethod
    def _is_ours(name: str | None) -> bool:
        return name in {JobExecution._meta.db_table, "t"}


def plan_of(call: Callable[[], Any], begins: str = "") -> Plan:
    """Return the plan of the first statement on executions that the call issues and that begins so."""
    with statements() as seen:
        call()
    sql, params = next((sql, params) for sql, params in seen if sql.lstrip().startswith(begins))
    return Plan(sql, params)


# How stage begins to read a window of due rows.
OLDEST_DUE = f"SELECT {stage.DUE.sql(connection)} FROM"


def rows() -> Any:
    return JobExecution.objects.all()


def goes_by(plan: Plan, index: str, *, sorts: bool = False) -> None:
    assert index in plan.indexes, plan
    assert not plan.reads_the_whole_table, plan
    assert sorts or not plan.sorts, plan


CLAIM_BEGINS = {"sqlite": "UPDATE", "postgresql": "UPDATE", "mysql": "SELECT"}


def claim_plan(**changes: Any) -> Plan:
    claimed = []
    plan = plan_of(
        lambda: claimed.extend(claim(OWNER, NOW, **{"limit": 10, **changes})), CLAIM_BEGINS[connection.vendor]
    )
    assert claimed
    return plan


def test_a_claim_goes_by_its_index_and_sorts_nothing() -> None:
    goes_by(claim_plan(), "django_jobs_claim")


def test_a_claim_with_many_names_and_a_bound_goes_by_its_index_too() -> None:
    names = ["acc.mark", *(f"acc.other{n}" for n in range(50))]
    goes_by(claim_plan(names=names, max_rank=10), "django_jobs_claim")


def test_a_claim_of_rows_that_were_told_finds_them_by_their_ids() -> None:
    ids = list(rows().pending().filter(queue="default").order_by("-rank").values_list("pk", flat=True)[:2])
    plan = claim_plan(ids=ids, limit=2)
    # The status with the id finds a row as well as the id alone. The few that are found are put in order.
    assert plan.indexes & {"PRIMARY", "django_jobs_list"}, plan
    # As few as direct mode has free slots for: PostgreSQL weighs them against the few hundred that are pending here.
    assert "django_jobs_claim" not in plan.indexes, plan
    assert not plan.reads_the_whole_table, plan


@pytest.mark.parametrize("limit", [1, 100])
def test_the_heads_of_queues_go_by_the_same_index_and_sort_nothing(limit: int) -> None:
    names = ["acc.mark", *(f"acc.other{n}" for n in range(50))]
    goes_by(
        plan_of(lambda: heads(["default", "mail", "empty"], names, limit=limit, using="default")), "django_jobs_claim"
    )


@pytest.mark.medium
def test_an_empty_queue_is_found_empty_by_the_index() -> None:
    plan = plan_of(lambda: claim(OWNER, NOW, queue="empty"), CLAIM_BEGINS[connection.vendor])
    goes_by(plan, "django_jobs_claim")


@pytest.mark.parametrize("ahead", [timedelta(seconds=90), timedelta(days=1)], ids=["a few", "all of them"])
def test_due_rows_are_found_by_their_index(ahead: timedelta, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "WINDOW", 20)
    plan = plan_of(lambda: stage.Stage(using="default").tick(NOW + ahead), OLDEST_DUE)
    # The id is not in the index: rows of one instant are sorted, or the few that are due.
    goes_by(plan, "django_jobs_due", sorts=connection.vendor != "mysql")


def test_a_sweep_reads_no_history_that_is_older_than_what_is_pending() -> None:
    plan = plan_of(lambda: Sweep(using="default").rehint(NOW), "SELECT")
    # Where an index holds pending rows alone, a few may be sorted instead.
    sorted_ones = {"django_jobs_claim"} if connection.features.supports_partial_indexes else set()
    assert plan.indexes, plan
    assert plan.indexes <= {"django_jobs_list"} | sorted_ones, plan


def test_due_rows_are_promoted_by_their_ids() -> None:
    now = NOW + timedelta(seconds=90)
    window = list(rows().due(now).values_list("pk", flat=True))
    plan = plan_of(lambda: transitions.promote(rows().filter(pk__in=window), now=now), "UPDATE")
    # The status with the id finds a row as well as the id alone.
    assert plan.indexes <= {"PRIMARY", "django_jobs_due", "django_jobs_list"}, plan
    assert not plan.reads_the_whole_table, plan


def test_the_rows_of_a_worker_are_found_by_their_owner() -> None:
    plan = plan_of(lambda: list(rows().of_worker(OWNER).values_list("pk", "run_no")))
    goes_by(plan, "django_jobs_owner")


def test_an_ending_is_written_by_the_id() -> None:
    run = rows().of_worker(OWNER).first()
    plan = plan_of(lambda: transitions.finish([transitions.succeed(run)], now=NOW, using="default"), "UPDATE")
    # As above.
    assert plan.indexes <= {"PRIMARY", "django_jobs_list"}, plan
    assert not plan.reads_the_whole_table, plan


@pytest.mark.parametrize("others", [(), ("acc.other0", "acc.other2")], ids=["one name", "three names"])
@pytest.mark.parametrize("keep", [0, 10, 300])
def test_what_a_job_keeps_is_read_and_deleted_by_its_index(keep: int, others: tuple[str, ...]) -> None:
    with statements() as seen:
        options = {"now": NOW, "using": "default", "limit": 100, "other_names": others}
        trimmed = retention.trim("acc.mark", Status.OK, keep, None, **options)
    assert trimmed == 100
    plans = [Plan(sql, params) for sql, params in seen]
    reads = [plan for plan in plans if plan.sql.startswith("SELECT")]
    assert reads
    for plan in reads:
        goes_by(plan, "django_jobs_retention", sorts=True)
    (delete,) = [plan for plan in plans if plan.sql.startswith("DELETE")]
    assert not delete.reads_the_whole_table, delete


def test_rows_past_their_age_are_found_by_the_same_index() -> None:
    plan = plan_of(
        lambda: retention.trim(
            "acc.mark", Status.OK, None, (ROWS[Status.OK] - 110), now=NOW, using="default", limit=100
        ),
        "SELECT",
    )
    goes_by(plan, "django_jobs_retention", sorts=True)


@pytest.mark.parametrize("status", [Status.OK, Status.PENDING, Status.RUNNING])
def test_a_page_of_one_status_is_read_newest_first_by_an_index(status: Status) -> None:
    plan = plan_of(lambda: list(rows().filter(status=status).order_by("-pk").values_list("pk")[:100]))
    assert plan.indexes, plan
    assert not plan.reads_the_whole_table, plan
    if status == Status.OK:
        assert plan.indexes <= {"django_jobs_list", "PRIMARY"}, plan
        assert not plan.sorts, plan


def test_a_page_of_all_rows_is_read_newest_first_by_the_primary_key() -> None:
    plan = plan_of(lambda: list(rows().order_by("-pk").values_list("job_name")[:100]))
    goes_by(plan, "PRIMARY")


def test_the_rows_of_a_key_are_found_by_its_digest() -> None:
    plan = plan_of(lambda: list(rows().with_key(None, "k8").values_list("pk")))
    goes_by(plan, "django_jobs_key")


def test_the_live_row_of_a_key_is_found_by_the_unique_index() -> None:
    plan = plan_of(lambda: rows().filter(job_name="acc.mark", active_key=key_digest(None, "live")).first(), "SELECT")
    goes_by(plan, "django_jobs_active_key", sorts=True)


def test_failures_of_one_kind_are_found_by_their_fingerprint() -> None:
    plan = plan_of(lambda: list(rows().filter(job_name="acc.mark", fingerprint="f3").values_list("pk")))
    goes_by(plan, "django_jobs_fingerprint")


@pytest.mark.postgres
def test_finished_and_future_rows_are_in_no_index_of_a_claim() -> None:
    """230,000 finished rows make the claim an order of magnitude slower. (RealOrangeOne/django-tasks#140)"""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT relname, reltuples FROM pg_class WHERE relname IN ('django_jobs_claim', 'django_jobs_owner')"
        )
        held = dict(cursor.fetchall())
    # Estimates, as ANALYZE makes them.
    assert held["django_jobs_claim"] < 2 * ROWS[Status.PENDING]
    assert held["django_jobs_owner"] < 2 * RUNNING


def _pages_read() -> int:
    """Return how many pages a claim of ten rows reads to find them."""
    with statements() as seen, transaction.atomic():
        claim(OWNER, NOW, limit=10)
        transaction.set_rollback(True)
    sql, params = seen[0]
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {sql}", params)
        plan = cursor.fetchone()[0]
        transaction.set_rollback(True)
    plan = (json.loads(plan) if isinstance(plan, str) else plan)[0]["Plan"]
    # Two parts come before the rows are updated: whether the worker beats, and this one.
    (best,) = [child for child in plan["Plans"] if child["Node Type"] == "Limit"]
    return int(best["Shared Hit Blocks"] + best["Shared Read Blocks"])


@pytest.mark.postgres
def test_a_claim_reads_no_more_when_there_are_more_finished_and_future_rows() -> None:
    _pages_read()
    few = _pages_read()
    with connection.cursor() as cursor:
        names = [field.column for field in JobExecution._meta.concrete_fields if not field.primary_key]
        columns = ", ".join(map(connection.ops.quote_name, names))
        # The finished and future rows, three times over.
        cursor.execute(
            f"INSERT INTO django_jobs_jobexecution (id, {columns}) "
            f"SELECT gen_random_uuid(), {columns} FROM django_jobs_jobexecution, generate_series(1, 2) "
            "WHERE status IN ('ok', 'scheduled') AND active_key IS NULL"
        )
    assert _pages_read() <= few * 1.5


@pytest.mark.postgres
def test_a_claim_reads_no_more_when_a_paused_job_holds_back_better_rows() -> None:
    _pages_read()
    few = _pages_read()
    with connection.cursor() as cursor:
        names = [field.column for field in JobExecution._meta.concrete_fields if not field.primary_key]
        into = ", ".join(map(connection.ops.quote_name, names))
        best = {"status": "'scheduled'", "parked_reason": "'paused'", "rank": "-100", "job_name": "'acc.paused'"}
        values = ", ".join(best.get(name, connection.ops.quote_name(name)) for name in names)
        cursor.execute(
            f"INSERT INTO django_jobs_jobexecution (id, {into}) SELECT gen_random_uuid(), {values} "
            "FROM django_jobs_jobexecution, generate_series(1, 20) WHERE status = 'pending' AND active_key IS NULL"
        )
    assert _pages_read() <= few * 1.5


def test_what_a_limit_holds_back_is_found_by_why_it_is_parked() -> None:
    process = Surplus(Moves(using="default"), using="default")
    with statements() as seen:
        assert not process.waits((), Served(is_any_but=True))
        process.tick(NOW, frozenset(), time.monotonic())
    plans = [Plan(sql, params) for sql, params in seen if "parked_reason" in sql]
    assert len(plans) == 2
    for plan in plans:
        goes_by(plan, "django_jobs_due", sorts=True)


def test_what_counts_for_a_limit_is_found_among_the_running_rows() -> None:
    plan = plan_of(lambda: rows().running().among_jobs(["acc.mark"]).count())
    assert plan.indexes <= {"django_jobs_owner", "django_jobs_list", "django_jobs_claim"}, plan
    assert not plan.reads_the_whole_table, plan


def test_what_a_pause_holds_back_is_found_among_the_pending_rows() -> None:
    plan = plan_of(lambda: list(rows().pending().among_jobs(["acc.mark"]).order_by().values_list("pk")[:500]))
    assert plan.indexes <= {"django_jobs_claim", "django_jobs_list"}, plan
    assert not plan.reads_the_whole_table, plan


def test_the_head_of_a_queue_is_read_in_the_order_of_its_index() -> None:
    head = rows().pending().filter(queue="default").order_by("rank", "scheduled_at", "pk")
    for asked in (head, head.among_jobs(["acc.mark"])):
        goes_by(
            plan_of(lambda asked=asked: list(asked.values_list("rank", "pk", "job_name")[:50])), "django_jobs_claim"
        )


@pytest.mark.postgres
def test_a_claim_of_many_rows_goes_by_its_index_beside_the_history_of_other_jobs() -> None:
    """Taken for unrelated, job and status promise next to no rows: then all that is pending is fetched and sorted."""
    with connection.cursor() as cursor:
        names = [field.column for field in JobExecution._meta.concrete_fields if not field.primary_key]
        into = ", ".join(map(connection.ops.quote_name, names))
        values = ", ".join("'acc.history'" if name == "job_name" else connection.ops.quote_name(name) for name in names)
        cursor.execute(
            f"INSERT INTO django_jobs_jobexecution (id, {into}) "
            f"SELECT gen_random_uuid(), {values} FROM django_jobs_jobexecution, generate_series(1, 5) "
            "WHERE status = 'ok' AND active_key IS NULL"
        )
        cursor.execute("ANALYZE django_jobs_jobexecution")
    goes_by(claim_plan(limit=100), "django_jobs_claim")


@pytest.mark.mysql
def test_a_claim_locks_no_more_than_it_may_take() -> None:
    """InnoDB locks what a statement reads: a claim that reads a thousand rows blocks all other workers."""
    with connection.cursor() as cursor:
        cursor.execute("SHOW SESSION STATUS LIKE 'Handler_read%%'")
        before = {name: int(value) for name, value in cursor.fetchall()}
        claim(OWNER, NOW, limit=5, names=["acc.mark"])
        cursor.execute("SHOW SESSION STATUS LIKE 'Handler_read%%'")
        after = {name: int(value) for name, value in cursor.fetchall()}
    read = sum(after.values()) - sum(before.values())
    assert read < 100


def test_pages_are_in_the_order_of_the_index() -> None:
    found = list(rows().filter(status=Status.OK).order_by("-pk").values_list("pk", flat=True)[:100])
    assert all(newer > older for newer, older in pairwise(found))


def test_the_figures_of_the_page_of_jobs_go_by_indexes() -> None:
    plan = plan_of(lambda: collect(registry.all_jobs(), using=connection.alias))
    goes_by(plan, "django_jobs_retention", sorts=True)
    assert "django_jobs_due" in plan.indexes, plan


def test_what_ended_since_is_found_by_the_index_of_the_retention() -> None:
    ends = Ends(None, using=connection.alias)
    plan = plan_of(ends.new)
    goes_by(plan, "django_jobs_retention", sorts=True)
    assert not plan.reads_the_whole_table, plan
