"""One `runjobs` process: makes the worker, ticks and loops, runs them until told to stop, and ends in order."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial

from django.db import Error, connections

from django_jobs.conf import get_settings
from django_jobs.execution.engine import AFTER_DRAIN, GOODBYE
from django_jobs.execution.liveness import Liveness
from django_jobs.loop import MAX_BACKOFF, Loop, Tick, start_thread
from django_jobs.models import jobs_alias
from django_jobs.pooling import bypass_pool
from django_jobs.runtime.child import Child
from django_jobs.runtime.exits import DONE, FAILED, RECYCLED, ended_by, flush_streams
from django_jobs.runtime.forks import detach_forks
from django_jobs.runtime.garbage import rare_collections
from django_jobs.runtime.health import Health
from django_jobs.runtime.health_port import health_port
from django_jobs.runtime.heartbeat_file import heartbeat_file
from django_jobs.runtime.lifeline import hold_lifeline
from django_jobs.runtime.once import run_once
from django_jobs.runtime.options import Options
from django_jobs.runtime.parts import Parts, subscribed
from django_jobs.runtime.reports import reported
from django_jobs.runtime.startup import (
    PATIENCE,
    DatabaseNotReady,
    check_pools,
    check_tables,
    failure,
    refuse_transaction,
    wait_for_database,
)
from django_jobs.runtime.stopping import LOOK_EVERY, StopNow, StopRequest, StopRequests
from django_jobs.runtime.welcome import welcome
from django_jobs.runtime.worker import Worker
from django_jobs.text import one_line

logger = logging.getLogger("django_jobs.runner")


class Runner:
    """Runs the roles of one process; run() blocks, stop() may be called from any thread."""

    def __init__(
        self,
        options: Options,
        *,
        say: Callable[[str], None] = lambda line: None,
        child: Child | None = None,
        drain: float | None = None,
        after_drain: float = AFTER_DRAIN,
    ) -> None:
        """Take `drain` and `after_drain` in seconds, where there is less time than usual for the end."""
        self._options = options
        self._say = say
        self._child = child
        self._using = jobs_alias()
        # The signals of a terminal or of systemd reach a child twice: directly, and from its supervisor, which kills it
        # if somebody insists.
        self._requests = StopRequests() if child is None else StopRequests(insisted=lambda number: None)
        self._drain = get_settings().drain_timeout if drain is None else drain
        self._after_drain = after_drain
        self._health = Health()
        # Did `once` run until nothing was left to do?
        self.came_to_the_end = False
        self._liveness: Liveness | None = None
        self._worker: Worker | None = None
        self._loops: list[Loop] = []
        self._beating = threading.Lock()
        self._is_retired = False

    def stop(self, reason: str = "stopped", *, drain: float | None = None) -> None:
        """Have run() end in order, with at most `drain` seconds for running executions; returns at once."""
        if drain is not None:
            self._drain = min(self._drain, drain)
        self._requests.put(StopRequest(reason=reason))

    def counts(self) -> tuple[int, Mapping[str, int]]:
        """Return how many executions were started, and how many ended with which status."""
        return (0, {}) if self._worker is None else (self._worker.claimed, self._worker.ended)

    def run(self) -> int:
        """Run until asked to stop, or with `once` until nothing is left; return the exit code.

        Raises DatabaseNotReady when there is no database at the start, UsageError inside a transaction.
        """
        started = time.monotonic()
        with self._requests.signals(), contextlib.ExitStack() as stack:
            try:
                if self._child is not None:
                    hold_lifeline(stack.enter_context(reported(self._health)), self._on_orphaned)
                self._requests.let_in()
                self._tell_of_health(stack)
                parts = self._prepare()
                self._requests.is_starting = False
            except (StopNow, DatabaseNotReady):
                # A signal in the midst of a transaction surfaces as the error of its rollback.
                if self._requests.wait(0) is None:
                    raise
                self._retire("stopped while starting")
                return DONE
            if not self._options.once:
                stack.enter_context(rare_collections())
            return self._work(parts, None if self._options.max_time is None else started + self._options.max_time)

    def _tell_of_health(self, stack: contextlib.ExitStack) -> None:
        stack.enter_context(health_port(self._health, self._options.health_port))
        stack.enter_context(heartbeat_file(self._health, self._options.heartbeat_file))

    def _prepare(self) -> Parts:
        """Find the database and make the parts; a signal may end this at any point."""
        refuse_transaction(self._using)
        check_pools()
        if self._requests.has_signals:
            detach_forks()
            bypass_pool()
        wait_for_database(self._using, self._say, patience=min(PATIENCE, self._options.max_time or PATIENCE))
        parts = Parts.make(
            self._options,
            using=self._using,
            beat=self._beat,
            on_recycle=self._on_recycle,
            on_limit=self._on_limit,
            on_death=self._on_death,
        )
        self._liveness, self._worker = parts.liveness, parts.worker
        try:
            check_tables(self._using)
            parts.liveness.register()
            # Before it claims, the worker has to know what is paused.
            parts.stage.tick()
        except Error as error:
            raise failure(self._using, error) from error
        for line in welcome(self._options, self._using):
            self._say(line)
        return parts

    def _work(self, parts: Parts, end: float | None) -> int:
        self._loop("beat", self._beat)
        if parts.memory is not None:
            self._loop("memory", parts.memory.tick)
        with subscribed(parts.worker, self._options) as subscription:
            self._health.listen(subscription)
            if self._options.once:
                request = self._run_once(parts, end)
            else:
                for name, tick in parts.ticks().items():
                    self._loop(name, tick)
                if parts.worker is not None:
                    parts.worker.start()
                    self._health.watch(*parts.worker.loops)
                self._close_connections()
                left = None if end is None else end - time.monotonic()
                request = self._requests.wait(left) or self._time_is_over()
            if parts.worker is not None:
                # Before a line says so: what is pushed after it does not start here.
                parts.worker.stop_claiming()
            if request.is_patient and parts.worker is not None:
                request = self._let_end(parts.worker, request, end)
            return self._end(parts.worker, request)

    def _loop(self, name: str, tick: Tick) -> None:
        # After an outage, every process beats before any has looked three times for dead ones, an interval apart.
        max_backoff = min(MAX_BACKOFF, get_settings().heartbeat_interval)
        loop = Loop(tick, name=name, max_backoff=max_backoff, on_death=partial(self._on_death, f"the {name} thread"))
        self._loops.append(loop)
        loop.start()
        self._health.watch(loop)

    def _run_once(self, parts: Parts, end: float | None) -> StopRequest:
        def over(seconds: float) -> bool:
            return self._requests.wait(seconds) is not None or (end is not None and time.monotonic() > end)

        try:
            if run_once(parts, over):
                self.came_to_the_end = True
                return StopRequest(reason="nothing left to do")
            return self._requests.wait(0) or self._time_is_over()
        except Error as error:
            return StopRequest(reason=f"the database failed: {one_line(error)}", is_failure=True)
        except Exception:
            logger.exception("runjobs failed")
            return StopRequest(reason="an error", is_failure=True)

    def _time_is_over(self) -> StopRequest:
        return StopRequest(reason=f"--max-time of {self._options.max_time:g} s is over")

    def _let_end(self, worker: Worker, request: StopRequest, end: float | None) -> StopRequest:
        """Start nothing new and wait for running executions; return the request, or a later one that is less patient.

        The end of `--max-time`, at the monotonic time `end`, is such a one.
        """
        self._health.drain()
        logger.info("taking no more: %s; waiting for %d running to end", request.reason, len(worker.running()))
        over = worker.drain(LOOK_EVERY)
        while not over:
            if (later := self._requests.overrides(LOOK_EVERY)) is not None:
                return later
            if end is not None and time.monotonic() > end:
                return self._time_is_over()
            over = worker.drain(0)
        return request

    def _end(self, worker: Worker | None, request: StopRequest) -> int:
        """Stop claiming, let runs end, hand back the rest, close the worker's row; return the exit code."""
        self._health.drain()
        deadline = time.monotonic() + self._drain + self._after_drain
        words = "the end took too long; executions that still run here will be rescued"
        with ended_by(deadline - 0.2, partial(logger.critical, words), is_ours=self._requests.has_signals):
            (logger.error if request.is_failure else logger.info)("stopping: %s", request.reason)
            if worker is not None and (running := len(worker.running())):
                logger.info("waiting up to %g s for %d running; a second signal ends at once", self._drain, running)
            # All but the beat: a draining worker is alive.
            for loop in self._loops[1:]:
                loop.stop()
            written = True
            if worker is not None:
                if not worker.drain(self._drain):
                    logger.warning("interrupting what still runs after %g s", self._drain)
                written = worker.shutdown(deadline - GOODBYE)
            self._retire(request.reason)
            for loop in self._loops:
                loop.stop()
                loop.join(0.2)
        if self._child is not None and (request.is_recycle or request.is_patient):
            return RECYCLED
        if request.is_recycle and not self._options.once and self._requests.has_signals:
            self._begin_anew()
        return FAILED if request.is_failure or not written else DONE

    def _begin_anew(self) -> None:
        if self._requests.overrides() is not None:
            return
        logger.warning("a handler could not be stopped; this process restarts to get rid of its thread")
        flush_streams()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - this very command

    def _beat(self, now: datetime | None = None) -> float:
        """Beat; called by the loop, and by rescue before each look."""
        with self._beating:
            # A beat after the row was closed would find it stopped and register again.
            if self._liveness is None or self._is_retired:
                return get_settings().heartbeat_interval
            delay = self._liveness.tick(now)
            self._health.beaten()
            return delay

    def _retire(self, reason: str) -> None:
        liveness = self._liveness
        if liveness is None:
            return

        def retire() -> None:
            try:
                with self._beating:
                    self._is_retired = True
                    liveness.retire(reason)
            except Error as error:
                logger.warning("the worker's row could not be closed: %s", one_line(error))

        # In a thread: a database that does not answer must not hold up the end.
        start_thread(retire, name="goodbye").join(GOODBYE / 2)

    def _close_connections(self) -> None:
        """Close what the start needed: this thread only waits from now on."""
        for connection in connections.all(initialized_only=True):
            if not connection.in_atomic_block:
                connection.close()

    def _on_recycle(self, usable: bool) -> None:
        if self._worker is not None:
            # At once: an execution that started in the replaced slot would soon be interrupted.
            self._worker.stop_claiming()
        if not usable:
            # Every slot is stuck, so there is nothing to wait for.
            self._drain = 0.0
        self._requests.put(StopRequest(reason="a handler does not stop", is_recycle=True))

    def _on_limit(self, reason: str) -> None:
        self._requests.put(StopRequest(reason=reason, is_patient=True))

    def _on_orphaned(self) -> None:
        self._requests.put(StopRequest(reason="the supervisor is gone"))
        # Wakes a start that is still waiting for something.
        os.kill(os.getpid(), signal.SIGTERM)

    def _on_death(self, what: str, error: BaseException) -> None:
        self._requests.put(StopRequest(reason=f"{what} died of {type(error).__name__}: {error}", is_failure=True))
