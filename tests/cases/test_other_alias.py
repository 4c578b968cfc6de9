"""The executions live in a database of their own, and connections end after each use."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.contrib.admin import site
from django.contrib.auth import get_user_model
from django.core.checks import run_checks
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import close_old_connections, connections
from django.db.backends.utils import CursorWrapper
from django.db.transaction import Atomic
from django.test import Client

from django_jobs import job, registry
from django_jobs.models import JobExecution, JobState, Worker
from django_jobs.runtime.exits import DONE
from django_jobs.runtime.options import Options
from django_jobs.runtime.runner import Runner
from django_jobs.runtime.scheduler import MAX_DELAY, Scheduler
from django_jobs.services import pause_job, pause_queue, resume_job, resume_queue
from django_jobs.signals import job_pushed
from django_jobs.states import Status
from tests.acc import jobs
from tests.admin.support import LIST, WORKERS, page
from tests.cases.routers import Elsewhere
from tests.cases.test_stopping import Start, became, canary
from tests.factories import JobExecutionFactory, WorkerFactory
from tests.support import Ledger, assert_consistent, wait_for
from tests.threads import in_thread

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

JOBS = "/admin/django_jobs/jobstate/"


@pytest.fixture(autouse=True)
def _elsewhere(transactional_db: None, settings: Any) -> Iterator[None]:
    settings.DATABASE_ROUTERS = [Elsewhere()]
    ages = {alias: connections[alias].settings_dict["CONN_MAX_AGE"] for alias in ("default", "other")}
    for alias in ages:
        connections[alias].settings_dict["CONN_MAX_AGE"] = 0
    yield
    for alias, age in ages.items():
        connections[alias].settings_dict["CONN_MAX_AGE"] = age


@pytest.fixture
def strays(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Statements about our tables on the database that is not theirs, and transactions that our code opens there.

    Those of all threads; there must be none.
    """
    found: list[str] = []
    execute, enter = CursorWrapper._execute_with_wrappers, Atomic.__enter__

    def listen(self: CursorWrapper, sql: str, params: Any, many: bool, executor: Any) -> Any:
        if self.db.alias == "default" and "django_jobs_" in sql:
            found.append(sql)
        return execute(self, sql, params, many, executor)

    def watch(self: Atomic) -> None:
        opener = sys._getframe(1)
        module = str(opener.f_globals["__name__"])
        if self.using in (None, "default") and module.startswith("django_jobs."):
            found.append(f"a transaction of {module}.{opener.f_code.co_name}()")
        enter(self)

    with monkeypatch.context() as patch:
        patch.setattr(CursorWrapper, "_execute_with_wrappers", listen)
        patch.setattr(Atomic, "__enter__", watch)
        yield found
    assert found == []


@pytest.mark.medium
def test_the_pages_and_the_calls_use_the_executions_database_alone(
    strays: list[str], client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the queue in another database, pages query the default one, and transactions open there.

    Sources: Koed00/django-q#472, django-q2/django-q2#125.
    """
    monkeypatch.setattr(site, "enable_nav_sidebar", False)
    client.force_login(get_user_model().objects.create_superuser("mia"))
    failed, waiting, later = (
        JobExecutionFactory(failed=True),
        jobs.mark.using(key="k").push(),
        jobs.mark.using(delay=60).push(),
    )
    for url in (LIST, WORKERS, JOBS, page(failed), f"{LIST}?q={failed.pk}"):
        assert client.get(url).status_code == 200
    for verb, row in (("retry", failed), ("cancel", failed), ("copy", failed), ("start", later), ("cancel", later)):
        assert client.post(page(row, verb)).status_code == 302
    assert client.post(f"{JOBS}acc.mark/run/").status_code == 302
    assert client.post(page(failed, "delete"), {"post": "yes"}).status_code == 302
    chosen = {"action": "cancel_selected", "_selected_action": [str(waiting.pk)]}
    assert client.post(LIST, chosen).status_code == 302
    pause_job("acc.mark")
    pause_queue("default")
    resume_queue("default")
    resume_job("acc.mark")
    jobs.mark.push_many([{"tag": "a"}, jobs.mark.item(tag="b", key="k")])
    found = dict(JobExecution.objects.using("other").values_list("pk", "status"))
    assert failed.pk not in found
    assert (found[waiting.pk], found[later.pk]) == (Status.CANCELLED, Status.CANCELLED)
    # The copy, the one of the button, and two of push_many().
    assert sorted(found.values()) == [Status.CANCELLED] * 2 + [Status.PENDING] * 4


@pytest.mark.medium
def test_whoever_runs_jobs_uses_the_executions_database_alone(strays: list[str], client: Client, settings: Any) -> None:
    """See above: runjobs, its trim, --check, and the URL for a platform's cron."""
    settings.DJANGO_JOBS = {"CRON_SECRET": "Aex3ooPhieyoh8quai1e", "KEEP": {"ok": 1}, "TRIM_CRON": "* * * * *"}
    for _ in range(3):
        JobExecutionFactory(ok=True)
    lost = JobExecutionFactory(running=True, worker_id=None, job_name="acc.mark_retry", max_attempts=3)
    rows = [jobs.boom_retry.push(), jobs.async_mark.push()]
    assert in_thread(Runner(Options.of(once=True)).run) == DONE
    found = dict(JobExecution.objects.values_list("pk", "status"))
    assert [found[row.pk] for row in (lost, *rows)] == [Status.OK, Status.ERROR, Status.OK]
    assert JobExecution.objects.filter(job_name="acc.mark", status=Status.OK).count() == 1
    assert Worker.objects.using("other").filter(stop_reason="nothing left to do").count() == 1
    row = jobs.mark_retry.push()
    answer = client.get("/jobs/run", headers={"Authorization": "Bearer Aex3ooPhieyoh8quai1e"})
    assert answer.json()["ended"] == {"ok": 1}
    became(row, Status.OK)
    Worker.objects.all().delete()
    with pytest.raises(CommandError, match="no live process"):
        call_command("runjobs", check=True, skip_checks=True)
    WorkerFactory()
    call_command("runjobs", check=True, skip_checks=True)


@pytest.mark.medium
def test_the_command_line_uses_the_executions_database_alone(strays: list[str]) -> None:
    """See above: manage.py jobs."""
    failed, waiting = JobExecutionFactory(failed=True), jobs.mark.push()
    JobExecutionFactory(ok=True, job_name="gone.job")
    for line in (
        "list",
        "list --jobs",
        "list --queues",
        f"show {failed.pk}",
        "push acc.mark --key k",
        f"retry {failed.pk} --yes",
        f"cancel {waiting.pk} --yes",
        "pause acc.mark",
        "resume acc.mark",
        "pause --queue default",
        "resume --queue default",
        "purge --unregistered --yes",
        "tail",
    ):
        call_command("jobs", *line.split(), stdout=StringIO(), stderr=StringIO())
    found = dict(JobExecution.objects.using("other").values_list("pk", "status"))
    assert (found[failed.pk], found[waiting.pk]) == (Status.PENDING, Status.CANCELLED)
    assert len(found) == 3


def test_commands_of_django_use_the_executions_database_alone(strays: list[str], tmp_path: Path) -> None:
    """See above: checks, dumps and loads."""
    row = jobs.mark.using(key="k").push(tag="dumped")
    assert {message.id for message in run_checks(tags=["django_jobs", "database"], databases=["default", "other"])} >= {
        "django_jobs.W002"
    }
    dump = tmp_path / "dump.json"
    call_command("dumpdata", "django_jobs", database="other", output=str(dump))
    JobExecution.objects.all().delete()
    call_command("loaddata", str(dump), database="other", verbosity=0)
    loaded = JobExecution.objects.get()
    assert (loaded.pk, loaded.payload, loaded.status) == (row.pk, row.payload, row.status)
    assert jobs.mark.using(key="k").push().pk == row.pk


def test_a_tick_fires_once_whatever_is_done_to_connections_meanwhile() -> None:
    """Housekeeping closes the connection of the scheduler's transaction: the slot is not stored, and fires again.

    Source: django-q2/django-q2#293.
    """
    noon = datetime(2027, 3, 1, 12, tzinfo=UTC)
    swept: list[bool] = []

    def sweep(**kwargs: Any) -> None:
        close_old_connections()
        swept.append(connections["other"].in_atomic_block)

    def daily() -> None: ...

    job_pushed.connect(sweep)
    try:
        with registry.isolated(empty=True):
            job(name="tests.daily", cron="0 12 * * *")(daily)
            scheduler = Scheduler(using="other")
            scheduler.tick(noon - timedelta(hours=1))
            delays = []
            for second in range(0, 120, 10):
                sweep()
                delays.append(scheduler.tick(noon + timedelta(seconds=second)))
    finally:
        job_pushed.disconnect(sweep)
    (row,) = JobExecution.objects.all()
    assert row._state.db == "other"
    assert row.tick_at == noon
    assert JobState.objects.get().last_tick_at == noon
    assert delays[-1] == MAX_DELAY
    assert len(swept) == 13


@pytest.mark.subprocess
@pytest.mark.slow
def test_a_process_works_with_its_executions_in_another_database(runjobs: Start, ledger: Ledger) -> None:
    """See above, with every part at work."""
    process = runjobs(ACC_CRON="* * * * * *", DJANGO_SETTINGS_MODULE="tests.cases.elsewhere_settings").wait_ready()
    rows = [jobs.slow.push(s=0.5), jobs.boom_retry.push(), jobs.async_mark.push(), jobs.atomic_thing.push(name="made")]
    became(rows[0], Status.OK)
    became(rows[1], Status.ERROR)
    became(rows[2], Status.OK)
    wait_for(lambda: len(ledger.ends(tag="tick")) >= 4, 20, "it ticked")
    ticks = JobExecution.objects.exclude(tick_at=None)
    assert ticks.count() == ticks.values("tick_at").distinct().count()
    canary(ledger, process)
    assert process.stop() == 0
    assert "closed" not in process.output
    assert_consistent()
