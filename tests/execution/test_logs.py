from __future__ import annotations

import asyncio
import io
import json
import logging
import threading
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest

from django_jobs.context import JobContext
from django_jobs.execution.executor import execute
from django_jobs.execution.logs import TOTAL_BYTES, LogBuffer
from django_jobs.execution.outcomes import Ok
from django_jobs.execution.run import Run
from tests.execution.runs import PATIENCE, Slot, run_of

logger = logging.getLogger("tests.execution.captured")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Keep the lines from pytest, which would hold all of them."""
    logger.propagate = False
    logger.setLevel(logging.DEBUG)
    yield
    logger.propagate = True
    logger.setLevel(logging.NOTSET)


def messages(run: Run) -> list[str]:
    return [entry["message"] for entry in run.log_entries()]


def ran(handler: Any) -> Run:
    run = run_of(handler)
    assert execute(run) == Ok()
    return run


def record(message: object, *args: object) -> logging.LogRecord:
    return logging.LogRecord("tests", logging.INFO, __file__, 1, message, args, None)


def test_a_line_is_kept_with_its_time_level_and_logger() -> None:
    def handler() -> None:
        logger.warning("order %s", 42)

    (entry,) = ran(handler).log_entries()
    assert (entry["level"], entry["logger"], entry["message"]) == ("WARNING", logger.name, "order 42")
    assert entry["time"].endswith("+00:00")


def test_loggers_that_do_not_propagate_are_captured_and_disabled_levels_are_not() -> None:
    def handler() -> None:
        logger.setLevel(logging.WARNING)
        logger.info("too quiet")
        logger.error("loud")

    assert messages(ran(handler)) == ["loud"]


def test_lines_of_this_package_and_of_sql_are_left_out() -> None:
    def handler() -> None:
        for name in ("django_jobs", "django_jobs.pool", "django.db.backends", "django.db.backends.schema"):
            logging.getLogger(name).error("not the job's")
        logging.getLogger("django_jobs_of_mine").error("the job's")

    assert messages(ran(handler)) == ["the job's"]


@pytest.mark.medium
def test_levels_handlers_and_propagation_of_the_project_are_as_before() -> None:
    """The worker took over the root logger and made the project's LOGGING void: celery/celery#2509, #4326."""

    def state() -> list[tuple[int, list[logging.Handler], bool]]:
        return [(log.level, list(log.handlers), log.propagate) for log in (logging.getLogger(), logger)]

    before = state()
    seen: list[Any] = []

    def handler() -> None:
        logger.warning("line")
        seen.append(state())

    for _ in range(100):
        ran(handler)
    assert seen[0] == seen[-1] == before == state()


def test_handlers_of_the_project_get_each_line_once() -> None:
    stream = io.StringIO()
    own = logging.StreamHandler(stream)
    logger.addHandler(own)

    def handler() -> None:
        logger.info("first")
        logger.error("second")

    try:
        ran(handler)
    finally:
        logger.removeHandler(own)
    assert stream.getvalue() == "first\nsecond\n"


def test_a_filter_of_the_project_has_its_say() -> None:
    def redact(line: logging.LogRecord) -> bool:
        line.msg = line.msg.replace("secret", "***")
        return True

    logger.addFilter(redact)
    try:
        run = ran(lambda: logger.info("the secret"))
    finally:
        logger.removeFilter(redact)
    assert messages(run) == ["the ***"]


def test_nothing_is_made_for_a_run_that_logs_nothing() -> None:
    assert ran(lambda: None).capture.buffer is None


def test_the_first_and_last_lines_stay_with_a_marker_between_them(settings: Any) -> None:
    settings.DJANGO_JOBS = {**settings.DJANGO_JOBS, "LOG_MAX_ENTRIES": 5}

    def handler() -> None:
        for number in range(20):
            logger.info("line %d", number)

    run = ran(handler)
    assert messages(run) == ["line 0", "line 1", "line 2", "… 15 lines dropped …", "line 18", "line 19"]
    assert run.log_entries()[3]["dropped"] == 15


def test_with_a_limit_of_nothing_lines_are_only_counted() -> None:
    buffer = LogBuffer(0)
    buffer.add(record("line"))
    assert [entry["message"] for entry in buffer.entries()] == ["… 1 line dropped …"]


def test_as_many_lines_as_the_limit_are_all_there() -> None:
    buffer = LogBuffer(4)
    for number in range(4):
        buffer.add(record(number))
    assert [entry["message"] for entry in buffer.entries()] == ["0", "1", "2", "3"]


@pytest.mark.medium
def test_a_flood_of_lines_is_bounded_in_memory_and_in_the_row() -> None:
    """Captured logs grew without bound: hatchet-dev/hatchet#4587, girder/girder#3600, ocurrent/ocluster#53."""
    buffer = LogBuffer(100)
    line = record("%07d " + "x" * 192, 0)
    tracemalloc.start()
    try:
        for number in range(20_000):
            line.args = (number,)
            buffer.add(line)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000
    entries = buffer.entries()
    assert len(entries) == 101
    assert entries[0]["message"].startswith("0000000")
    assert entries[50]["dropped"] == 19_900
    assert entries[-1]["message"].startswith("0019999")


def test_one_huge_line_is_cut_before_it_is_kept() -> None:
    buffer = LogBuffer(100)
    buffer.add(record("x" * 50_000_000))
    ((entry),) = buffer.entries()
    assert len(entry["message"]) == 2_000


@pytest.mark.medium
def test_what_is_stored_is_bounded_whatever_the_limit_and_the_characters() -> None:
    buffer = LogBuffer(10_000)
    for number in range(3_000):
        buffer.add(record(f"{number:07d}" + "🙂" * 1_990))
    entries = buffer.entries()
    assert len(json.dumps(entries)) <= TOTAL_BYTES
    assert entries[0]["message"].startswith("0000000")
    assert entries[-1]["message"].startswith("0002999")
    (marker,) = [entry for entry in entries if "dropped" in entry]
    assert marker["dropped"] == 3_000 - (len(entries) - 1)


def test_a_line_whose_arguments_do_not_fit_fails_nothing_and_is_kept() -> None:
    logging.raiseExceptions = False
    try:
        run = ran(lambda: logger.info("%d orders", "many"))
    finally:
        logging.raiseExceptions = True
    assert messages(run) == ["%d orders <its arguments do not fit>"]


def test_a_line_that_cannot_be_shown_fails_nothing() -> None:
    class Odd:
        def __str__(self) -> str:
            raise KeyboardInterrupt

    buffer = LogBuffer(10)
    buffer.add(record(Odd()))
    assert len(buffer.entries()) == 1


def test_the_exception_of_a_line_comes_with_it() -> None:
    def handler() -> None:
        try:
            raise ValueError("inner")
        except ValueError:
            logger.exception("it broke")

    (message,) = messages(ran(handler))
    assert message.startswith("it broke\nTraceback")
    assert message.endswith("ValueError: inner")


def test_what_databases_refuse_is_replaced() -> None:
    assert messages(ran(lambda: logger.info("a\0b\ud800"))) == ["a\ufffdb\ufffd"]


@pytest.mark.medium
def test_two_runs_at_once_keep_their_lines_apart() -> None:
    barrier = threading.Barrier(2)

    def handler(letter: str) -> None:
        barrier.wait(PATIENCE)
        for number in range(2_000):
            logger.info("%s-%d", letter, number)

    runs = [run_of(handler, {"letter": letter}) for letter in "AB"]
    for slot in [Slot(run) for run in runs]:
        assert slot.outcome() == Ok()
    for run, letter in zip(runs, "AB", strict=True):
        kept = [message for message in messages(run) if not message.startswith("…")]
        assert len(kept) == 100
        assert {message[0] for message in kept} == {letter}


def test_lines_of_a_thread_that_a_job_starts_belong_to_no_run() -> None:
    def handler() -> None:
        thread = threading.Thread(target=logger.info, args=("aside",))
        thread.start()
        thread.join()
        logger.info("own")

    assert messages(ran(handler)) == ["own"]


def test_work_that_asyncio_sends_to_a_thread_is_the_runs_own() -> None:
    async def work() -> None:
        await asyncio.to_thread(logger.info, "beside")
        logger.info("own")

    assert messages(ran(lambda: work())) == ["beside", "own"]


def test_lines_after_the_end_are_nobodys() -> None:
    late: list[threading.Thread] = []
    ended = threading.Event()

    def handler(ctx: JobContext) -> None:
        import contextvars

        logger.info("in time")
        context = contextvars.copy_context()

        def linger() -> None:
            ended.wait(PATIENCE)
            context.run(logger.info, "late")

        late.append(threading.Thread(target=linger))
        late[0].start()

    run = ran(handler)
    ended.set()
    late[0].join()
    assert messages(run) == ["in time"]
