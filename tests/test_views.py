"""The URL that a platform's cron calls: it does what is due; to those who do not know the secret it is not there."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import OperationalError, connections
from django.test import AsyncClient, Client, RequestFactory
from django.views.debug import ExceptionReporter

from django_jobs import clock, job, registry
from django_jobs.models import JobExecution, JobState, Worker
from django_jobs.runtime import serverless
from django_jobs.states import Status
from tests.acc import jobs
from tests.factories import JobExecutionFactory, WorkerFactory
from tests.runtime.support import statuses
from tests.support import ROOT, Ledger, assert_consistent, child_environment, free_port, wait_for
from tests.threads import in_thread, race

SECRET = "Aex3ooPhieyoh8quai1e"
BEARER = {"Authorization": f"Bearer {SECRET}"}
URL = "/jobs/run"


@pytest.fixture
def secret(settings: Any) -> str:
    settings.DJANGO_JOBS = {**settings.DJANGO_JOBS, "CRON_SECRET": SECRET}
    return SECRET


def call(query: str = "", **headers: str) -> Any:
    return Client().get(f"{URL}{query}", headers=headers or BEARER)


def said_goodbye(calls: int, *, but: Any = None) -> None:
    """Wait until the workers of so many calls are stopped: on a busy machine that may come after the answer."""
    workers = Worker.objects.exclude(pk=but)
    wait_for(lambda: workers.exclude(stopped_at=None).count() == calls, 20, "all said goodbye")
    assert workers.count() == calls


class TestWhoMayCall:
    """Nothing here comes as far as the database."""

    pytestmark = pytest.mark.sqlite

    @pytest.fixture(autouse=True)
    def nothing_runs(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        calls: list[float] = []

        def note(seconds: float, *, max_jobs: int | None = None) -> serverless.Report:
            calls.append(seconds)
            return serverless.Report(done=True, started=0, ended={}, seconds=0.0)

        monkeypatch.setattr("django_jobs.views.run_within", note)
        return calls

    @pytest.mark.parametrize("path", [URL, f"{URL}/"])
    @pytest.mark.parametrize("method", ["GET", "POST"])
    def test_who_knows_the_secret_may(self, secret: str, path: str, method: str, nothing_runs: list[float]) -> None:
        response = Client(enforce_csrf_checks=True).generic(method, path, headers=BEARER)
        assert response.status_code == 200
        assert response.json() == {"done": True, "started": 0, "ended": {}, "seconds": 0.0}
        assert response["Cache-Control"] == "no-store"
        assert nothing_runs == [50]

    @pytest.mark.parametrize(
        "headers",
        [
            {},
            {"Authorization": "Bearer"},
            {"Authorization": "Bearer "},
            {"Authorization": f"Bearer {SECRET}x"},
            {"Authorization": f"Bearer {SECRET[:-1]}"},
            {"Authorization": f"Basic {SECRET}"},
            {"Authorization": SECRET},
            {"Authorization": "Bearer s\u00e9same \u2603 \udc80"},
            {"X-Authorization": f"Bearer {SECRET}"},
        ],
        ids=lambda headers: ascii(headers),
    )
    def test_to_anybody_else_there_is_no_such_url(
        self, secret: str, headers: dict[str, str], nothing_runs: list[float]
    ) -> None:
        self.is_as_missing("GET", headers)
        assert nothing_runs == []

    @pytest.mark.parametrize("method", ["POST", "PUT", "HEAD", "OPTIONS"])
    def test_no_method_tells_more(self, secret: str, method: str, nothing_runs: list[float]) -> None:
        self.is_as_missing(method, {"Authorization": "Bearer wrong"})
        assert nothing_runs == []

    @staticmethod
    def is_as_missing(method: str, headers: dict[str, str]) -> None:
        client = Client(enforce_csrf_checks=True)
        there, missing = (client.generic(method, path, headers=headers) for path in (URL, "/jobs/no-such"))
        assert there.status_code == missing.status_code == 404
        assert dict(there.headers) == dict(missing.headers)
        assert there.content.replace(b"run", b"no-such") == missing.content

    def test_without_a_secret_in_the_settings_nobody_may(self, nothing_runs: list[float]) -> None:
        for headers in ({}, BEARER, {"Authorization": "Bearer "}, {"Authorization": "Bearer None"}):
            assert Client().get(URL, headers=headers).status_code == 404
        assert nothing_runs == []

    def test_no_redirect_tells_that_it_is_there(self, secret: str) -> None:
        for path in (URL, f"{URL}/", f"{URL}//"):
            assert Client().get(path).status_code == 404

    def test_a_project_that_asks_everybody_for_a_login_does_not_ask_here(self, secret: str, settings: Any) -> None:
        settings.MIDDLEWARE = [*settings.MIDDLEWARE, "django.contrib.auth.middleware.LoginRequiredMiddleware"]
        assert call().status_code == 200
        assert call(Authorization="Bearer wrong").status_code == 404

    @pytest.mark.parametrize("secret", ["s\u00e9same-ouvre-toi", "s\u00e9same, voil\u00e0"])
    def test_a_secret_outside_of_ascii_is_compared_by_its_bytes(self, settings: Any, secret: str) -> None:
        settings.DJANGO_JOBS = {"CRON_SECRET": secret}
        sent = secret.encode().decode("latin-1")
        assert call(Authorization=f"Bearer {sent}").status_code == 200
        assert call(Authorization="bearer \u2603").status_code == 404

    def test_another_method_is_refused_by_name(self, secret: str) -> None:
        response = Client().put(URL, headers=BEARER)
        assert (response.status_code, response["Allow"]) == (405, "GET, POST")

    @pytest.mark.parametrize(
        "query",
        ["max_time=7", "max_time=901", "max_time=nan", "max_time=", "max_jobs=0", "max_jobs=-1", "max_jobs=\u00b2"],
    )
    def test_a_wrong_number_is_named(self, secret: str, query: str, nothing_runs: list[float]) -> None:
        response = call(f"?{query}")
        assert response.status_code == 400
        assert f"{query.partition('=')[0]} is " in response.json()["error"]
        assert nothing_runs == []

    def test_an_unknown_parameter_is_named_to_those_who_know_the_secret(
        self, secret: str, nothing_runs: list[float]
    ) -> None:
        response = call("?max_tiem=10")
        assert (response.status_code, nothing_runs) == (400, [])
        assert "no parameter 'max_tiem'; expected max_time or max_jobs" in response.json()["error"]
        assert call("?max_tiem=10", Authorization="Bearer wrong").status_code == 404

    def test_the_log_says_why_it_is_a_404_and_not_each_time(
        self, settings: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr("django_jobs.views._logged", {})

        def lines() -> list[str]:
            for _ in range(2):
                call(Authorization="Bearer sesame")
            assert "sesame" not in caplog.text
            found = [record.getMessage() for record in caplog.records if record.name == "django_jobs"]
            caplog.clear()
            return found

        (line,) = lines()
        assert "CRON_SECRET is not set" in line
        settings.DJANGO_JOBS = {**settings.DJANGO_JOBS, "CRON_SECRET": SECRET}
        (line,) = lines()
        assert "called without the right secret" in line
        assert lines() == []
        monkeypatch.setattr("django_jobs.views.LOG_INTERVAL", 0.0)
        assert len(lines()) == 2

    def test_the_time_can_be_chosen(self, secret: str, nothing_runs: list[float]) -> None:
        assert call("?max_time=10").status_code == 200
        assert nothing_runs == [10]

    def test_the_secret_is_in_no_log_line_and_no_report_of_an_error(
        self, secret: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Monitoring output contains passwords. Source: rq/django-rq, unreleased changelog of 2026."""

        def fail(*args: Any) -> bool:
            del args
            raise ZeroDivisionError

        monkeypatch.setattr("django_jobs.views.constant_time_compare", fail)
        with caplog.at_level(logging.DEBUG), pytest.raises(ZeroDivisionError) as caught:
            call()
        trace = caught.tb
        while "core/handlers" not in trace.tb_frame.f_code.co_filename:
            # The test's own frames know the secret.
            trace = trace.tb_next
        reporter = ExceptionReporter(RequestFactory().get(URL, headers=BEARER), caught.type, caught.value, trace)
        report = reporter.get_traceback_html() + reporter.get_traceback_text()
        assert "ZeroDivisionError" in report
        assert SECRET not in report + caplog.text


def test_no_transaction_is_opened_around_it_on_any_database() -> None:
    from django_jobs import views

    assert views.run._non_atomic_requests == set(connections)


@pytest.mark.django_db(transaction=True)
class TestWhatItDoes:
    @pytest.fixture(autouse=True)
    def _short(self, secret: str, settings: Any) -> None:
        settings.DJANGO_JOBS = {**settings.DJANGO_JOBS, "DRAIN_TIMEOUT": 0.2, "INTERRUPT_GRACE": 0.2}

    @pytest.mark.medium
    def test_it_does_all_that_is_due_and_counts_it(
        self, ledger: Ledger, settings: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One call fires, stages, suspects, runs; the next one rescues."""
        settings.DJANGO_JOBS = {**settings.DJANGO_JOBS, "HEARTBEAT_INTERVAL": 0.1, "WORKER_LOST_AFTER": 1}
        for connection in connections.all():
            monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)
        now = clock.now("default")
        due = JobExecutionFactory(scheduled=True, now=now, scheduled_at=now - timedelta(seconds=1))
        lost = JobExecutionFactory(
            running=True, worker=WorkerFactory(dead=True), job_name="acc.mark_retry", max_attempts=3
        )
        rows = [jobs.mark.push(), jobs.boom.push()]
        later = jobs.mark.using(delay=60).push()
        tick = now - timedelta(minutes=1)
        with registry.isolated():
            # Once a day, so that it is due in the first call only, at whatever time this runs.
            @job(name="acc.cron", cron=f"{tick.minute} {tick.hour} * * *", timezone="UTC", misfire_grace=3600)
            def cron() -> None: ...

            JobState.objects.create(
                job_name="acc.cron", schedule=str(cron.cron), last_tick_at=now - timedelta(minutes=2)
            )
            first = call()
            assert (first.status_code, first.json()["done"]) == (200, True)
            assert first.json()["started"] == 4
            assert first.json()["ended"] == {"ok": 3, "error": 1}
            time.sleep(0.25)
            assert call().json()["ended"] == {"ok": 1}
        found = statuses()
        assert {found[row.pk] for row in (due, lost, rows[0])} == {Status.OK}
        assert (found[rows[1].pk], found[later.pk]) == (Status.ERROR, Status.SCHEDULED)
        assert JobExecution.objects.filter(job_name="acc.cron", status=Status.OK).count() == 1
        said_goodbye(2, but=lost.worker_id)
        assert_consistent()

    @pytest.mark.medium
    def test_it_starts_no_more_than_it_was_told(self) -> None:
        for _ in range(5):
            jobs.mark.push()
        answer = call("?max_jobs=2").json()
        assert (answer["done"], answer["started"], answer["ended"]) == (False, 2, {"ok": 2})
        assert JobExecution.objects.pending().count() == 3

    @pytest.mark.slow
    def test_what_runs_too_long_is_handed_back_within_the_time(self, ledger: Ledger) -> None:
        """Also in a server's main thread, whose signals stay as they are."""
        again, over = jobs.slow_retry.push(s=60.0), jobs.slow.push(s=60.0, heed=True)
        before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
        began = time.monotonic()
        answer = call("?max_time=10").json()
        assert 3 < time.monotonic() - began < 10
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
        assert (answer["done"], answer["started"], answer["ended"]) == (False, 2, {"pending": 1, "error": 1})
        again.refresh_from_db()
        over.refresh_from_db()
        assert (again.status, again.attempt, over.status) == (Status.PENDING, 0, Status.ERROR)
        said_goodbye(1)

    @pytest.mark.slow
    def test_a_bound_of_runs_does_not_wait_for_them_for_ever(self) -> None:
        jobs.slow_retry.push(s=60.0)
        began = time.monotonic()
        assert call("?max_time=10&max_jobs=1").json()["ended"] == {"pending": 1}
        assert time.monotonic() - began < 10

    @pytest.mark.slow
    def test_calls_at_the_same_time_run_each_row_once(self, ledger: Ledger) -> None:
        rows = [jobs.slow.push(s=0.1) for _ in range(40)]
        answers = [response.json() for response in race(*[call] * 4)]
        assert sum(answer["started"] for answer in answers) == len(rows)
        assert sorted(entry.row_id for entry in ledger.starts()) == sorted(str(row.pk) for row in rows)
        assert set(statuses().values()) == {Status.OK}
        said_goodbye(4)

    @pytest.mark.medium
    def test_under_asgi_it_works_as_well(self) -> None:
        row = jobs.mark.push()

        def ask() -> Any:
            return asyncio.run(AsyncClient().get(URL, headers=BEARER))

        assert in_thread(ask).json()["ended"] == {"ok": 1}
        assert statuses() == {row.pk: Status.OK}

    def test_a_call_that_cannot_work_says_why(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Worker._meta, "db_table", "django_jobs_not_migrated")
        response = call()
        assert response.status_code == 503
        assert "has no table django_jobs_not_migrated" in response.json()["error"]

    def test_what_a_driver_says_is_for_the_log(self, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
        """Fault: the body named the database's host and user."""

        def refuse(self: Any) -> None:
            raise OperationalError('connection to server at "db.internal", user "shop" failed')

        monkeypatch.setattr("django_jobs.execution.liveness.Liveness.register", refuse)
        response = call()
        assert response.status_code == 503
        assert response.json() == {"error": "The database 'default' failed; the log says more."}
        assert 'server at "db.internal"' in caplog.text

    def test_values_of_settings_are_for_the_log(self, settings: Any, caplog: Any) -> None:
        settings.DJANGO_JOBS = {**settings.DJANGO_JOBS, "SWEEP_CRON": "hunter2"}
        response = call()
        assert response.status_code == 503
        assert response.json() == {"error": "A setting is wrong; the log says which."}
        assert "hunter2" in caplog.text

    def test_a_call_that_breaks_is_no_success(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(self: Any, now: Any = None) -> float:
            raise RuntimeError("boom")

        monkeypatch.setattr("django_jobs.runtime.scheduler.Scheduler.tick", fail)
        response = call()
        assert response.status_code == 503
        assert "boom" not in response.content.decode()

    @pytest.mark.medium
    def test_a_call_that_does_not_come_to_its_end_is_answered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        release = threading.Event()

        def hang(self: Any) -> int:
            release.wait(20)
            return 0

        monkeypatch.setattr(serverless.Runner, "run", hang)
        monkeypatch.setattr("django_jobs.views.MAX_TIME", 0.2)
        monkeypatch.setattr(serverless, "divided", lambda seconds: (0.0, 0.0))
        try:
            response = call()
        finally:
            release.set()
        assert response.status_code == 503
        assert "did not end within 0.2 s" in response.json()["error"]


@pytest.mark.django_db
def test_inside_a_transaction_of_a_test_it_says_what_to_do(secret: str) -> None:
    response = call()
    assert response.status_code == 503
    assert "TransactionTestCase" in response.json()["error"]


@pytest.mark.parametrize("seconds", [8, 10, 20, 30, 50, 300])
def test_most_of_the_time_is_for_work_and_the_end_fits_in(seconds: int) -> None:
    drain, rest = serverless.divided(seconds)
    assert drain >= 1.5
    assert rest >= 4
    assert seconds - drain - rest >= 0.3 * seconds


SERVER = [sys.executable, "-m", "django", "runserver", "--noreload", "--insecure"]


@pytest.mark.subprocess
@pytest.mark.slow
def test_a_web_server_does_the_work_of_a_worker(transactional_db: None, ledger: Ledger, tmp_path: Path) -> None:
    """A web process runs nothing by itself, and what it is asked for; it goes on serving afterwards."""
    address = f"127.0.0.1:{free_port()}"
    overrides = {"CRON_SECRET": SECRET, "KEEP": {"ok": None}}
    output = tmp_path / "server.log"
    with output.open("wb") as file:
        server = subprocess.Popen(
            [*SERVER, address],
            cwd=ROOT,
            env=child_environment(DJANGO_JOBS_OVERRIDES=json.dumps(overrides)),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def ask(token: str) -> tuple[int, dict[str, Any]]:
        request = urllib.request.Request(f"http://{address}{URL}", headers={"Authorization": f"Bearer {token}"})
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            error.close()
            return error.code, {}
        except urllib.error.URLError:
            return 0, {}

    try:
        wait_for(lambda: ask("wrong")[0] == 404, 30, "the server answers")
        rows = [jobs.mark.push() for _ in range(20)]
        assert not ledger.starts()
        code, answer = ask(SECRET)
        assert (code, answer["done"], answer["ended"]) == (200, True, {"ok": 20})
        assert {entry.pid for entry in ledger.ends()} == {server.pid}
        assert sorted(entry.row_id for entry in ledger.starts()) == sorted(str(row.pk) for row in rows)
        assert ask(SECRET)[1]["started"] == 0
        said_goodbye(2)
        assert {worker.pid for worker in Worker.objects.all()} == {server.pid}
        assert SECRET not in output.read_text()
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(10)
