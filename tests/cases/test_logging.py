"""What handlers log: kept with their own row, within bounds, and on its way as the project set it up."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import json
import logging
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from django_jobs.execution.liveness import memory_in_use
from django_jobs.models import JobExecution
from django_jobs.states import Status
from tests.acc import jobs
from tests.acc.models import Thing
from tests.runtime.workers import a_worker, ended, jobs_of
from tests.support import ROOT, Runjobs, assert_consistent, child_environment, sized, wait_for

logger = logging.getLogger(__name__)
MEGABYTE = 1024 * 1024


def messages(row: JobExecution) -> list[str]:
    return [entry["message"] for entry in row.logs]


class Peak(threading.Thread):
    """How much more memory this process held within the block than at its beginning, at most, and after it."""

    def __enter__(self) -> Peak:
        gc.collect()
        self.base = self.most = memory_in_use() or 0
        self.over = threading.Event()
        self.start()
        return self

    def run(self) -> None:
        while not self.over.wait(0.002):
            self.most = max(self.most, memory_in_use() or 0)

    def __exit__(self, *raised: object) -> None:
        self.over.set()
        self.join()
        gc.collect()
        self.left = (memory_in_use() or 0) - self.base
        print(
            f"{(self.most - self.base) / MEGABYTE:.0f} MB more at most, {self.left / MEGABYTE:.0f} MB more afterwards"
        )


def handlers() -> list[list[logging.Handler]]:
    """The handlers of the root logger and of those that the jobs here log to."""
    return [list(it.handlers) for it in (logging.root, logger, logging.getLogger("tests.flood"))]


@pytest.mark.django_db(transaction=True)
@pytest.mark.medium
@pytest.mark.scale
def test_a_flood_of_lines_is_cut_to_its_two_ends_and_costs_no_memory(admin_client: Client) -> None:
    """Captured logs are kept without bound: memory grows, and at last the row cannot be stored.

    Sources: hatchet-dev/hatchet#4587, girder/girder#3600, ocurrent/ocluster#53.
    """
    count = sized(10_000, 1_000_000)
    flooding_logger = logging.getLogger("tests.flood")
    # Past pytest, which keeps every line.
    flooding_logger.propagate = False
    flooding_logger.setLevel(logging.INFO)

    def flood() -> None:
        for number in range(count):
            flooding_logger.info("%06d %s", number, "x" * 200)

    def one_long_line() -> None:
        flooding_logger.info("x" * 50 * MEGABYTE)

    def mark(number: int) -> None:
        flooding_logger.info("mark %d", number)

    before = handlers()
    with jobs_of(flood, one_long_line, mark, timeout=300) as [flooding, long_line, marking], a_worker(concurrency=1):
        ended(marking.push(number=0))
        with Peak() as peak:
            flooded = ended(flooding.push(), sized(60, 240))
        # The line itself.
        with Peak() as peak_of_the_long_one:
            long = ended(long_line.push())
        # What a flood leaves behind would be in the rows that come after it.
        for number, row in enumerate(marking.push_many([{"number": number} for number in range(10)])):
            assert messages(ended(row)) == [f"mark {number}"]
    assert peak.most - peak.base < 100 * MEGABYTE
    assert peak_of_the_long_one.most - peak_of_the_long_one.base < 100 * MEGABYTE
    assert max(peak.left, peak_of_the_long_one.left) < 30 * MEGABYTE
    assert handlers() == before
    assert (flooded.status, long.status) == (Status.OK, Status.OK)
    lines = messages(flooded)
    assert lines[0].startswith("000000") and lines[-1].startswith(f"{count - 1:06d}")
    assert f"{count - 100} lines dropped" in lines[50]
    assert len(lines) == 101
    assert len(messages(long)[0]) < 10_000
    for row in (flooded, long):
        assert len(json.dumps(row.logs)) < MEGABYTE // 2
        page = admin_client.get(reverse("admin:django_jobs_jobexecution_change", args=[row.pk]))
        assert page.status_code == 200
        assert messages(row)[0][:1000] in page.content.decode()
    assert_consistent()


@pytest.mark.django_db(transaction=True)
@pytest.mark.medium
@pytest.mark.scale
def test_thousands_of_runs_and_the_threads_of_one_leave_no_handler_line_or_memory_behind() -> None:
    """Lines are captured by a handler for each run: handlers stay behind, and with each every line is kept once more.

    Sources: hatchet-dev/hatchet#4587, girder/girder#3600, ocurrent/ocluster#53.
    """
    threads, lines = 8, 100

    def together() -> None:
        def talk(thread: int) -> None:
            for number in range(lines):
                logger.warning("%d-%d", thread, number)

        # As asyncio and asgiref start theirs: in a copy of the context.
        talking = [
            threading.Thread(target=contextvars.copy_context().run, args=(talk, thread)) for thread in range(threads)
        ]
        for thread in talking:
            thread.start()
        for thread in talking:
            thread.join()

    def mark(number: int) -> None:
        logger.warning("mark %d", number)

    before = handlers()
    with jobs_of(together, mark) as [talking_together, marking], a_worker(concurrency=1):
        told = ended(talking_together.push())
        with Peak() as peak:
            # In sequence, the last of them at last.
            ended(marking.push_many([{"number": number} for number in range(sized(100, 2_000))])[-1], sized(60, 120))
    assert handlers() == before
    assert peak.left < 30 * MEGABYTE
    kept = [line for line in messages(told) if "dropped" not in line]
    assert len(kept) == len(set(kept)) == 100
    assert set(kept) <= {f"{thread}-{number}" for thread in range(threads) for number in range(lines)}
    assert f"{threads * lines - 100} lines dropped" in messages(told)[50]
    for row in JobExecution.objects.filter(job_name="tests.mark"):
        assert (row.status, messages(row)) == (Status.OK, [f"mark {row.payload['number']}"])
    assert_consistent()


@pytest.mark.django_db(transaction=True)
@pytest.mark.medium
@pytest.mark.scale
def test_each_row_holds_only_its_own_lines() -> None:
    """Lines are captured for the process instead of the job: rows show what others logged.

    Sources: hatchet-dev/hatchet#4587, girder/girder#3600, ocurrent/ocluster#53.
    """
    meeting, count = threading.Barrier(3), sized(2_000, 10_000)

    def talk(letter: str) -> None:
        meeting.wait(10)
        for number in range(count):
            logger.warning("%s-%d", letter, number)
        # A bare thread carries no context: its lines are nobody's, and never somebody else's.
        stray = threading.Thread(target=logger.warning, args=("stray",))
        stray.start()
        stray.join()

    async def talk_async(letter: str) -> None:
        await asyncio.to_thread(meeting.wait, 10)
        for number in range(count):
            logger.warning("%s-%d", letter, number)
            if number % 100 == 0:
                await asyncio.sleep(0)

    def quiet() -> None: ...

    with jobs_of(talk, talk_async, quiet) as [talking, talking_async, being_quiet], a_worker(concurrency=3):
        rows = {"A": talking.push(letter="A"), "B": talking.push(letter="B"), "C": talking_async.push(letter="C")}
        for letter, row in rows.items():
            lines = [line for line in messages(ended(row)) if "dropped" not in line]
            assert len(lines) == 100
            assert {line[0] for line in lines} == {letter}
        for row in being_quiet.push_many([{}] * 10):
            assert not ended(row).logs
    assert_consistent()


@pytest.mark.django_db(transaction=True)
@pytest.mark.medium
def test_an_async_handler_queries_logs_and_pushes() -> None:
    """State is written where an event loop runs: Django refuses, and the row never moves.

    Source: celery/django-celery-results#495.
    """
    Thing.objects.create(name="thing")

    def answer() -> None: ...

    async def ask() -> None:
        await asyncio.sleep(0.05)
        thing = await Thing.objects.aget(name="thing")
        logger.warning("found %s", thing.name)
        with pytest.raises(Exception, match=r"await apush\(\) instead"):
            answering.push()
        row = await answering.apush()
        logger.warning("pushed %s", row.pk)

    with jobs_of(ask, answer) as [asking, answering], a_worker():
        row = ended(asking.push())
        assert row.status == Status.OK, row.error
        pushed = JobExecution.objects.get(job_name="tests.answer")
        assert messages(row) == ["found thing", f"pushed {pushed.pk}"]
        assert ended(pushed).status == Status.OK
    assert_consistent()


PROJECT = """
    from tests.settings import *
    LOGGING = {{
        "version": 1,
        "disable_existing_loggers": False,
        "handlers": {{"file": {{"class": "logging.FileHandler", "filename": {file!r}}}}},
        "root": {{"level": "WARNING", "handlers": ["file"]}},
        "loggers": {{"tests.acc": {{"level": "INFO", "handlers": ["file"], "propagate": False}}}},
    }}
"""
SHOW = """
    import django, json, logging
    django.setup()
    {before}
    show = lambda it: [it.level, it.propagate, it.disabled, [type(handler).__name__ for handler in it.handlers]]
    print(json.dumps([show(logging.getLogger(name)) for name in ("", "tests.acc", "django")]))
"""


@pytest.mark.sqlite
@pytest.mark.subprocess
def test_the_projects_logging_is_the_same_in_a_worker_and_its_file_has_each_line_once(
    runjobs: Callable[..., Runjobs], tmp_path: Path
) -> None:
    """The worker takes over the root logger: the project's LOGGING is void inside jobs, or lines come twice.

    Sources: celery/celery#2509, #4326.
    """
    log = tmp_path / "project.log"
    (tmp_path / "own_settings.py").write_text(textwrap.dedent(PROJECT).format(file=str(log)))
    own: dict[str, str] = {"DJANGO_SETTINGS_MODULE": "own_settings", "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    process = runjobs("--worker", **own).wait_ready()
    row = jobs.scripted.push(act="log", text="a line of the project")
    failed = jobs.boom.push()
    wait_for(lambda: JobExecution.objects.finished().count() == 2, 20, "both ran")
    assert process.stop() == 0
    row.refresh_from_db()
    assert [entry["message"] for entry in row.logs] == ["a line of the project"]
    assert log.read_text().count("a line of the project") == 1
    assert log.read_text().count(str(failed.pk)) == 1

    def shown(before: str) -> Any:
        code = textwrap.dedent(SHOW).format(before=before)
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=child_environment(**own),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return json.loads(done.stdout.splitlines()[-1])

    once = "from django.core.management import call_command; call_command('runjobs', '--once')"
    levels, after = shown("pass"), shown(once)
    assert after == levels
    assert levels[0] == [logging.WARNING, True, False, ["FileHandler"]]
    assert_consistent()
