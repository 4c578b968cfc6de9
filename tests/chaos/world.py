"""A chaos run from its first process to its last: workers, producers, somebody who cancels, and a monkey.

One thread does it all, pass by pass: children die with the thread that started them.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from django.db import Error, connection

from django_jobs import clock, registry
from django_jobs.models import JobExecution, Worker
from tests.acc import jobs
from tests.acc.models import Thing
from tests.chaos import history, journal, plan
from tests.chaos.hint_server import HintServer
from tests.chaos.judgement import Death, Evidence, Left
from tests.engines import PostgresServer, die_with_parent
from tests.support import ROOT, Ledger, wait_for

RUNJOBS = ["-m", "django", "runjobs", "--concurrency", "6"]
WORKERS = ("worker-0", "worker-1")
PRODUCERS = ("producer-0", "producer-1")
MEDDLER = "meddler"
# Until one more row ends when all is quiet: the last one may be a dead worker's, or kill its worker thrice.
PATIENCE = 60.0
# A drain, an interrupt, the write of the rest, goodbye.
TO_END = 15.0
NEVER = "0 0 29 2 *"


@dataclass(slots=True)
class Member:
    """A process that is started again whenever it ends."""

    name: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    told: set[int] = field(default_factory=set)
    starts: int = 0

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None


class World:
    """All processes of a run; a file for what each of them printed, and what was done to whom in `log`."""

    def __init__(
        self,
        *,
        seed: int,
        home: Path,
        server: PostgresServer | None,
        redis: HintServer | None = None,
        processes: int = 0,
    ) -> None:
        self.seed, self.home, self.server, self.redis, self.processes = seed, home, server, redis, processes
        self.log: list[str] = []
        self.counts: Counter[str] = Counter()
        self.deaths: list[Death] = []
        self.canaries: dict[str, str] = {}
        self.left: tuple[Left, ...] = ()
        self._members: dict[str, Member] = {}
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._began = time.monotonic()
        self._is_server_up = True
        # Children of workers.
        self._frozen: set[int] = set()

    def run(self, seconds: float) -> None:
        """Let it all happen, and put it in order again."""
        history.install()
        for name in WORKERS:
            self._add(name, [*RUNJOBS, *(["--processes", str(self.processes)] if self.processes else [])])
        for name in (*PRODUCERS, MEDDLER):
            self._add(name, ["-m", "tests.chaos.actors", name])
        # A connection of this process would hold up a fast shutdown of the server no longer than a worker's does.
        connection.close()
        blows = plan.blows(
            self.seed,
            workers=len(WORKERS),
            producers=len(PRODUCERS),
            has_server=self.server is not None,
            can_sever=connection.vendor != "sqlite",
            has_children=self.processes > 0,
        )
        end = time.monotonic() + seconds
        # The first seconds are for starting.
        self._pass(until=min(time.monotonic() + 3, end))
        if self.redis is not None:
            self._plague(self.redis, plan.blows_to_redis(self.seed))
        while time.monotonic() < end:
            blow = next(blows)
            # Three times as many processes take longer to start, and are to come to some work before the next blow.
            pause = blow.pause * (3 if self.processes else 1)
            self._pass(until=min(time.monotonic() + pause, end))
            self._strike(blow)
        self._settle()

    def _add(self, name: str, command: list[str], **environment: str) -> Member:
        member = self._members[name] = Member(name, command, environment)
        self._start(member)
        return member

    def _start(self, member: Member) -> None:
        command = list(member.command)
        if "tests.chaos.actors" in command:
            # Each life has decisions of its own.
            command[-1:] = [f"{member.name}-{member.starts}", str(self.seed)]
        member.starts += 1
        member.told.clear()
        with (self.home / f"{member.name}.log").open("ab") as output:
            output.write(f"--- {self._now():.2f} s: start {member.starts}\n".encode())
            output.flush()
            member.process = subprocess.Popen(
                [sys.executable, *command],
                cwd=ROOT,
                env={**os.environ, **member.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        self._note(f"started {member.name}, pid {member.process.pid}")

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _note(self, text: str) -> None:
        self.log.append(f"{self._now():7.2f} s  {time.time():.3f}  {text}")
        with (self.home / "actions").open("a") as file:
            file.write(f"{self.log[-1]}\n")

    def _pass(self, *, until: float) -> None:
        """Do what is due and start again who died, until then."""
        while True:
            while self._due and self._due[0][0] <= time.monotonic():
                heapq.heappop(self._due)[2]()
            for member in self._members.values():
                self._bury(member, again=True)
            if time.monotonic() >= until:
                return
            time.sleep(0.05)

    def _bury(self, member: Member, *, again: bool) -> None:
        if member.process is None or member.is_alive:
            return
        code = member.process.returncode
        self._note(f"{member.name}, pid {member.process.pid}, ended with {code}")
        self.counts[f"ends of {member.name.partition('-')[0]}s"] += 1
        self.deaths.append(Death(name=member.name, code=code, told=frozenset(member.told)))
        member.process = None
        if again:
            self._start(member)

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._number), action))

    def _strike(self, blow: plan.Blow) -> None:
        what = f"{blow.kind} {blow.target} for {blow.length:.1f} s" if blow.length else f"{blow.kind} {blow.target}"
        worker = self._members[WORKERS[blow.target % len(WORKERS)]]
        match blow.kind:
            case "kill":
                self._signal(worker, signal.SIGKILL)
            case "term":
                self._signal(worker, signal.SIGTERM)
            case "freeze" | "long freeze" | "freeze meddler":
                frozen = self._members[MEDDLER] if blow.kind == "freeze meddler" else worker
                process = frozen.process
                self._signal(frozen, signal.SIGSTOP)
                self._after(blow.length, lambda: self._thaw(frozen, process))
            case "kill child" | "freeze child":
                what += f": {self._strike_child(worker, blow)}"
            case "kill producer":
                self._signal(self._members[PRODUCERS[blow.target]], signal.SIGKILL)
            case "sever":
                what += f": {self._sever()} connections"
            case "restart" | "crash":
                if not self._is_server_up:
                    what += ": it is down already"
                else:
                    self._stop_server(signal.SIGINT if blow.kind == "restart" else signal.SIGQUIT)
                    self._after(blow.length, self._start_server)
        self._note(what)
        self.counts[blow.kind] += 1

    def _plague(self, redis: HintServer, blows: Iterator[plan.Blow]) -> None:
        """Strike it, mend it, and so on, for as long as anything is due."""
        blow = next(blows)

        def strike() -> None:
            self._note(f"{blow.kind} for {blow.length:.1f} s" if blow.length else blow.kind)
            self.counts[blow.kind] += 1
            redis.strike(blow.kind)
            self._after(blow.length, mend)

        def mend() -> None:
            self._mend(redis)
            self._plague(redis, blows)

        self._after(blow.pause, strike)

    def _mend(self, redis: HintServer) -> None:
        if redis.is_away:
            redis.mend()
            self._note("redis is back")

    def _strike_child(self, member: Member, blow: plan.Blow) -> str:
        """Kill or freeze one of the children of a worker; return which."""
        if member.process is None or not (pids := children_of(member.process.pid)):
            return "it has none"
        pid = pids[int(blow.pause * 1000) % len(pids)]
        # It may have ended meanwhile.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL if blow.kind == "kill child" else signal.SIGSTOP)
        if blow.kind == "freeze child":
            self._after(blow.length, lambda: self._thaw_child(pid))
            self._frozen.add(pid)
        return f"pid {pid}"

    def _thaw_child(self, pid: int) -> None:
        self._frozen.discard(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def _signal(self, member: Member, number: signal.Signals) -> None:
        if member.process is None or not member.is_alive:
            return
        member.told.add(number)
        member.process.send_signal(number)

    def _thaw(self, member: Member, process: subprocess.Popen[bytes] | None) -> None:
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGCONT)
            self._note(f"thawed {member.name}, pid {process.pid}")

    def _sever(self) -> int:
        """Cut every second connection to the database but ours."""
        if not self._is_server_up:
            return 0
        try:
            with connection.cursor() as cursor:
                if connection.vendor == "postgresql":
                    cursor.execute(
                        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
                        "AND backend_type = 'client backend' AND pid % 2 = 0"
                    )
                    return int(cursor.fetchone()[0])
                cursor.execute(
                    "SELECT id FROM information_schema.processlist WHERE db = DATABASE() AND id <> CONNECTION_ID() "
                    "AND id % 2 = 0"
                )
                ids = [row[0] for row in cursor.fetchall()]
                for number in ids:
                    # It may have ended by itself meanwhile.
                    with contextlib.suppress(Error):
                        cursor.execute(f"KILL CONNECTION {int(number)}")
                return len(ids)
        finally:
            connection.close()

    def _stop_server(self, number: int) -> None:
        if self.server is not None:
            self.server.stop(number)
            self._is_server_up = False

    def _start_server(self) -> None:
        if self.server is not None:
            self.server.start()
            self._is_server_up = True
            self._note("the server is back")

    def _settle(self) -> None:
        """End everybody in order, let one quiet worker do what is left, and send canaries."""
        self._note("quiet from here")
        if not self._is_server_up:
            self._start_server()
        if self.redis is not None and not self.redis.is_away:
            # To end takes none of its answers.
            self.redis.strike("hang redis")
        self._due.clear()
        for pid in list(self._frozen):
            self._thaw_child(pid)
        for member in self._members.values():
            if member.process is not None:
                self._thaw(member, member.process)
            self._signal(member, signal.SIGTERM)
        for member in self._members.values():
            self._end(member)
        if self.redis is not None:
            self._mend(self.redis)
        self._members.clear()
        # A tick each second would leave it never quiet.
        quiet = self._add("quiet", RUNJOBS, ACC_CRON=NEVER)
        self._drain()
        self._note("drained")
        self.left = self._what_is_left()
        self._sing()
        self._signal(quiet, signal.SIGTERM)
        self._end(quiet)

    def _end(self, member: Member) -> None:
        if member.process is None:
            return
        try:
            member.process.wait(TO_END)
        except subprocess.TimeoutExpired:
            member.told.clear()
            member.process.kill()
            member.process.wait()
            self._note(f"{member.name} did not end within {TO_END:g} s")
            self.deaths.append(Death(name=f"{member.name}, which did not stop in time,", code=0, told=frozenset()))
        self._bury(member, again=False)

    def _drain(self) -> None:
        """Wait until nothing is left to do, for as long as it becomes less: a slow machine leaves much."""
        fewest, until = self._count_left(), time.monotonic() + PATIENCE
        while fewest and time.monotonic() < until:
            time.sleep(0.05)
            if (left := self._count_left()) < fewest:
                fewest, until = left, time.monotonic() + PATIENCE

    def _count_left(self) -> int:
        # Some jobs kill even the quiet one.
        self._pass(until=0)
        return JobExecution.objects.live().count()

    def _what_is_left(self) -> tuple[Left, ...]:
        fresh = Worker.objects.fresh(clock.now("default"))
        owners = set(fresh.values_list("pk", flat=True))
        rows = JobExecution.objects.live().only("job_name", "status", "worker_id")
        return tuple(
            Left(row_id=str(row.pk), job_name=row.job_name, status=row.status, is_owned=row.worker_id in owners)
            for row in rows
        )

    def _sing(self) -> None:
        sent = {}
        for job in (jobs.mark, jobs.mark_retry, jobs.async_mark, jobs.slow_retry):
            sent[job.name] = job.push(tag="canary").pk
        sent[jobs.atomic_thing.name] = jobs.atomic_thing.push(name="canary", tag="canary").pk

        def came_to() -> dict[str, str]:
            statuses = dict(JobExecution.objects.filter(pk__in=sent.values()).values_list("pk", "status"))
            self.canaries = {name: str(statuses.get(pk, "gone")) for name, pk in sent.items()}
            return self.canaries

        with contextlib.suppress(AssertionError):
            wait_for(lambda: set(came_to().values()) == {"ok"}, 15, "the canaries are ok")

    def evidence(self) -> Evidence:
        """Return what is known; canaries are no part of the story."""
        changes = history.read()
        ledger = Ledger(self.home / "ledger").entries()
        canaries = {entry.row_id for entry in ledger if entry.tag == "canary"}
        return Evidence(
            journal=journal.read(self.home / "journal"),
            history=tuple(change for change in changes if change.row_id not in canaries),
            ledger=tuple(entry for entry in ledger if entry.row_id not in canaries),
            things=Counter(Thing.objects.values_list("name", flat=True)),
            left=self.left,
            deaths=tuple(self.deaths),
            retrying=frozenset(job.name for job in registry.all_jobs() if job.has_retry),
            canaries=self.canaries,
        )

    def close(self) -> None:
        """End whatever still runs."""
        for member in self._members.values():
            if member.process is not None and member.is_alive:
                os.killpg(member.process.pid, signal.SIGKILL)
                member.process.wait()


def children_of(pid: int) -> list[int]:
    """Return the processes that this one has started and that have not ended."""
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    return [int(line) for line in found.stdout.split()]
