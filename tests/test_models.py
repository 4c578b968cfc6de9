"""The tables as Django sees them: names, permissions, properties."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Permission

from django_jobs import models
from django_jobs.models import JobExecution, JobStat, JobState, QueueState, Worker, jobs_alias
from django_jobs.states import FINAL, Status
from tests.factories import JobExecutionFactory, JobStateFactory, QueueStateFactory, WorkerFactory
from tests.verbs import claim

pytestmark = pytest.mark.django_db


def test_the_permissions_are_those_documented() -> None:
    found = set(Permission.objects.filter(content_type__app_label="django_jobs").values_list("codename", flat=True))
    verbs = ("view", "delete", "trigger", "retry", "cancel", "pause", "purge")
    assert found == {*(f"{verb}_jobexecution" for verb in verbs), "view_worker"}


def test_the_alias_is_the_routers_for_writes(settings: Any) -> None:
    class Elsewhere:
        def db_for_write(self, model: type, **hints: Any) -> str | None:
            return "other" if model is JobExecution else None

    assert jobs_alias() == "default"
    settings.DATABASE_ROUTERS = [Elsewhere()]
    assert jobs_alias() == "other"


def test_rows_have_a_name_for_people(now: datetime) -> None:
    row = JobExecutionFactory(now=now)
    stat = JobStat(job_name="acc.mark", outcome="ok", bucket=now)
    assert str(row) == f"acc.mark {row.pk}"
    assert str(WorkerFactory(now=now, host="box", pid=7)) == "box pid 7"
    assert (str(JobStateFactory()), str(QueueStateFactory())) == ("acc.mark", "default")
    assert str(stat) == f"acc.mark ok {now}"


@pytest.mark.parametrize("priority", [-100, 0, 50, 100])
def test_the_priority_is_the_rank_turned_round(priority: int) -> None:
    row = JobExecutionFactory(priority=priority)
    assert (row.rank, row.priority) == (-priority, priority)


@pytest.mark.parametrize("status", list(Status))
def test_a_row_is_final_when_only_a_person_can_move_it(status: Status) -> None:
    assert JobExecutionFactory.build(status=status).is_final == (status in FINAL)


def test_a_running_row_with_a_mark_is_cancelling(now: datetime) -> None:
    assert JobExecutionFactory(now=now, running=True, cancel_requested_at=now).is_cancelling
    assert not JobExecutionFactory(now=now, running=True).is_cancelling
    assert not JobExecutionFactory(now=now, cancelled=True, cancel_requested_at=now).is_cancelling


def test_the_duration_is_that_of_the_last_attempt(now: datetime) -> None:
    ended = JobExecutionFactory(now=now, ok=True, started_at=now - timedelta(seconds=3))
    assert ended.duration == timedelta(seconds=3)
    assert JobExecutionFactory(now=now, running=True).duration is None
    assert JobExecutionFactory(now=now).duration is None


def test_the_payload_is_there_as_text_too() -> None:
    row = JobExecutionFactory(payload={"tag": "é", "n": [1, None]})
    assert json.loads(row.payload_json) == {"tag": "é", "n": [1, None]}
    assert json.loads(JobExecution.objects.get().payload_json) == row.payload


class TestAClaimedRow:
    """Whose columns are read by hand, and its JSON only when somebody asks."""

    @pytest.fixture
    def row(self, now: datetime) -> JobExecution:
        JobExecutionFactory(now=now, payload={"n": 1}, errors=[{"message": "before"}])
        (claimed,) = claim(WorkerFactory(now=now), now)
        return claimed

    @pytest.mark.parametrize("is_read", [False, True])
    def test_is_read_again_as_a_whole(self, row: JobExecution, is_read: bool) -> None:
        """Fault: a receiver that refreshed its execution found the errors of before, unless it had read them."""
        assert not is_read or row.errors
        JobExecution.objects.update(errors=[{"message": "now"}])
        row.refresh_from_db()
        assert row.errors == [{"message": "now"}]
        assert row.payload_json == '{"n": 1}'

    def test_is_saved_as_it_is(self, row: JobExecution) -> None:
        row.payload = {"n": 2}
        row.save()
        saved = JobExecution.objects.get()
        assert (saved.payload, saved.errors, saved.logs) == ({"n": 2}, [{"message": "before"}], [])

    @pytest.mark.parametrize("twin", [copy.copy, copy.deepcopy], ids=["copy", "deepcopy"])
    def test_is_copied_with_what_nobody_has_read(self, row: JobExecution, twin: Callable[..., JobExecution]) -> None:
        other = twin(row)
        assert (other, other.payload, other.errors) == (row, {"n": 1}, [{"message": "before"}])
        assert other.created_at == JobExecution.objects.get().created_at


def test_rows_that_were_not_just_pushed_do_not_say_whether_they_are_new() -> None:
    JobExecutionFactory()
    assert JobExecution.objects.get().created is None


def test_ids_are_made_here_and_in_order() -> None:
    first, second = JobExecutionFactory.build_batch(2, id=models.uuid7())
    assert first.pk == second.pk
    made = [JobExecution().pk for _ in range(3)]
    assert made == sorted(made)
    assert {pk.version for pk in made} == {7}


@pytest.mark.parametrize(
    ("column", "length"),
    [
        ("job_name", 200),
        ("queue", 100),
        ("key", 255),
        ("organization_id", 64),
        ("triggered_by", 255),
        ("triggered_by_name", 255),
        ("cancelled_by", 255),
        ("cancelled_by_name", 255),
        ("retried_by", 255),
        ("retried_by_name", 255),
        ("fingerprint", 32),
        ("parked_reason", 32),
    ],
)
def test_a_column_takes_its_length_in_any_characters(column: str, length: int) -> None:
    """Names pass on SQLite and raise elsewhere: the length is counted in characters, not in bytes."""
    row = JobExecutionFactory(**{column: "💥" * length})
    row.refresh_from_db()
    assert getattr(row, column) == "💥" * length
    # SQLite would take more.
    assert JobExecution._meta.get_field(column).max_length == length


def test_an_error_may_be_long() -> None:
    row = JobExecutionFactory(failed=True, error="é" * 100_000)
    row.refresh_from_db()
    assert len(row.error) == 100_000


@pytest.mark.parametrize("verb", ["cancel", "retry", "copy", "start_now"])
def test_a_row_offers_the_services_as_methods(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from django_jobs import services

    row, person = JobExecutionFactory(), object()
    seen: list[Any] = []
    monkeypatch.setattr(services, verb, lambda execution, *, by: seen.append((execution, by)) or execution)
    assert getattr(row, verb)(by=person) is row
    assert seen == [(row, person)]


@pytest.mark.parametrize("verb", ["cancel", "retry", "copy", "start_now"])
def test_the_methods_have_twins_for_async_code(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    from django_jobs import services

    row, person = JobExecutionFactory(), object()

    async def service(execution: Any, *, by: Any) -> Any:
        return execution, by

    monkeypatch.setattr(services, f"a{verb}", service)
    assert asyncio.run(getattr(row, f"a{verb}")(by=person)) == (row, person)


@pytest.mark.parametrize("verb", ["cancel", "retry", "copy", "start_now"])
def test_a_template_that_names_a_verb_of_a_row_does_not_call_it(verb: str) -> None:
    from django.template import Context, Engine

    template = Engine().from_string(f"{{{{ row.job_name }}}}|{{{{ row.{verb} }}}}|{{{{ row.a{verb} }}}}")
    assert template.render(Context({"row": JobExecutionFactory()})) == "acc.mark||"


@pytest.mark.parametrize("model", [JobExecution, JobState, QueueState, Worker, JobStat])
def test_no_table_has_a_relation_to_another(model: Any) -> None:
    """A row must outlive the worker, the user and the organization that it names."""
    assert [field.name for field in model._meta.get_fields() if field.is_relation] == []
