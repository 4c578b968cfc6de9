"""The parts of runjobs around the ticks: options, start-up, requests to end, the console, --once, the end."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import DatabaseError, OperationalError, connections, transaction

from django_jobs import clock, job, registry, transitions
from django_jobs.contention import is_refusal
from django_jobs.execution.liveness import Liveness
from django_jobs.models import JobExecution, JobState, Worker
from django_jobs.runtime import runner as module
from django_jobs.runtime import startup
from django_jobs.runtime.child import Child
from django_jobs.runtime.console import console
from django_jobs.runtime.exits import DONE, FAILED, RECYCLED
from django_jobs.runtime.once import run_once
from django_jobs.runtime.options import Options, UsageError
from django_jobs.runtime.runner import Runner
from django_jobs.runtime.stage import Stage
from django_jobs.runtime.startup import DatabaseNotReady
from django_jobs.runtime.stopping import StopNow, StopRequest, StopRequests
from django_jobs.runtime.welcome import welcome
from django_jobs.served import Served
from django_jobs.states import Status
from tests.acc import jobs
from tests.factories import JobExecutionFactory, JobStateFactory, QueueStateFactory, WorkerFactory
from tests.runtime.support import statuses
from tests.runtime.workers import jobs_of
from tests.support import Ledger, wait_for
from tests.threads import InThread, in_thread

WAYS = (("worker",), ("scheduler",), ("worker", "scheduler"), ("sweep",))


def once(**options: Any) -> int:
    return Runner(Options.of(once=True, **options)).run()


class TestOptions:
    def test_no_role_is_all_of_them(self) -> None:
        assert Options.of().roles == ("worker", "scheduler", "sweep")
        assert Options.of(roles=["sweep", "worker"]).roles == ("worker", "sweep")

    def test_what_is_not_given_comes_from_the_settings(self, settings: Any) -> None:
        settings.DJANGO_JOBS = {"QUEUES": ["a", "b"], "CONCURRENCY": 3}
        options = Options.of()
        assert (options.served, options.concurrency) == (Served.of(["a", "b"], ()), 3)
        options = Options.of(queues=["c"], concurrency=7)
        assert (options.served, options.concurrency) == (Served.of(["c"], ()), 7)

    def test_excluded_queues_are_not_served(self) -> None:
        assert Options.of(queues=["a", "b"], exclude=["b"]).served == Served.of(["a"], ())
        assert Options.of(exclude=["b"]).served == Served.of(None, ["b"])

    @pytest.mark.parametrize(
        ("wrong", "part"),
        [
            ({"queues": ["a b"]}, "--queues"),
            ({"queues": ["x" * 101]}, "--queues"),
            ({"queues": []}, "--queues"),
            ({"exclude": ["é"]}, "--exclude"),
            ({"queues": ["a"], "exclude": ["a"]}, "--exclude"),
            ({"concurrency": 0}, "--concurrency"),
            ({"max_time": -1.0}, "--max-time"),
            ({"max_time": float("nan")}, "--max-time"),
            ({"max_jobs": 0}, "--max-jobs"),
            ({"max_memory": 0.0}, "--max-memory"),
            ({"processes": 0}, "--processes"),
            ({"processes": 2, "once": True}, "--once ends by itself"),
            ({"processes": 2, "roles": ["scheduler"]}, "add --worker"),
        ],
    )
    def test_a_wrong_option_is_refused_by_name(self, wrong: dict[str, Any], part: str) -> None:
        with pytest.raises(UsageError, match=part):
            Options.of(**wrong)


class TestStartup:
    @pytest.fixture
    def unreachable(self, monkeypatch: Any) -> Iterator[None]:
        from django.db.backends.base.base import BaseDatabaseWrapper

        def refuse(self: Any) -> None:
            raise OperationalError("connection refused\n\tIs the server running?")

        monkeypatch.setattr(BaseDatabaseWrapper, "ensure_connection", refuse)
        return

    @pytest.mark.medium
    def test_a_database_that_does_not_answer_is_given_up_on(self, unreachable: None) -> None:
        """If the database cannot be reached at start, the process waits for ever. Source: django-q2#201."""
        said: list[str] = []
        began = time.monotonic()
        with pytest.raises(DatabaseNotReady, match="'default' cannot be reached: connection refused Is the server"):
            startup.wait_for_database("default", said.append, patience=1.2)
        assert time.monotonic() - began < 15
        assert len(said) == 1
        assert startup.PATIENCE < 55

    def test_a_queue_that_no_job_declares_is_told_at_the_start(self) -> None:
        lines = welcome(Options.of(queues=["nonsense"]), "default")
        assert any("no job declares the queue nonsense; declared: default" in line for line in lines)

    @pytest.mark.postgres
    @pytest.mark.mysql
    @pytest.mark.parametrize("wrong", ["NAME", "USER"])
    def test_what_no_waiting_mends_is_told_at_once(self, transactional_db: None, monkeypatch: Any, wrong: str) -> None:
        """Fault: a misspelt name of the database looked like a server that is down, for half a minute."""
        said: list[str] = []
        with monkeypatch.context() as patch, pytest.raises(DatabaseNotReady) as caught:
            patch.setitem(connections["default"].settings_dict, wrong, "not_there")
            startup.wait_for_database("default", said.append, patience=20)
        assert str(caught.value).startswith("The database 'default' cannot be used as DATABASES['default'] says: ")
        assert "not_there" in str(caught.value)
        assert said == []

    @pytest.mark.parametrize(
        "words",
        [
            'connection to server at "::1", port 5432 failed: FATAL:  database "shop" does not exist',
            'FATAL:  role "shop" does not exist',
            'FATAL:  password authentication failed for user "shop"',
            'FATAL:  Peer authentication failed for user "shop"',
            "fe_sendauth: no password supplied",
            'FATAL:  no pg_hba.conf entry for host "10.0.0.1", user "shop"',
            'FATAL:  role "shop" is not permitted to log in',
            "FATAL:  no such database: shop",
        ],
    )
    def test_the_words_of_a_refusal_are_known(self, words: str) -> None:
        assert is_refusal(OperationalError(words))

    @pytest.mark.parametrize(("number", "refused"), [(1045, True), (1049, True), (2002, False), (1040, False)])
    def test_the_numbers_of_a_refusal_are_known(self, number: int, refused: bool) -> None:
        error = OperationalError(number, "text")
        error.__cause__ = Exception(number, "text")
        assert is_refusal(error) is refused

    def test_a_file_that_is_no_database_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("not a database " * 100)
        connection = sqlite3.connect(tmp_path / "notes.txt")
        with contextlib.closing(connection), pytest.raises(sqlite3.DatabaseError) as caught:
            connection.execute("SELECT 1 FROM sqlite_master")
        assert is_refusal(caught.value)

    @pytest.mark.parametrize(
        "words",
        [
            "connection refused\n\tIs the server running?",
            "FATAL:  the database system is starting up",
            "FATAL:  sorry, too many clients already",
            "could not translate host name",
        ],
    )
    def test_what_passes_is_waited_for(self, words: str) -> None:
        assert not is_refusal(OperationalError(words))

    def test_what_other_processes_are_needed_for_is_told_at_the_start(self) -> None:
        """Fault: cron jobs were counted, and nothing said that a worker alone never fires them."""
        with registry.isolated(empty=True):

            @job(name="acc.nightly", cron="0 3 * * *")
            def nightly() -> None: ...

            told = {roles: "\n".join(welcome(Options.of(roles=roles), "default")) for roles in ((), *WAYS)}
        no_ticks, no_runs = "fires no ticks of the 1 cron job: that takes a process with --scheduler", "runs no jobs"
        assert {roles: (no_ticks in text, no_runs in text) for roles, text in told.items()} == {
            (): (False, False),
            ("worker",): (True, False),
            ("scheduler",): (False, True),
            ("worker", "scheduler"): (False, False),
            ("sweep",): (True, True),
        }
        with registry.isolated(empty=True):
            assert "fires no tick" not in "\n".join(welcome(Options.of(roles=["worker"]), "default"))

    def test_a_driver_that_hangs_is_given_up_on(self, monkeypatch: Any) -> None:
        from django.db.backends.base.base import BaseDatabaseWrapper

        release = threading.Event()
        monkeypatch.setattr(BaseDatabaseWrapper, "ensure_connection", lambda self: release.wait(10))
        with pytest.raises(DatabaseNotReady, match="no answer"):
            startup.wait_for_database("default", lambda line: None, patience=0.05)
        release.set()

    def test_a_missing_table_is_named_at_once(self, transactional_db: None, monkeypatch: Any) -> None:
        monkeypatch.setattr(Worker._meta, "db_table", "django_jobs_not_migrated")
        with pytest.raises(DatabaseNotReady, match=r"no table django_jobs_not_migrated; run manage\.py migrate first"):
            startup.check_tables("default")

    @pytest.mark.parametrize("step", ["the tables", "the worker"])
    def test_a_database_that_goes_away_during_the_start_is_a_reason_in_one_line(
        self, step: str, transactional_db: None, monkeypatch: Any
    ) -> None:
        def fail(*args: Any) -> None:
            raise OperationalError("server closed\n\tthe connection")

        where = {"the tables": (module, "check_tables"), "the worker": (Liveness, "register")}[step]
        monkeypatch.setattr(*where, fail)
        with pytest.raises(DatabaseNotReady, match="'default' failed: server closed the connection"):
            Runner(Options.of()).run()

    def test_a_signal_that_comes_out_as_an_error_of_its_rollback_is_still_a_signal(
        self, transactional_db: None, monkeypatch: Any
    ) -> None:
        def register(self: Liveness) -> None:
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(10)
            except StopNow as stop:
                raise OperationalError("another command is already in progress") from stop

        monkeypatch.setattr(Liveness, "register", register)
        assert Runner(Options.of()).run() == DONE

    def test_the_text_says_how_many_jobs_run_in_which_mode(self) -> None:
        """Start says how many jobs run in which mode."""
        with registry.isolated(empty=True):

            @job(name="acc.one", cron="0 3 * * *")
            def one() -> None: ...

            @job(name="acc.two")
            def two() -> None: ...

            @job(name="acc.three")
            def three() -> None: ...

            text = "\n".join(welcome(Options.of(queues=["a", "b"], concurrency=4), "default"))
            without = "\n".join(welcome(Options.of(exclude=["a", "b"]), "default"))
        assert "jobs: 3 (1 cron, 2 database)" in text
        assert "queues: a, b; slots: 4" in text
        assert "queues: any except a, b; slots" in without
        assert connections["default"].display_name in text

    @pytest.mark.parametrize(
        ("pool", "size"),
        [(True, 4), ({"min_size": 2}, 2), ({"min_size": 2, "max_size": 7}, 7), ({"max_size": 10}, None), (False, None)],
    )
    def test_a_pool_with_fewer_connections_than_slots_is_told_at_the_start(
        self, pool: Any, size: int | None, set_pool: Callable[[Any], None]
    ) -> None:
        """Handlers that wait for a connection look like handlers that hang."""
        set_pool(pool)
        text = "\n".join(welcome(Options.of(concurrency=10), "default"))
        assert ("the pool of the database 'default' has" in text) == (size is not None)
        assert size is None or f"has {size} connections for 10 slots" in text
        assert "the pool" not in "\n".join(welcome(Options.of(roles=["sweep"]), "default"))

    @pytest.mark.postgres
    def test_a_pool_that_cannot_be_made_ends_the_start_with_the_mend(
        self, set_pool: Callable[[Any], None], monkeypatch: Any
    ) -> None:
        """Fault: it started, and each handler that used the database failed and cost its row an attempt."""
        set_pool({"max_size": 1})
        with pytest.raises(UsageError, match=r"pool of the database 'default' .* max_size .* min_size is 4"):
            Runner(Options.of()).run()
        set_pool(True)
        monkeypatch.setitem(sys.modules, "psycopg_pool", None)
        with pytest.raises(UsageError, match=r'psycopg_pool .* pip install "psycopg\[pool\]"'):
            startup.check_pools()

    def test_no_password_is_shown(self, monkeypatch: Any) -> None:
        monkeypatch.setitem(connections["default"].settings_dict, "PASSWORD", "sesame")
        assert "sesame" not in "\n".join(welcome(Options.of(), "default"))


class TestRequests:
    def test_the_first_request_counts(self) -> None:
        requests = StopRequests()
        assert requests.wait(0) is None
        requests.put(StopRequest(reason="a"))
        requests.put(StopRequest(reason="b", is_failure=True))
        assert requests.wait(0) == requests.wait(None) == StopRequest(reason="a")
        assert requests.overrides() == StopRequest(reason="b", is_failure=True)
        assert requests.overrides() is None

    def test_a_signal_wakes_a_wait_without_end(self) -> None:
        requests = StopRequests()
        requests.is_starting = False
        with requests.signals():
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
            request = requests.wait(None)
        assert request == StopRequest(reason="SIGTERM")

    def test_a_signal_during_the_start_ends_it_at_once(self) -> None:
        requests = StopRequests()
        with requests.signals(), pytest.raises(StopNow):
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
            time.sleep(10)

    def test_a_second_signal_ends_the_process_at_once(self, monkeypatch: Any) -> None:
        codes: list[int] = []
        monkeypatch.setattr(os, "_exit", codes.append)
        requests = StopRequests()
        requests.is_starting = False
        with requests.signals():
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
        assert codes == [130]

    def test_a_closed_terminal_is_one_signal_however_often_it_is_told(self, monkeypatch: Any) -> None:
        monkeypatch.setattr(os, "_exit", lambda code: pytest.fail("ended at once"))
        requests = StopRequests()
        requests.is_starting = False
        with requests.signals():
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGHUP)
        assert requests.wait(0) == StopRequest(reason="SIGHUP")

    def test_nohup_is_respected(self) -> None:
        before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            with StopRequests().signals():
                assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        finally:
            signal.signal(signal.SIGHUP, before)

    def test_signals_that_were_held_back_until_the_start_are_taken(self) -> None:
        requests = StopRequests()
        requests.is_starting = False
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        # To this thread: another one of the process would not hold it back.
        signal.raise_signal(signal.SIGTERM)
        with requests.signals():
            assert requests.wait(0) is None
            requests.let_in()
            assert requests.wait(20) == StopRequest(reason="SIGTERM")

    def test_the_handlers_of_before_come_back(self) -> None:
        before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
        with StopRequests().signals():
            assert signal.getsignal(signal.SIGTERM) not in before
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before

    def test_another_thread_takes_no_signals(self) -> None:
        requests = StopRequests()

        def enter() -> bool:
            with requests.signals():
                return requests.has_signals

        assert in_thread(enter) is False


class TestConsole:
    @staticmethod
    def bare(monkeypatch: Any) -> None:
        """Take away the handlers of pytest, which it adds when the test itself begins."""
        monkeypatch.setattr(logging.getLogger(), "handlers", [])
        monkeypatch.setattr(logging.getLogger("django_jobs"), "handlers", [])

    @pytest.mark.parametrize(("verbosity", "shown"), [(0, ["warning"]), (1, ["info", "warning"])])
    def test_our_lines_are_shown(self, verbosity: int, shown: list[str], monkeypatch: Any) -> None:
        self.bare(monkeypatch)
        stream = io.StringIO()
        with console(stream, verbosity):
            logging.getLogger("django_jobs.runs").info("info")
            logging.getLogger("django_jobs.runs").warning("warning")
        assert [line.split()[-1] for line in stream.getvalue().splitlines()] == shown

    def test_everything_is_as_before_afterwards_and_the_root_is_untouched(self, monkeypatch: Any) -> None:
        self.bare(monkeypatch)
        ours, root = logging.getLogger("django_jobs"), logging.getLogger()
        before = (root.level, list(root.handlers))
        with console(io.StringIO(), 1):
            assert (root.level, root.handlers) == before
        assert (ours.handlers, ours.level) == ([], logging.NOTSET)

    @pytest.mark.parametrize("name", ["django_jobs", ""])
    def test_a_project_that_handles_the_lines_is_left_alone(self, name: str, monkeypatch: Any) -> None:
        self.bare(monkeypatch)
        monkeypatch.setattr(logging.getLogger(name), "handlers", [logging.NullHandler()])
        stream = io.StringIO()
        with console(stream, 1):
            logging.getLogger("django_jobs.runs").warning("warning")
        assert stream.getvalue() == ""


@pytest.mark.django_db(transaction=True)
class TestOnce:
    def test_it_refuses_to_start_inside_a_transaction(self) -> None:
        with transaction.atomic(), pytest.raises(UsageError, match=r"inside a transaction .* use TransactionTestCase"):
            once()
        assert not Worker.objects.exists()

    @pytest.mark.medium
    def test_it_runs_what_is_due_and_ends(self, ledger: Ledger) -> None:
        now = clock.now("default")
        rows = [jobs.mark.push(tag=str(number)) for number in range(25)]
        failed = jobs.boom_retry.push()
        due = JobExecutionFactory(scheduled=True, now=now, scheduled_at=now - timedelta(seconds=1))
        later = jobs.mark.using(delay=60).push()
        assert once() == DONE
        assert statuses() == {
            **dict.fromkeys((row.pk for row in rows), Status.OK),
            failed.pk: Status.ERROR,
            due.pk: Status.OK,
            later.pk: Status.SCHEDULED,
        }
        assert len(ledger.starts()) == 25 + 3 + 1
        worker = Worker.objects.get()
        assert worker.stopped_at is not None
        assert worker.stop_reason == "nothing left to do"

    def test_it_works_outside_the_main_thread(self, ledger: Ledger) -> None:
        row = jobs.mark.push()
        assert in_thread(once) == DONE
        assert statuses() == {row.pk: Status.OK}

    @pytest.mark.medium
    def test_the_time_ends_it(self) -> None:
        row = jobs.slow.push(s=30.0, heed=True)
        began = time.monotonic()
        assert once(max_time=0.5) == DONE
        assert time.monotonic() - began < 15
        assert statuses()[row.pk] != Status.RUNNING

    @pytest.fixture(autouse=True)
    def _short_end(self, settings: Any) -> None:
        settings.DJANGO_JOBS = {**settings.DJANGO_JOBS, "DRAIN_TIMEOUT": 0.5, "INTERRUPT_GRACE": 0.5}

    def test_it_runs_what_a_run_pushes_to_a_queue_that_was_not_there(self) -> None:
        def work() -> None: ...

        def push() -> None:
            working.using(queue="brand-new").push()

        with jobs_of(push, work) as [pushing, working]:
            pushing.push()
            assert once() == DONE
        assert set(JobExecution.objects.values_list("queue", "status")) == {
            ("default", Status.OK),
            ("brand-new", Status.OK),
        }

    @pytest.mark.medium
    def test_it_runs_what_becomes_due_while_something_else_still_runs(
        self, ledger: Ledger, tmp_path: Path, monkeypatch: Any
    ) -> None:
        """Fault: stage made nothing claimable, and saw no pause, as long as anything ran."""
        tick, has_begun, has_failed = Stage.tick, threading.Event(), threading.Event()

        def fail_once(self: Stage, now: Any = None) -> float:
            if has_begun.is_set() and not has_failed.is_set():
                has_failed.set()
                raise OperationalError("the database is away for a moment")
            return tick(self, now)

        monkeypatch.setattr(Stage, "tick", fail_once)
        gate = tmp_path / "gate"
        jobs.gate.push(path=str(gate))
        running = InThread(once)
        try:
            wait_for(ledger.starts, 10, "the gate is reached")
            has_begun.set()
            wait_for(has_failed.is_set, 10, "stage failed")
            row = jobs.mark.using(delay=0.1).push()
            wait_for(lambda: statuses()[row.pk] == Status.OK, 10, "it ran beside the other")
        finally:
            gate.touch()
            code = running.result()
        assert code == DONE

    def test_a_request_to_end_reaches_it_while_it_trims(self) -> None:
        portions = iter(range(3))
        quick: Any = SimpleNamespace(tick=lambda: 1.0, suspect=lambda: None, portions=lambda now: portions)
        parts: Any = SimpleNamespace(
            scheduler=None, sweep=None, worker=None, stage=quick, rescue=quick, trim=quick, using="default"
        )
        assert not run_once(parts, lambda seconds: True)
        assert list(portions) == [1, 2]

    def test_it_fires_due_ticks_and_runs_them(self, ledger: Ledger) -> None:
        tick = clock.now("default") - timedelta(minutes=1)
        with registry.isolated():
            # Once a day, so that it is due only where the cursor is set back, at whatever time this runs.
            @job(name="acc.cron", cron=f"{tick.minute} {tick.hour} * * *", timezone="UTC", misfire_grace=3600)
            def cron() -> None: ...

            assert once() == DONE
            assert JobExecution.objects.count() == 0
            JobState.objects.update(last_tick_at=tick - timedelta(minutes=1))
            assert once() == DONE
        assert set(JobExecution.objects.values_list("job_name", "status")) == {("acc.cron", Status.OK)}

    @pytest.mark.medium
    def test_it_rescues_at_its_second_call(self, settings: Any, ledger: Ledger) -> None:
        settings.DJANGO_JOBS = {**settings.DJANGO_JOBS, "HEARTBEAT_INTERVAL": 0.2, "WORKER_LOST_AFTER": 1}
        worker = WorkerFactory(dead=True)
        row = JobExecutionFactory(running=True, worker=worker, job_name="acc.mark_retry", max_attempts=3)
        assert once() == DONE
        assert statuses() == {row.pk: Status.RUNNING}
        time.sleep(0.5)
        assert once() == DONE
        assert statuses() == {row.pk: Status.OK}

    def test_rows_of_paused_jobs_and_of_paused_or_unserved_queues_do_not_keep_it(self) -> None:
        paused, elsewhere = jobs.mark.push(), jobs.slow.using(queue="mail").push()
        in_paused_queue = jobs.slow.using(queue="held").push()
        JobStateFactory(paused=True)
        QueueStateFactory(paused=True, queue="held")
        assert once(exclude=["mail"], max_time=60) == DONE
        worker = Worker.objects.get()
        assert (worker.queues, worker.stop_reason) == (["-mail"], "nothing left to do")
        assert statuses() == {
            paused.pk: Status.SCHEDULED,
            elsewhere.pk: Status.PENDING,
            in_paused_queue.pk: Status.PENDING,
        }

    def test_a_row_of_a_paused_job_that_cannot_be_parked_does_not_keep_it(self, monkeypatch: Any) -> None:
        def refuse(*args: Any, **kwargs: Any) -> None:
            raise DatabaseError("poison")

        monkeypatch.setattr(transitions, "park", refuse)
        row = jobs.mark.push()
        JobStateFactory(paused=True)
        assert once(max_time=60) == DONE
        assert Worker.objects.get().stop_reason == "nothing left to do"
        assert statuses() == {row.pk: Status.PENDING}

    def test_beside_what_runs_it_stages_no_more_often_than_stage_asks_for(self) -> None:
        ticks: list[float] = []
        looks = iter([False] * 5)
        stage: Any = SimpleNamespace(tick=lambda: ticks.append(3600.0) or ticks[-1])
        parts: Any = SimpleNamespace(
            scheduler=None,
            sweep=None,
            rescue=SimpleNamespace(suspect=lambda: None),
            stage=stage,
            worker=SimpleNamespace(start=lambda: None, is_idle=False, claimed=0),
        )
        assert not run_once(parts, lambda seconds: next(looks, True))
        # One before anything runs, and one beside it.
        assert len(ticks) == 2

    def test_without_the_worker_role_nothing_runs(self) -> None:
        row, now = jobs.mark.push(), clock.now("default")
        due = JobExecutionFactory(scheduled=True, now=now, scheduled_at=now - timedelta(seconds=1))
        assert once(roles=["scheduler", "sweep"]) == DONE
        assert statuses() == {row.pk: Status.PENDING, due.pk: Status.PENDING}

    def test_an_error_is_told_by_the_exit_code(self, monkeypatch: Any) -> None:
        def fail(self: Any, now: Any = None) -> float:
            raise RuntimeError("boom")

        monkeypatch.setattr(module.Parts, "ticks", lambda self: {})
        monkeypatch.setattr("django_jobs.runtime.scheduler.Scheduler.tick", fail)
        assert once() == FAILED
        assert Worker.objects.get().stopped_at is not None


@pytest.mark.django_db(transaction=True)
class TestRun:
    @pytest.fixture(autouse=True)
    def _short(self, settings: Any) -> None:
        settings.DJANGO_JOBS = {**settings.DJANGO_JOBS, "DRAIN_TIMEOUT": 1, "INTERRUPT_GRACE": 0.5}

    @pytest.mark.medium
    def test_it_runs_until_it_is_stopped(self, ledger: Ledger) -> None:
        runner = Runner(Options.of())
        results: list[int] = []
        thread = threading.Thread(target=lambda: results.append(in_thread(runner.run)))
        thread.start()
        wait_for(Worker.objects.exists, 10, "the worker is registered")
        row = jobs.mark.push()
        wait_for(lambda: statuses()[row.pk] == Status.OK, 10, "the row ran")
        runner.stop("enough")
        thread.join(10)
        assert results == [DONE]
        assert list(Worker.objects.values_list("stop_reason", flat=True)) == ["enough"]

    def test_a_thread_that_dies_ends_the_process_with_a_failure(self, monkeypatch: Any) -> None:
        """Exit 0 is for a requested stop only."""
        ticks = 0

        def die(self: Stage, now: Any = None) -> float:
            nonlocal ticks
            ticks += 1
            if ticks > 1:
                raise SystemExit("dead")
            return 0.1

        monkeypatch.setattr(Stage, "tick", die)
        assert in_thread(Runner(Options.of(max_time=20)).run) == FAILED
        assert "stage thread died" in Worker.objects.get().stop_reason

    @pytest.mark.medium
    def test_the_time_ends_it(self) -> None:
        assert in_thread(Runner(Options.of(max_time=0.3)).run) == DONE
        assert Worker.objects.get().stop_reason == "--max-time of 0.3 s is over"

    @pytest.mark.medium
    def test_a_handler_that_does_not_stop_makes_the_process_begin_anew(self, monkeypatch: Any) -> None:
        started: list[list[str]] = []
        monkeypatch.setattr(os, "execv", lambda path, arguments: started.append(arguments))
        runner = Runner(Options.of(max_time=20))
        threading.Timer(0.1, runner._on_recycle, (True,)).start()
        assert runner.run() == DONE
        (arguments,) = started
        assert len(arguments) == len(__import__("sys").orig_argv)
        assert Worker.objects.get().stopped_at is not None

    def test_a_stop_that_comes_while_beginning_anew_wins(self, monkeypatch: Any) -> None:
        started: list[Any] = []
        monkeypatch.setattr(os, "execv", lambda *args: started.append(args))
        runner = Runner(Options.of(max_time=20))
        runner._on_recycle(True)
        runner.stop()
        assert runner.run() == DONE
        assert started == []

    @pytest.mark.medium
    def test_rows_of_a_claim_that_is_under_way_are_run_before_the_end(self, monkeypatch: Any, ledger: Ledger) -> None:
        claim, claimed = transitions.claim, threading.Event()

        def slow(**options: Any) -> list[JobExecution]:
            rows = claim(**options)
            if rows:
                claimed.set()
                time.sleep(0.3)
            return rows

        monkeypatch.setattr(transitions, "claim", slow)
        row = jobs.mark.push()
        runner = Runner(Options.of())
        threading.Thread(target=lambda: (claimed.wait(10), runner.stop())).start()
        assert in_thread(runner.run) == DONE
        assert statuses() == {row.pk: Status.OK}

    @pytest.mark.medium
    def test_no_beat_comes_after_the_goodbye(self) -> None:
        runner = Runner(Options.of(max_time=0.2))
        assert in_thread(runner.run) == DONE
        runner._beat()
        assert Worker.objects.filter(stopped_at=None).count() == 0

    @pytest.fixture
    def no_drain(self, settings: Any) -> None:
        settings.DJANGO_JOBS = {**settings.DJANGO_JOBS, "DRAIN_TIMEOUT": 0.0, "INTERRUPT_GRACE": 0.1}

    @pytest.mark.usefixtures("no_drain")
    @pytest.mark.medium
    def test_after_so_many_runs_it_takes_no_more_and_lets_all_come_to_their_end(self, ledger: Ledger) -> None:
        rows = [jobs.slow.push(s=s) for s in (1.0, 0.0, 0.0, 0.0, 0.0)]
        assert in_thread(Runner(Options.of(max_jobs=3, concurrency=2)).run) == DONE
        assert [statuses()[row.pk] for row in rows] == [Status.OK] * 3 + [Status.PENDING] * 2
        assert Worker.objects.get().stop_reason == "3 runs were started"

    @pytest.mark.usefixtures("no_drain")
    @pytest.mark.medium
    def test_a_stop_while_the_last_runs_come_to_their_end_does_not_wait_so_long(self, ledger: Ledger) -> None:
        row = jobs.slow_retry.push(s=60.0)
        runner = Runner(Options.of(max_jobs=1))
        threading.Thread(target=lambda: (wait_for(ledger.starts, 10, "it began"), runner.stop("enough"))).start()
        assert in_thread(runner.run) == DONE
        assert statuses() == {row.pk: Status.PENDING}
        assert Worker.objects.get().stop_reason == "enough"

    @pytest.mark.medium
    def test_with_too_much_memory_in_use_it_ends_after_a_run(self, ledger: Ledger, monkeypatch: Any) -> None:
        monkeypatch.setattr("django_jobs.runtime.limits.EVERY", 0.05)
        runner = Runner(Options.of(max_memory=1.0, max_time=20))

        def push() -> None:
            wait_for(Worker.objects.exists, 10, "it is there")
            jobs.mark.push()

        threading.Thread(target=in_thread, args=(push,)).start()
        assert in_thread(runner.run) == DONE
        assert len(ledger.ends()) == 1
        assert "more than 1 MB" in Worker.objects.get().stop_reason

    @pytest.mark.medium
    @pytest.mark.parametrize("options", [{"max_jobs": 1}, {}], ids=["a limit", "a handler that does not stop"])
    def test_a_child_asks_its_supervisor_to_replace_it(
        self, options: dict[str, int], monkeypatch: Any, ledger: Ledger
    ) -> None:
        monkeypatch.setattr(module, "hold_lifeline", lambda report, call: None)
        runner = Runner(Options.of(**options), child=Child(number=1, roles=("worker",)))
        jobs.mark.push()
        if not options:
            threading.Timer(0.1, runner._on_recycle, (True,)).start()
        assert in_thread(runner.run) == RECYCLED

    def test_roles_have_the_parts_they_need(self) -> None:
        def parts(*roles: str) -> set[str]:
            return set(
                module.Parts.make(
                    Options.of(roles=roles),
                    using="default",
                    beat=lambda now=None: 1.0,
                    on_recycle=print,
                    on_limit=print,
                    on_death=print,
                ).ticks()
            )

        assert parts("worker") == {"stage", "rescue"}
        assert parts("scheduler") == {"stage", "rescue", "scheduler"}
        assert parts("sweep") == {"stage", "rescue", "sweep", "trim"}
