"""The parent of `runjobs --processes`: starts children, replaces those that end, and stops them all when asked."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from django.db import Error, connections

from django_jobs.conf import get_settings
from django_jobs.execution.engine import AFTER_DRAIN
from django_jobs.models import jobs_alias
from django_jobs.pooling import bypass_pool
from django_jobs.runtime.child import Child
from django_jobs.runtime.exits import DONE, FAILED, LINGER, NO_DATABASE, RECYCLED, USAGE, ended, ended_by
from django_jobs.runtime.health_port import health_port
from django_jobs.runtime.heartbeat_file import heartbeat_file
from django_jobs.runtime.lifeline import Lifeline
from django_jobs.runtime.member import Member
from django_jobs.runtime.options import Options
from django_jobs.runtime.reports import Reports
from django_jobs.runtime.startup import (
    DatabaseNotReady,
    check_pools,
    check_tables,
    failure,
    refuse_transaction,
    wait_for_database,
)
from django_jobs.runtime.stopping import SIGNALS, StopNow, StopRequest, StopRequests
from django_jobs.runtime.welcome import welcome

logger = logging.getLogger("django_jobs.supervisor")

LOOK_EVERY = 0.2
# Seconds after which a child counts as well, and earlier failures are forgotten.
WELL_AFTER = 30.0
# Seconds; long enough to see whether the other children are refused as well.
PAUSE_OF_REFUSED = 5.0
# Seconds. A child on a busy processor may be late, however short WORKER_LOST_AFTER is.
LEAST_PATIENCE = 5.0
REFUSED = frozenset({USAGE, NO_DATABASE})
# Exit codes of a child that was told to end, by its supervisor or by a signal that both of them got.
ORDERLY = frozenset({DONE, RECYCLED, *(-number for number in SIGNALS), *(128 + number for number in SIGNALS)})


class Supervisor:
    """Keeps one process alive for each child; knows nothing of jobs, and holds no connection while they run."""

    def __init__(
        self,
        options: Options,
        *,
        say: Callable[[str], None] = lambda line: None,
        command: Sequence[str] = (),
    ) -> None:
        self._options = options
        self._say = say
        self._command = [*command] or [sys.executable, *sys.orig_argv[1:]]
        self._members = [Member(child) for child in children_of(options)]
        self._requests = StopRequests(insisted=self._kill)
        self._health = Reports(self._reports)

    def run(self) -> int:
        """Run until asked to stop; return the exit code. Raises DatabaseNotReady, UsageError inside a transaction."""
        started = time.monotonic()
        with self._requests.signals(), contextlib.ExitStack() as stack:
            try:
                stack.enter_context(health_port(self._health, self._options.health_port))
                stack.enter_context(heartbeat_file(self._health, self._options.heartbeat_file))
                self._prepare()
                self._requests.is_starting = False
            except (StopNow, DatabaseNotReady):
                if self._requests.wait(0) is None:
                    raise
                return DONE
            try:
                return self._end(self._supervise(started))
            finally:
                # Even if something broke here: nobody else would end them.
                for member in self._members:
                    if member.process is not None:
                        member.process.kill()
                        member.process.wait()
                    member.hang_up()

    def stop(self, reason: str = "stopped") -> None:
        """Have run() end in order; safe from any thread."""
        self._requests.put(StopRequest(reason=reason))

    def _reports(self) -> dict[str, bytes | None]:
        # Called from other threads: only the supervising one listens.
        lines = [(member.child, member.line) for member in self._members]
        return {str(child): None if line is None else line.report for child, line in lines}

    def _prepare(self) -> None:
        """Find the database before any child looks for it, and say once what the children will do."""
        using = jobs_alias()
        refuse_transaction(using)
        check_pools()
        bypass_pool()
        wait_for_database(using, self._say)
        try:
            check_tables(using)
        except Error as error:
            raise failure(using, error) from error
        finally:
            connections.close_all()
        for line in welcome(self._options, using):
            self._say(line)

    def _supervise(self, started: float) -> StopRequest | int:
        """Keep the children alive; return the request to end, or the exit code when none of them can work."""
        for member in self._members:
            # With many of them, a request to stop may come in the meantime.
            if self._requests.wait(0) is not None:
                break
            self._start(member)
        self._say(f"processes: {'; '.join(_places(self._members))}")
        limit = self._options.max_time
        while (request := self._requests.wait(LOOK_EVERY)) is None:
            now = time.monotonic()
            if limit is not None and now - started >= limit:
                return StopRequest(reason=f"--max-time of {limit:g} s is over")
            for member in self._members:
                self._look(member, now)
            refusals = [member.refusal for member in self._members if member.refusal is not None]
            if len(refusals) == len(self._members):
                logger.error("no process can work, see the reasons above")
                return refusals[-1]
        return request

    def _look(self, member: Member, now: float) -> None:
        """Replace a process that has ended, once its pause is over."""
        if member.process is not None:
            code = member.process.poll()
            if code is None:
                self._listen(member, now)
                if member.failures and now - member.started_at >= WELL_AFTER:
                    member.forgive()
                return
            self._bury(member, code, now)
        if now >= member.due_at:
            self._start(member)
            if member.process is not None:
                logger.info("%s was started", member)

    def _listen(self, member: Member, now: float) -> None:
        """Kill a process that is stopped or hangs as a whole: it does not beat either, and others take its rows."""
        patience = max(get_settings().worker_lost_after, LEAST_PATIENCE)
        if member.line is None or member.line.silence(now) <= patience:
            return
        logger.critical("%s shows no sign of life and is killed; its rows will be rescued", member)
        self._signal(member, signal.SIGKILL)
        # Kill it once: a process that the kernel holds up ends later.
        member.hang_up()

    def _bury(self, member: Member, code: int, now: float) -> None:
        """Record the end of a process, and decide when its place is filled again."""
        if code == RECYCLED:
            member.forgive()
            pause = 0.0
            logger.info("%s is replaced, as it requested", member)
        else:
            pause = member.fail()
            if code in REFUSED:
                member.refusal, pause = code, max(pause, PAUSE_OF_REFUSED)
            if code not in member.logged:
                member.logged.add(code)
                logger.warning("%s %s; it is replaced in %g s", member, ended(code), pause)
        member.due_at = now + pause
        member.process = None
        member.hang_up()

    def _start(self, member: Member) -> None:
        member.started_at, member.refusal = time.monotonic(), None
        try:
            member.line = Lifeline()
            with without_interrupts():
                # Not a fork, so that no connection, thread or lock of this process gets into a child.
                member.process = subprocess.Popen(  # noqa: S603 - this very command
                    self._command, env=member.child.environment(), stdin=member.line.child_end
                )
        except OSError as error:
            member.hang_up()
            member.due_at = member.started_at + member.fail()
            logger.warning("%s could not be started: %s", member.child, error)

    def _end(self, request: StopRequest | int) -> int:
        """Have all children end at the same time; return the exit code."""
        if isinstance(request, int):
            return request
        self._health.drain()
        # The exit code of a child that had ended before does not count.
        left = running = [member for member in self._members if self._goes_on(member)]
        for member in running:
            self._signal(member, signal.SIGTERM)
        deadline = time.monotonic() + get_settings().drain_timeout + AFTER_DRAIN + LINGER
        words = partial(logger.critical, "the end took too long")
        with ended_by(deadline + LINGER / 2, words, is_ours=self._requests.has_signals):
            # After the signals, as a reader of the log that hangs must hold up nobody else.
            logger.info("stopping: %s", request.reason)
            while (left := [member for member in left if self._goes_on(member)]) and time.monotonic() < deadline:
                time.sleep(0.02)
            for member in left:
                logger.critical("%s did not end in time and is killed; its rows will be rescued", member.child)
                self._signal(member, signal.SIGKILL)
            codes = {member.process.wait() for member in running if member.process is not None}
        return DONE if codes <= ORDERLY else FAILED

    def _goes_on(self, member: Member) -> bool:
        """Whether the process has not ended yet; hears its reports, which probes ask for until it has."""
        if not member.is_alive:
            member.hang_up()
        elif member.line is not None:
            member.line.hear()
        return member.is_alive

    def _signal(self, member: Member, number: int) -> None:
        if member.process is not None:
            member.process.send_signal(number)

    def _kill(self, number: int) -> None:
        """Kill all children and end this process at once, for a second signal."""
        for member in self._members:
            self._signal(member, signal.SIGKILL)
        os._exit(128 + number)


def children_of(options: Options) -> list[Child]:
    """Return the children: workers, and one for the other roles, so that no handler can block or crash them."""
    others = tuple(role for role in options.roles if role != "worker")
    children = [Child(number=number, roles=("worker",)) for number in range(1, (options.processes or 1) + 1)]
    return [*children, Child(number=len(children) + 1, roles=others)] if others else children


def _places(members: Sequence[Member]) -> Iterator[str]:
    """Yield a phrase for each set of roles, with the processes that have them."""
    for roles, group in itertools.groupby(members, lambda member: member.child.roles):
        pids = [str(member.process.pid) for member in group if member.process is not None]
        yield f"{' and '.join(roles)} pid {', '.join(pids)}"


@contextlib.contextmanager
def without_interrupts() -> Iterator[None]:
    """Block SIGINT; a child that is started in the block inherits this, and unblocks it once it has its handlers.

    Ctrl-C in a terminal reaches all processes at once, and a child that is still importing would print a traceback.
    SIGTERM, which the supervisor sends in any case, ends such a child silently.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
