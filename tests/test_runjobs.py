"""`manage.py runjobs` as a process: exit codes, signals, output, roles, deaths."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from django.core.cache import InvalidCacheBackendError
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError

from django_jobs.management.commands.runjobs import Command
from django_jobs.models import JobExecution, JobState, Worker
from django_jobs.states import Status
from tests.acc import jobs
from tests.engines import die_with_parent
from tests.support import ROOT, Ledger, Runjobs, child_environment, free_port, manage, wait_for

Start = Callable[..., Runjobs]

pytestmark = pytest.mark.subprocess


def status(row: JobExecution) -> str:
    return JobExecution.objects.values_list("status", flat=True).get(pk=row.pk)


def unreachable(tmp_path: Path) -> dict[str, str]:
    """Return an environment in which the database is not there."""
    from django.conf import settings

    if settings.ENGINE == "sqlite":
        return {"DATABASE_NAME": str(tmp_path / "absent" / "database.sqlite3")}
    scheme = {"postgres": "postgres://postgres", "mysql": "mysql://root"}[settings.ENGINE]
    return {"DATABASE_URL": f"{scheme}:sesame@127.0.0.1:1/nothing"}


def without_tables(tmp_path: Path) -> dict[str, str]:
    """Return an environment in which the database has none of our tables."""
    from django.conf import settings

    names = {"sqlite": str(tmp_path / "empty.sqlite3"), "postgres": "postgres", "mysql": "mysql"}
    return {"DATABASE_NAME": names[settings.ENGINE]}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_runs_jobs_and_ends_with_0_after_a_signal(runjobs: Start, ledger: Ledger, number: signal.Signals) -> None:
    """Threads keep the process alive after SIGTERM. Source: knifecake/steady-queue #16."""
    process = runjobs().wait_ready()
    row = jobs.mark.push(tag="x")
    wait_for(lambda: status(row) == Status.OK, 10, "the row ran")
    process.kill(number)
    assert process.wait() == 0
    assert [entry.pid for entry in ledger.ends(row.pk)] == [process.pid]
    worker = Worker.objects.get()
    assert (worker.stopped_at is not None, worker.stop_reason) == (True, number.name)
    assert "Traceback" not in process.output


@pytest.mark.sqlite
def test_it_says_what_it_does_and_one_line_for_each_run(runjobs: Start) -> None:
    process = runjobs("--queues", "default,mail", "--concurrency", "3").wait_ready()
    rows = [jobs.mark.push(), jobs.mark.using(queue="mail").push()]
    elsewhere = jobs.mark.using(queue="other").push()
    for row in rows:
        wait_for(lambda row=row: str(row.pk) in process.output, 10, "the run is in the output")
    assert process.stop() == 0
    text = process.output
    assert "worker, scheduler, sweep" in text
    assert "database)" in text
    assert "queues: default, mail; slots: 3" in text
    for row in rows:
        assert len([line for line in text.splitlines() if str(row.pk) in line]) == 1
    assert status(elsewhere) == Status.PENDING


def test_verbosity_0_is_silent_when_all_is_well(runjobs: Start) -> None:
    # The system checks warn of the short secret, which a system cron would mail once a minute.
    process = runjobs("-v", "0", jobs={"CRON_SECRET": "short"}).wait_ready()
    row = jobs.mark.push()
    wait_for(lambda: status(row) == Status.OK, 10, "the row ran")
    assert process.stop() == 0
    assert process.output == ""


def test_a_second_signal_ends_at_once_and_the_row_is_recoverable(runjobs: Start, ledger: Ledger) -> None:
    process = runjobs(jobs={"DRAIN_TIMEOUT": 20}).wait_ready()
    row = jobs.slow_retry.push(s=30.0)
    wait_for(lambda: ledger.starts(row.pk), 10, "the handler has begun")
    process.kill(signal.SIGTERM)
    wait_for(lambda: "SIGTERM" in process.output, 10, "the signal was taken")
    assert process.process.poll() is None
    process.kill(signal.SIGTERM)
    assert process.wait(10) == 143
    assert status(row) == Status.RUNNING


@pytest.mark.parametrize("options", ["--once", "--processes 1"])
@pytest.mark.django_db(transaction=True)
def test_streams_that_are_closed_are_no_obstacle(options: str) -> None:
    """Fault: started with `<&- >&- 2>&-`, as some init scripts do, it ended with a traceback before its first line."""
    row = jobs.mark.push()
    command = ["sh", "-c", f'exec "$0" -m django runjobs {options} <&- >&- 2>&-', sys.executable]
    process = subprocess.Popen(command, cwd=ROOT, env=child_environment(), preexec_fn=die_with_parent)
    try:
        wait_for(lambda: status(row) == Status.OK, 60, "it ran")
        if options != "--once":
            process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_deploy_hands_back_what_runs_too_long(runjobs: Start, ledger: Ledger) -> None:
    """Nothing new, drain up to the timeout, then signal what is left."""
    process = runjobs(jobs={"DRAIN_TIMEOUT": 2, "INTERRUPT_GRACE": 1}).wait_ready()
    quick, again, over = jobs.slow.push(s=1.0), jobs.slow_retry.push(s=60.0), jobs.slow.push(s=60.0)
    for row in (quick, again, over):
        wait_for(lambda row=row: ledger.starts(row.pk), 10, "the handler has begun")
    process.kill(signal.SIGTERM)
    wait_for(lambda: "SIGTERM" in process.output, 20, "the signal was taken")
    late = jobs.mark.push()
    assert process.wait(12) == 0
    assert {status(row) for row in (quick,)} == {Status.OK}
    assert (status(again), status(over), status(late)) == (Status.PENDING, Status.ERROR, Status.PENDING)
    again.refresh_from_db()
    over.refresh_from_db()
    assert again.attempt == 0
    assert "shutdown" in over.error


# Which options are wrong is tested without processes; these are refused at three places. No statement is sent before,
# here and where a setting or a module of jobs is wrong: one engine shows it.
@pytest.mark.sqlite
@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--queues", "a b"], "--queues"),
        (["--concurrency", "many"], "--concurrency"),
        (["--once", "--reload"], "--reload"),
        (["--reload", "--processes", "2"], "--processes"),
        (["--processes", "1001"], "from 1 to 1000"),
    ],
)
def test_a_wrong_option_is_one_clear_line_and_exit_code_2(
    transactional_db: None, arguments: list[str], part: str
) -> None:
    result = manage("runjobs", *arguments)
    assert result.returncode == 2
    assert part in result.stderr
    assert "Traceback" not in result.stderr + result.stdout


@pytest.mark.sqlite
@pytest.mark.parametrize(
    ("wrong", "skip"),
    [
        ({"CONCURENCY": 3}, []),
        ({"SWEEP_CRON": "never"}, []),
        ({"POLL_INTERVAL": "soon"}, ["--skip-checks"]),
        ({"SWEEP_CRON": "never"}, ["--skip-checks"]),
    ],
)
def test_a_wrong_setting_is_named_and_exit_code_2(
    transactional_db: None, wrong: dict[str, Any], skip: list[str]
) -> None:
    result = manage("runjobs", *skip, DJANGO_JOBS_OVERRIDES=json.dumps(wrong))
    assert result.returncode == 2
    assert next(iter(wrong)) in result.stderr
    assert "Traceback" not in result.stderr + result.stdout


def test_a_foreign_check_that_cannot_be_made_is_one_line_and_exit_code_2(monkeypatch: Any) -> None:
    """Fault: CACHES named django-redis, which was not installed; a traceback, and exit code 1."""
    refusal = InvalidCacheBackendError("Could not find backend 'django_redis.cache.RedisCache':\n\tNo module")
    monkeypatch.setattr(BaseCommand, "check", Mock(side_effect=refusal))
    with pytest.raises(CommandError, match=r"^Could not find backend .*: No module$") as caught:
        Command().check()
    assert caught.value.returncode == 2


def test_missing_tables_are_named_at_once_and_exit_code_3(transactional_db: None, tmp_path: Path) -> None:
    """The same with unapplied migrations: a clear message."""
    began = time.monotonic()
    result = manage("runjobs", **without_tables(tmp_path))
    assert result.returncode == 3
    assert "manage.py migrate" in result.stderr
    assert "Traceback" not in result.stderr + result.stdout
    assert time.monotonic() - began < 15


@pytest.mark.slow(30)
def test_an_unreachable_database_is_exit_code_3_within_a_minute(transactional_db: None, tmp_path: Path) -> None:
    """If the database cannot be reached the parent waits for ever and nothing works. Source: django-q2#201."""
    result = manage("runjobs", timeout=60, **unreachable(tmp_path))
    assert result.returncode == 3
    lines = result.stderr.strip().splitlines()
    assert lines[-1].startswith("CommandError: The database 'default' cannot be reached: ")
    assert "Traceback" not in result.stderr + result.stdout
    assert "sesame" not in result.stderr + result.stdout


@pytest.mark.slow
def test_it_waits_for_a_database_that_comes_up(runjobs: Start, tmp_path: Path, ledger: Ledger) -> None:
    """Recovery by itself."""
    from django.conf import settings
    from django.db import connections

    if settings.ENGINE == "sqlite":
        process = runjobs(DATABASE_NAME=str(tmp_path / "absent" / "database.sqlite3"))
        wait_for(lambda: "waiting for the database" in process.output, 15, "it waits")
        # All its files come at once: of a part of them it would make another database.
        (made := tmp_path / "made").mkdir()
        for suffix in ("", "-wal", "-shm"):
            source = Path(str(connections["default"].settings_dict["NAME"]) + suffix)
            if source.exists():
                (made / f"database.sqlite3{suffix}").write_bytes(source.read_bytes())
        made.rename(tmp_path / "absent")
        wait_for(lambda: "queues: any" in process.output, 15, "it has begun")
        assert process.stop() == 0
        return
    relay = Relay(tmp_path)
    process = runjobs(DATABASE_URL=relay.url)
    wait_for(lambda: "waiting for the database" in process.output, 15, "it waits")
    with relay:
        process.wait_ready()
        assert process.stop() == 0


class Relay:
    """A port that leads to the database server once it is opened."""

    def __init__(self, tmp_path: Path) -> None:
        from django.db import connections

        self.settings = connections["default"].settings_dict
        self.port = free_port()
        scheme = "postgres" if "postgresql" in self.settings["ENGINE"] else "mysql"
        user, password = self.settings["USER"], self.settings["PASSWORD"]
        self.url = f"{scheme}://{user}:{password}@127.0.0.1:{self.port}/{self.settings['NAME']}"
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Relay:
        host, port = str(self.settings["HOST"]), str(self.settings["PORT"])
        if host.startswith("/"):
            target = f"{host}/.s.PGSQL.{port or 5432}"
        else:
            target = f"{host or '127.0.0.1'}:{port or (5432 if 'postgresql' in self.settings['ENGINE'] else 3306)}"
        self.process = subprocess.Popen([sys.executable, "-c", _RELAY, str(self.port), target])
        return self

    def __exit__(self, *args: object) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)


_RELAY = """
import socket, sys, threading
def pump(a, b):
    try:
        while data := a.recv(65536):
            b.sendall(data)
    except OSError:
        pass
    finally:
        for s in (a, b):
            try:
                s.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
target = sys.argv[2]
while True:
    client, _ = server.accept()
    if target.startswith("/"):
        upstream = socket.socket(socket.AF_UNIX)
        upstream.connect(target)
    else:
        host, port = target.rsplit(":", 1)
        upstream = socket.create_connection((host, int(port)))
    for pair in ((client, upstream), (upstream, client)):
        threading.Thread(target=pump, args=pair, daemon=True).start()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_it_waits_for_the_database_ends_it_with_0(
    runjobs: Start, tmp_path: Path, number: signal.Signals
) -> None:
    """A signal during start-up (database slow), too."""
    process = runjobs(**unreachable(tmp_path))
    wait_for(lambda: "waiting for the database" in process.output, 15, "it waits")
    process.kill(number)
    # Without the signal it would wait for 30 s.
    assert process.wait(15) == 0
    assert "Traceback" not in process.output


@pytest.mark.sqlite
@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import not_there_at_all", ["ModuleNotFoundError", "not_there_at_all"]),
        ("import brokenapp.jobs_helper", ["ModuleNotFoundError", "brokenapp.jobs_helper"]),
        ("def broken(:", ["SyntaxError"]),
        ("raise RuntimeError('at import')", ["RuntimeError: at import"]),
    ],
)
def test_a_jobs_module_that_cannot_be_imported_is_named(
    transactional_db: None, tmp_path: Path, source: str, words: list[str]
) -> None:
    """Autodiscovery swallows ImportError inside tasks modules. Sources: celery/celery#3697, #3986, PR#5211."""
    app = tmp_path / "brokenapp"
    app.mkdir()
    (app / "__init__.py").write_text("")
    (app / "jobs.py").write_text(source)
    (tmp_path / "broken_settings.py").write_text(
        "from tests.settings import *\nINSTALLED_APPS = [*INSTALLED_APPS, 'brokenapp']\n"
    )
    result = manage(
        "runjobs", "--once", DJANGO_SETTINGS_MODULE="broken_settings", PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}"
    )
    assert result.returncode != 0
    for word in ("brokenapp.jobs", *words):
        assert word in result.stderr


def test_each_role_does_its_own(runjobs: Start) -> None:
    """No single missing role strands a due row: every role stages."""
    process = runjobs("--sweep").wait_ready()
    due = jobs.mark.using(delay=0.5).push()
    wait_for(lambda: status(due) == Status.PENDING, 10, "the sweep process staged the row")
    assert process.stop() == 0
    process = runjobs("--worker", ACC_CRON="* * * * * *").wait_ready()
    wait_for(lambda: status(due) == Status.OK, 10, "the worker process ran the row")
    assert process.stop() == 0
    assert not JobState.objects.exists()
    assert list(Worker.objects.order_by("pk").values_list("roles", flat=True)) == [["sweep"], ["worker"]]


def test_ticks_come_while_the_only_slot_is_busy(runjobs: Start, ledger: Ledger) -> None:
    """Periodic deferral happens on the loop of the jobs, and long ones delay it. Source: procrastinate#292."""
    process = runjobs("--concurrency", "1", ACC_CRON="* * * * * *").wait_ready()
    row = jobs.slow.using(priority="high").push(s=60.0)
    wait_for(lambda: ledger.starts(row.pk), 10, "the slot is taken")
    state = JobState.objects.filter(job_name="acc.tick", last_tick_at__isnull=False)
    wait_for(state.exists, 10, "the schedule was seen")
    before = state.get().last_tick_at
    wait_for(lambda: (state.get().last_tick_at - before).total_seconds() >= 2, 20, "the cursor moves on")
    assert not ledger.ends(row.pk)
    process.kill_group()


@pytest.mark.slow
def test_processes_that_start_together_and_again_fire_each_tick_once(runjobs: Start, ledger: Ledger) -> None:
    """Registering a job at process start makes one copy per process, each firing for ever.

    Sources: django-background-tasks#233, mwmbl PR#351, Koed00/django-q#566.
    """
    for _ in range(2):
        processes = [runjobs(ACC_CRON="* * * * * *") for _ in range(2)]
        for process in processes:
            wait_for(lambda process=process: "queues: any" in process.output, 20, "it has begun")
        time.sleep(3)
        for process in processes:
            process.kill(signal.SIGTERM)
        for process in processes:
            assert process.wait(10) == 0
    ticks = list(JobExecution.objects.filter(job_name="acc.tick").values_list("tick_at", flat=True))
    assert len(ticks) >= 4
    assert len(ticks) == len(set(ticks))
    assert len(ledger.starts()) == JobExecution.objects.filter(job_name="acc.tick", status=Status.OK).count()
    assert JobState.objects.count() == 1


@pytest.mark.sqlite
def test_commands_that_only_import_the_jobs_write_nothing(transactional_db: None) -> None:
    """Plain `manage.py shell` and `check` write nothing."""
    for arguments in (["check"], ["shell", "-c", "import tests.acc.jobs"]):
        assert manage(*arguments, ACC_CRON="* * * * * *").returncode == 0
    assert not JobState.objects.exists()
    assert not JobExecution.objects.exists()
    assert not Worker.objects.exists()


@pytest.mark.slow
@pytest.mark.parametrize("roles", [["--scheduler"], ["--sweep"], []])
def test_the_row_of_a_killed_worker_is_taken_up(runjobs: Start, ledger: Ledger, roles: list[str]) -> None:
    """Worker killed hard; the row stays in progress for ever.

    Sources: RealOrangeOne/django-tasks#46, ricwo/pq#23. Whatever the roles of the process that is left.
    """
    process = runjobs("--worker").wait_ready()
    row, last = jobs.slow_retry.push(s=60.0), jobs.slow.push(s=60.0)
    wait_for(lambda: ledger.starts(row.pk) and ledger.starts(last.pk), 10, "the handlers have begun")
    process.kill(signal.SIGKILL)
    process.wait()
    other = runjobs(*roles).wait_ready()
    if roles:
        wait_for(lambda: status(row) == Status.PENDING, 15, "the row waits again")
    else:
        wait_for(lambda: len(ledger.starts(row.pk)) == 2, 15, "the row runs again")
    wait_for(lambda: status(last) == Status.ERROR, 20, "the row without attempts left has ended")
    last.refresh_from_db()
    assert "WorkerLost" in last.error
    assert str(process.pid) in last.error
    assert last.completed_at is not None
    assert len(ledger.starts(last.pk)) == 1
    other.kill_group()


def reload(runjobs: Start, tmp_path: Path, source: str) -> tuple[Runjobs, Path]:
    """Start a process with --reload, and a module of jobs that it loads."""
    app = tmp_path / "reloaded"
    app.mkdir()
    (app / "__init__.py").write_text("")
    (app / "jobs.py").write_text(source)
    (tmp_path / "reload_settings.py").write_text(
        "from tests.settings import *\nINSTALLED_APPS = [*INSTALLED_APPS, 'reloaded']\n"
    )
    process = runjobs("--reload", DJANGO_SETTINGS_MODULE="reload_settings", PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}")
    return process, app / "jobs.py"


@pytest.fixture
def reloading(runjobs: Start, tmp_path: Path) -> tuple[Runjobs, Path]:
    """A process with --reload that works, and its module of jobs."""
    process, module = reload(runjobs, tmp_path, "")
    return process.wait_ready(), module


def save(path: Path, text: str) -> None:
    # The reloader looks once a second and compares times of modification.
    time.sleep(1.5)
    path.write_text(text)


NEW_JOB = "from django_jobs import job\n\n\n@job(name='reloaded.new')\ndef new() -> None: ...\n"


@pytest.mark.slow
def test_a_reload_runs_the_new_code_and_leaves_no_row_running(reloading: tuple[Runjobs, Path], ledger: Ledger) -> None:
    """Under autoreload the worker is not in the main thread, where signals cannot be handled; a reload cuts a job.

    Sources: getsentry/sentry PR#96486, RealOrangeOne/django-tasks#105, rq/django-rq#262.
    """
    process, module = reloading
    row = jobs.slow_retry.push(s=3.0)
    wait_for(lambda: ledger.starts(row.pk), 10, "the handler has begun")
    first = Worker.objects.get()
    save(module, NEW_JOB)
    wait_for(lambda: Worker.objects.filter(stopped_at=None).exclude(pk=first.pk).exists(), 20, "a new process is there")
    assert "reloaded.new" in Worker.objects.get(stopped_at=None).names
    first.refresh_from_db()
    assert first.stop_reason == "reload"
    wait_for(lambda: status(row) == Status.OK, 20, "the row that was cut ran again")
    assert "ValueError" not in process.output
    assert process.stop(15) == 0


@pytest.mark.slow
def test_a_reload_waits_while_a_source_is_wrong_and_ctrl_c_leaves_no_row_running(
    reloading: tuple[Runjobs, Path], ledger: Ledger
) -> None:
    """Faults: the first mistake that was saved ended it; Ctrl-C killed it before it had handed back what ran."""
    process, module = reloading
    save(module, "def new(:\n")
    wait_for(lambda: "restarts when a source file changes" in process.output, 20, "it waits for a change")
    assert "SyntaxError" in process.output
    save(module, NEW_JOB)
    wait_for(lambda: Worker.objects.filter(stopped_at=None).exists(), 20, "a new process is there")
    assert "reloaded.new" in Worker.objects.get(stopped_at=None).names
    row = jobs.slow_retry.push(s=60.0)
    wait_for(lambda: ledger.starts(row.pk), 10, "the handler has begun")
    process.kill_group(signal.SIGINT)
    assert process.wait(15) == 0
    assert status(row) == Status.PENDING
    assert not Worker.objects.filter(stopped_at=None).exists()
    assert Worker.objects.filter(stop_reason="SIGINT").exists()


@pytest.mark.slow
@pytest.mark.parametrize("source", ["def new(:\n", "raise RuntimeError('at import')\n"])
def test_a_reload_that_starts_with_a_wrong_source_waits_for_its_mend(
    runjobs: Start, tmp_path: Path, transactional_db: None, source: str
) -> None:
    """Fault: what later only had it wait for a change ended it at the very first start."""
    process, module = reload(runjobs, tmp_path, source)
    wait_for(lambda: "restarts when a source file changes" in process.output, 20, "it waits for a change")
    assert process.output.count("Traceback") == 1
    assert "raised while importing the jobs of app 'reloaded'" in process.output
    save(module, NEW_JOB)
    process.wait_ready()
    assert "reloaded.new" in Worker.objects.get(stopped_at=None).names
    assert process.stop(15) == 0


def test_call_command_works_in_the_process_of_a_test(transactional_db: None, ledger: Ledger, capsys: Any) -> None:
    row = jobs.mark.push()
    call_command("runjobs", once=True, verbosity=0)
    assert status(row) == Status.OK


def test_call_command_raises_what_a_person_would_read(transactional_db: None) -> None:
    with pytest.raises(CommandError, match="--queues"):
        call_command("runjobs", "--once", "--queues", "a b")


@pytest.mark.parametrize("option", ["--processes=2", "--reload"])
def test_call_command_does_not_start_the_command_line_of_somebody_else_again(
    transactional_db: None, option: str
) -> None:
    with pytest.raises(CommandError, match="only from the command line"):
        call_command("runjobs", option)


def test_the_environment_of_children_names_this_database(transactional_db: None) -> None:
    assert child_environment()["DATABASE_NAME"]
