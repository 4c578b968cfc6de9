"""The supervisor, with small scripts in place of its children: who is replaced, when, and how it all ends."""

from __future__ import annotations

import itertools
import logging
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from django.db import OperationalError, connections

from django_jobs.runtime import member as member_module
from django_jobs.runtime import supervisor as module
from django_jobs.runtime.child import ENVIRONMENT, Child
from django_jobs.runtime.exits import DONE, FAILED, NO_DATABASE, RECYCLED, USAGE, ended
from django_jobs.runtime.limits import MEGABYTE, Limits, MemoryLimit
from django_jobs.runtime.options import Options
from django_jobs.runtime.startup import DatabaseNotReady
from django_jobs.runtime.supervisor import Supervisor, children_of
from tests.support import wait_for
from tests.threads import in_thread

# What each child begins with: a line in the journal, with its number and when.
PREFACE = f"""
import json, os, signal, sys, time
number = json.loads(os.environ["{ENVIRONMENT}"])["number"]
def note(text):
    with open(sys.argv[1], "a") as journal:
        journal.write(f"{{number}} {{text}} {{time.monotonic()}}\\n")
signal.signal(signal.SIGTERM, lambda *args: (note("told"), os._exit(0)))
note("start")
"""
UNTIL_TOLD = "time.sleep(60)"

Start = Callable[..., "Fleet"]


class Fleet:
    """A supervisor in a thread of its own, and what its children wrote."""

    def __init__(self, code: str, journal: Path, **options: Any) -> None:
        self.journal = journal
        command = [sys.executable, "-S", "-c", PREFACE + textwrap.dedent(code), str(journal)]
        chosen = Options.of(**{"roles": ["worker"], "processes": 1, **options})
        self.said: list[str] = []
        self.supervisor = Supervisor(chosen, say=self.said.append, command=command)
        self.codes: list[int] = []
        self.thread = threading.Thread(target=lambda: self.codes.append(in_thread(self.supervisor.run)))
        self.thread.start()

    def lines(self, text: str, number: int | None = None) -> list[float]:
        """Return when children, or that one, wrote so."""
        lines = [line.split() for line in self.journal.read_text().splitlines()] if self.journal.exists() else []
        return [float(at) for who, what, at in lines if what == text and number in (None, int(who))]

    def has_started(self, times: int, number: int | None = None, timeout: float = 10) -> list[float]:
        wait_for(lambda: len(self.lines("start", number)) >= times, timeout, f"{times} starts")
        return self.lines("start", number)

    def stop(self) -> int:
        self.supervisor.stop()
        self.thread.join(20)
        return self.codes[0]


@pytest.fixture
def fleet(transactional_db: None, tmp_path: Path, monkeypatch: Any, settings: Any) -> Iterator[Start]:
    settings.DJANGO_JOBS = {**settings.DJANGO_JOBS, "DRAIN_TIMEOUT": 1}
    for name, value in {"AFTER_DRAIN": 0.0, "LINGER": 0.0, "LOOK_EVERY": 0.01}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(member_module, "FIRST_PAUSE", 0.1)
    started: list[Fleet] = []

    def start(code: str, **options: Any) -> Fleet:
        started.append(Fleet(code, tmp_path / "journal", **options))
        return started[-1]

    yield start
    for each in started:
        each.supervisor.stop()
        each.thread.join(20)


# It asks the database only whether it is there.
@pytest.mark.sqlite
@pytest.mark.subprocess
class TestSupervisor:
    def test_a_child_that_ends_by_itself_is_replaced_ever_later_and_told_once(
        self, fleet: Start, monkeypatch: Any, caplog: Any
    ) -> None:
        """A child is killed, and its parent shuts down with exit code 0. Source: Bogdanp/dramatiq#376."""
        monkeypatch.setattr(member_module, "MAX_PAUSE", 0.4)
        caplog.set_level(logging.INFO, logger="django_jobs.supervisor")
        process = fleet("os._exit(1)")
        starts = process.has_started(5)
        gaps = [later - earlier for earlier, later in itertools.pairwise(starts)]
        # Each pause is at least so long; starting takes its time as well.
        for gap, pause in zip(gaps, [0.1, 0.2, 0.4, 0.4], strict=False):
            assert gap >= pause
        # Or the last one might count as one that was told to end.
        wait_for(lambda: process.supervisor._members[0].failures >= 5, 10, "the fifth end was seen")
        assert process.stop() == DONE
        told = [record.getMessage() for record in caplog.records if "ended with exit code 1" in record.getMessage()]
        assert len(told) == 1
        assert "it is replaced in 0.1 s" in told[0]

    def test_a_child_that_was_killed_is_replaced_and_the_others_are_left_alone(self, fleet: Start) -> None:
        code = f"number == 1 and len(open(sys.argv[1]).read().split('1 start')) == 2 and time.sleep(0.5)\n{UNTIL_TOLD}"
        process = fleet(code, processes=2)
        process.has_started(1, number=1)
        process.has_started(1, number=2)
        process.supervisor._members[0].process.kill()  # type: ignore[union-attr]
        process.has_started(2, number=1)
        assert len(process.lines("start", 2)) == 1
        assert process.stop() == DONE

    def test_a_child_that_asks_for_it_is_replaced_at_once_however_often(self, fleet: Start, caplog: Any) -> None:
        process = fleet(f"len(open(sys.argv[1]).readlines()) < 6 and os._exit({RECYCLED})\n{UNTIL_TOLD}")
        starts = process.has_started(6)
        assert starts[-1] - starts[0] < 5 * (member_module.FIRST_PAUSE + 1.0)
        assert process.supervisor._members[0].failures == 0
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]

    def test_a_long_life_lets_the_ends_before_it_be_forgotten(self, fleet: Start, monkeypatch: Any) -> None:
        monkeypatch.setattr(module, "WELL_AFTER", 0.5)
        process = fleet(f"len(open(sys.argv[1]).readlines()) < 3 and os._exit(1)\n{UNTIL_TOLD}")
        (member,) = process.supervisor._members
        process.has_started(2)
        assert member.failures > 0
        process.has_started(3)
        wait_for(lambda: member.failures == 0, 10, "it is forgiven")

    @pytest.mark.parametrize("code", [USAGE, NO_DATABASE])
    def test_when_no_child_has_what_it_needs_to_start_it_ends_as_they_did(self, fleet: Start, code: int) -> None:
        """If the database cannot be reached the parent waits for ever and nothing works. Source: django-q2#201."""
        # The second one needs longer to find out.
        process = fleet(f"number == 2 and time.sleep(0.5)\nos._exit({code})", processes=2)
        process.thread.join(10)
        assert process.codes == [code]
        assert len(process.lines("start")) == 2

    def test_one_child_that_can_work_keeps_it_going(self, fleet: Start, monkeypatch: Any) -> None:
        monkeypatch.setattr(module, "PAUSE_OF_REFUSED", 0.1)
        process = fleet(f"number == 1 and os._exit({USAGE})\n{UNTIL_TOLD}", processes=2)
        process.has_started(3, number=1)
        assert process.codes == []
        assert len(process.lines("start", 2)) == 1

    def test_a_child_that_can_work_after_all_does_not_count_as_refused(self, fleet: Start, monkeypatch: Any) -> None:
        monkeypatch.setattr(module, "PAUSE_OF_REFUSED", 0.1)
        first = "number == 1 and len(open(sys.argv[1]).read().split('1 start')) == 2"
        process = fleet(f"{first} and os._exit({USAGE})\n{UNTIL_TOLD}", processes=2)
        process.has_started(2, number=1)
        assert process.supervisor._members[0].refusal is None

    def test_all_children_are_told_at_the_same_time(self, fleet: Start) -> None:
        process = fleet(UNTIL_TOLD, processes=3)
        process.has_started(3)
        assert process.stop() == DONE
        assert process.supervisor._health.ready().status == "draining"
        told = process.lines("told")
        assert len(told) == 3
        assert max(told) - min(told) < 1

    def test_a_child_that_has_not_come_so_far_as_to_take_signals_ends_at_once(self, fleet: Start) -> None:
        """And without the traceback of a SIGINT, which a terminal sends to all of them."""
        process = fleet(
            """
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            note("held" if signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []) else "open")
            time.sleep(60)
            """
        )
        wait_for(lambda: process.lines("held"), 10, "it is there")
        assert process.stop() == DONE

    def test_a_child_that_does_not_end_in_time_is_killed_and_makes_it_a_failure(
        self, fleet: Start, caplog: Any
    ) -> None:
        process = fleet("signal.signal(signal.SIGTERM, signal.SIG_IGN); note('deaf'); time.sleep(60)")
        wait_for(lambda: process.lines("deaf"), 10, "it is there")
        began = time.monotonic()
        assert process.stop() == FAILED
        assert time.monotonic() - began >= 1
        assert "did not end in time" in caplog.text

    @pytest.mark.parametrize(("end", "code"), [(1, FAILED), (RECYCLED, DONE)])
    def test_a_child_that_fails_while_it_ends_makes_it_a_failure(self, fleet: Start, end: int, code: int) -> None:
        process = fleet(
            f"signal.signal(signal.SIGTERM, lambda *args: os._exit({end})); note('ending'); time.sleep(60)", processes=2
        )
        wait_for(lambda: len(process.lines("ending")) == 2, 10, "both are there")
        assert process.stop() == code

    def test_a_child_that_shows_life_no_more_is_killed_and_replaced(
        self, fleet: Start, monkeypatch: Any, caplog: Any, settings: Any
    ) -> None:
        monkeypatch.setattr(module, "LEAST_PATIENCE", 2.0)
        settings.DJANGO_JOBS = {**settings.DJANGO_JOBS, "HEARTBEAT_INTERVAL": 0.5, "WORKER_LOST_AFTER": 1}
        process = fleet(
            """
            os.write(0, b".")
            if number == 1 and len(open(sys.argv[1]).read().split("1 start")) == 2:
                os.kill(os.getpid(), signal.SIGSTOP)
            while True:
                os.write(0, b".")
                time.sleep(0.05)
            """,
            processes=2,
        )
        process.has_started(2, number=1)
        assert len(process.lines("start", 2)) == 1
        assert "shows no sign of life and is killed" in caplog.text
        assert "was killed by SIGKILL; it is replaced in 0.1 s" in caplog.text
        assert process.stop() == DONE

    def test_a_child_that_does_not_die_at_once_is_killed_and_told_of_once(self) -> None:
        supervisor, signals = Supervisor(Options.of(roles=["worker"], processes=1)), list[int]()
        (member,) = supervisor._members
        member.process = SimpleNamespace(send_signal=signals.append, pid=1, poll=lambda: None)  # type: ignore[assignment]
        member.line = SimpleNamespace(silence=lambda now: 100.0, close=lambda: None)  # type: ignore[assignment]
        for now in (0.0, 0.2):
            supervisor._look(member, now)
        assert signals == [signal.SIGKILL]

    def test_the_report_of_a_child_ends_with_it(self, fleet: Start) -> None:
        process = fleet(f"len(open(sys.argv[1]).readlines()) == 1 and os.write(0, b'well\\n')\n{UNTIL_TOLD}")
        reports = process.supervisor._reports
        wait_for(lambda: list(reports().values()) == [b"well"], 10, "it has reported")
        process.supervisor._members[0].process.kill()  # type: ignore[union-attr]
        process.has_started(2)
        assert list(reports().values()) == [b""]

    def test_without_a_database_it_starts_nobody(self, transactional_db: None, monkeypatch: Any) -> None:
        monkeypatch.setattr(module, "check_tables", Mock(side_effect=OperationalError("no such table")))
        monkeypatch.setattr(Supervisor, "_start", Mock(side_effect=AssertionError))
        with pytest.raises(DatabaseNotReady):
            in_thread(Supervisor(Options.of(roles=["worker"], processes=1)).run)

    def test_it_has_no_connection_while_they_run(self, fleet: Start, monkeypatch: Any) -> None:
        monkeypatch.setattr(module, "welcome", lambda options, using: [str(connections[using].connection)])
        process = fleet(UNTIL_TOLD)
        process.has_started(1)
        assert process.said[0] == "None"

    def test_a_child_that_takes_long_to_end_is_heard_until_then(
        self, fleet: Start, monkeypatch: Any, settings: Any
    ) -> None:
        monkeypatch.setattr("django_jobs.runtime.reports.STALE_AFTER", 0.5)
        settings.DJANGO_JOBS = {**settings.DJANGO_JOBS, "DRAIN_TIMEOUT": 30}
        process = fleet(
            """
            signal.signal(signal.SIGTERM, lambda *args: note("told"))
            well = {"status": "ok", "problems": []}
            while number == 1 or not open(sys.argv[1]).read().count("told"):
                os.write(0, json.dumps({"at": time.monotonic(), "alive": well, "ready": well}).encode() + b"\\n")
                time.sleep(0.05)
            """,
            processes=2,
        )
        health, (going, _gone) = process.supervisor._health, process.supervisor._members
        wait_for(lambda: health.ready().is_good, 10, "both have reported")
        process.supervisor.stop()
        wait_for(lambda: process.lines("told"), 10, "they are told")
        told = time.monotonic()
        while time.monotonic() - told < 1:
            assert health.alive().is_good, health.alive()
            time.sleep(0.02)
        going.process.kill()  # type: ignore[union-attr]
        process.thread.join(10)
        assert process.codes == [FAILED]

    def test_told_to_end_while_it_starts_them_it_starts_no_more(self, fleet: Start, monkeypatch: Any) -> None:
        started = Supervisor._start

        def start(supervisor: Supervisor, member: Any) -> None:
            started(supervisor, member)
            supervisor.stop()

        monkeypatch.setattr(Supervisor, "_start", start)
        process = fleet(UNTIL_TOLD, processes=3)
        process.thread.join(10)
        assert process.codes == [DONE]
        assert [member.process is not None for member in process.supervisor._members] == [True, False, False]

    def test_the_time_ends_it(self, fleet: Start) -> None:
        process = fleet(UNTIL_TOLD, max_time=1.0)
        process.thread.join(10)
        assert process.codes == [DONE]

    def test_a_child_that_cannot_be_started_is_tried_again(self, fleet: Start, monkeypatch: Any, caplog: Any) -> None:
        Popen, refused = module.subprocess.Popen, threading.Event()

        def refuse(*args: Any, **options: Any) -> Any:
            if refused.is_set():
                return Popen(*args, **options)
            refused.set()
            raise BlockingIOError(11, "Resource temporarily unavailable")

        monkeypatch.setattr(module.subprocess, "Popen", refuse)
        process = fleet(UNTIL_TOLD)
        process.has_started(1)
        assert "process 1 (worker) could not be started: [Errno 11]" in caplog.text

    def test_a_fault_of_its_own_leaves_no_child_behind(self, fleet: Start, monkeypatch: Any) -> None:
        process = fleet(UNTIL_TOLD)
        process.has_started(1)
        child = process.supervisor._members[0].process
        assert child is not None
        monkeypatch.setattr(Supervisor, "_look", lambda *args: 1 / 0)
        monkeypatch.setattr(threading, "excepthook", lambda args: None)
        assert child.wait(10) == -signal.SIGKILL

    def test_it_says_once_what_all_of_them_do(self, fleet: Start) -> None:
        process = fleet(UNTIL_TOLD, roles=[], processes=2, concurrency=3)
        process.has_started(3)
        text = "\n".join(process.said)
        assert text.count("slots: 2 times 3") == 1
        assert text.count("processes: worker pid ") == 1
        assert "; scheduler and sweep pid " in text


class TestChildren:
    def test_one_child_has_the_roles_that_no_handler_is_to_hold_up(self) -> None:
        assert [child.roles for child in children_of(Options.of(processes=2))] == [
            ("worker",),
            ("worker",),
            ("scheduler", "sweep"),
        ]

    def test_roles_that_were_not_asked_for_are_nobodys(self) -> None:
        children = children_of(Options.of(roles=["worker", "sweep"], processes=1))
        assert [child.roles for child in children] == [("worker",), ("sweep",)]
        assert [child.roles for child in children_of(Options.of(roles=["worker"], processes=1))] == [("worker",)]

    def test_a_child_learns_what_it_is_and_what_it_starts_is_none(self, monkeypatch: Any) -> None:
        child = Child(number=2, roles=("scheduler", "sweep"))
        monkeypatch.setenv(ENVIRONMENT, child.environment()[ENVIRONMENT])
        assert Child.of_environment() == child
        assert Child.of_environment() is None

    def test_a_child_has_its_roles_and_no_time_of_its_own(self) -> None:
        whole = Options.of(
            processes=2, max_time=5.0, concurrency=3, queues=["a"], heartbeat_file=Path("beat"), max_jobs=1_000_000
        )
        own = Child(number=1, roles=("worker",)).narrow(whole)
        assert (own.roles, own.processes, own.max_time, own.heartbeat_file) == (("worker",), None, None, None)
        assert (own.limits.max_jobs or 0) < 1_000_000
        assert (own.concurrency, own.served) == (3, whole.served)

    def test_the_end_of_a_process_is_told_in_words(self) -> None:
        assert ended(1) == "ended with exit code 1"
        assert ended(-9) == "was killed by SIGKILL"
        assert ended(-200) == "was killed by signal 200"


class TestLimits:
    def test_limits_of_children_are_up_to_a_tenth_lower(self) -> None:
        limits = Limits(max_jobs=1000, max_memory=500.0)
        lowered = [limits.lowered() for _ in range(50)]
        assert len({each.max_jobs for each in lowered}) > 10
        assert all(900 <= (each.max_jobs or 0) <= 1000 for each in lowered)
        assert all(450 <= (each.max_memory or 0) <= 500 for each in lowered)
        assert Limits(max_jobs=1).lowered().max_jobs == 1
        assert Limits().lowered() == Limits()

    def test_memory_is_looked_at_after_runs_only(self, monkeypatch: Any) -> None:
        class Ran:
            claimed = 0

            def running(self) -> dict[str, str]:
                return {"a": "run"}

        worker, reasons = Ran(), list[str]()
        monkeypatch.setattr("django_jobs.runtime.limits.memory_in_use", lambda: 200 * MEGABYTE)
        limit = MemoryLimit(150.0, worker, on_limit=reasons.append)  # type: ignore[arg-type]
        worker.claimed = 1
        limit.tick()
        assert reasons == []
        worker.claimed = 2
        limit.tick()
        assert reasons == ["200 MB of memory are in use, more than 150 MB"]

    def test_memory_below_the_limit_ends_nothing(self, monkeypatch: Any) -> None:
        class Ran:
            claimed = 5

            def running(self) -> dict[str, str]:
                return {}

        reasons = list[str]()
        monkeypatch.setattr("django_jobs.runtime.limits.memory_in_use", lambda: 100 * MEGABYTE)
        MemoryLimit(150.0, Ran(), on_limit=reasons.append).tick()  # type: ignore[arg-type]
        assert reasons == []
