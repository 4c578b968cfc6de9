"""The slots: threads that run sync handlers and one event loop for async ones, never more at once than allowed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from queue import SimpleQueue
from uuid import UUID

from django_jobs import signals
from django_jobs.conf import get_settings
from django_jobs.execution.executor import aexecute, execute
from django_jobs.execution.interrupts import Interrupter
from django_jobs.execution.judgement import given_up
from django_jobs.execution.outcomes import Outcome, Released
from django_jobs.execution.run import Run
from django_jobs.loop import Loop, OnDeath, start_thread

logger = logging.getLogger("django_jobs.pool")

# For a loop that turns, however busy the machine is.
LOOP_PATIENCE = 1.0


class Pool:
    """Run handlers in `slots` slots and hand every ended run to `on_ended`.

    `on_free` is called when a slot becomes free after all were taken; `on_recycle` when a handler could not be stopped
    and its thread had to be given up, with whether any usable slot is left.
    """

    def __init__(
        self,
        slots: int,
        *,
        on_ended: Callable[[Run], None],
        on_free: Callable[[], None],
        on_recycle: Callable[[bool], None] = lambda usable: None,
        on_death: OnDeath | None = None,
    ) -> None:
        self.slots = slots
        self._on_ended = on_ended
        self._on_free = on_free
        self._on_recycle = on_recycle
        self._on_death = on_death
        self._work: deque[Run] = deque()
        # A thread that takes a token takes work, and wakes the next one while more is left: a burst of short handlers
        # costs a few changes of thread, and long ones still start at once.
        self._tokens: SimpleQueue[None] = SimpleQueue()
        self._token_out = False
        self._stopped = False
        self._lock = threading.Lock()
        # Runs in slots, each with the loop that it is on where its handler is a coroutine.
        self._active: dict[Run, asyncio.AbstractEventLoop | None] = {}
        # Threads that can take a run, by ident; one that is stuck in a handler it does not leave is no longer here.
        self._threads: dict[int, threading.Thread] = {}
        self._sync_active = 0
        self._abandoned = 0
        self._is_ending = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread: threading.Thread | None = None
        self._interrupter = Interrupter(
            grace=get_settings().interrupt_grace, on_abandoned=self._abandon, wake=self._look_at_ladder
        )
        # What stops runs that are late, cancelled or in the way of a shutdown.
        self.ladder = Loop(self._climb, name="interrupts", on_death=on_death)

    def start(self) -> None:
        """Start the thread of the time limits; slots start when they are first needed."""
        self.ladder.start()

    @property
    def free(self) -> int:
        """How many more runs may start now."""
        return self.slots - len(self._active)

    @property
    def busy(self) -> int:
        """How many runs are in a slot."""
        return len(self._active)

    @property
    def is_idle(self) -> bool:
        """Whether no run is in a slot or waits for its thread."""
        return not self._active

    @property
    def abandoned(self) -> int:
        """How many threads are stuck in handlers whose rows were ended without them."""
        return self._abandoned

    def running(self) -> Mapping[UUID, Run]:
        """Runs in slots, by execution id."""
        return {run.execution.id: run for run in list(self._active)}

    def submit(self, runs: Sequence[Run]) -> None:
        """Start runs, of which there are at most `free`.

        Raises RuntimeError when the system has no thread for them; then their rows are handed back.
        """
        with self._lock:
            self._active.update(dict.fromkeys(runs))
            self._sync_active += sum(not run.job.is_async for run in runs)
            try:
                for _ in range(self._sync_active - len(self._threads)):
                    self._start_slot()
                loop = self._running_loop() if any(run.job.is_async for run in runs) else None
            except RuntimeError:
                for run in runs:
                    self._leave(run, Released())
                raise
        for run in runs:
            self._interrupter.register(run)
            if loop is not None and run.job.is_async:
                self._active[run] = loop
                loop.call_soon_threadsafe(self._start_task, loop, run)
            else:
                self._work.append(run)
        if self._work:
            self._wake_slot()

    def cancel(self, run: Run) -> None:
        """Begin the ladder for a run whose cancel was asked for."""
        self._interrupter.cancel(run)

    def lost(self, run: Run) -> None:
        """Begin the ladder for a run whose row is somebody else's now."""
        self._interrupter.lost(run)

    def lose_all(self) -> None:
        """Drop every run: this process does not own its rows any more."""
        for run in list(self._active):
            self.lost(run)

    def interrupt_all(self, give_up_at: float) -> None:
        """Begin the ladder for everything that runs, since the process shuts down; the last is given up then."""
        self._is_ending = True
        self._interrupter.shutdown(give_up_at=give_up_at)

    def stop(self, timeout: float = 1.0) -> None:
        """End the idle threads; those inside handlers are daemons and die with the process."""
        deadline = time.monotonic() + timeout
        self.ladder.stop()
        self._stopped = True
        threads = list(self._threads.values())
        for _ in threads:
            self._tokens.put(None)
        if self._loop is not None and self._loop_thread is not None:
            # A handler that stops it at this very moment ends it for us.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._loop.stop)
            threads.append(self._loop_thread)
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0))
        self.ladder.join(max(deadline - time.monotonic(), 0))

    def _climb(self, now: datetime | None = None) -> float:
        return self._interrupter.tick()

    def _look_at_ladder(self) -> None:
        self.ladder.wake()

    def _start_slot(self) -> None:
        name = f"slot {len(self._threads) + 1}"
        thread = start_thread(self._slot, name=name, on_death=self._on_death, for_handlers=True)
        self._threads[thread.ident or 0] = thread

    def _slot(self) -> None:
        while True:
            try:
                run = self._work.popleft()
            except IndexError:
                if self._stopped:
                    return
                self._tokens.get()
                self._token_out = False
                continue
            if self._work:
                self._wake_slot()
            if self._execute(run):
                # An exception that was aimed at this thread may still be on its way, or another thread has taken its
                # place: nothing else runs here.
                return
            # While it waits, the thread holds no payload.
            del run

    def _execute(self, run: Run) -> bool:
        """Run a handler in this thread; return whether the thread is to end."""
        signals.emit(signals.job_started, run.job, run.execution)
        outcome = execute(run)
        self._interrupter.unregister(run)
        retired = run.interrupted or run.abandoned
        if retired:
            with self._lock:
                self._threads.pop(threading.get_ident(), None)
        self._end(run, outcome)
        return retired

    def _wake_slot(self) -> None:
        if not self._token_out:
            self._token_out = True
            self._tokens.put(None)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=self._serve, args=(loop,), name="django_jobs event loop", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                loop.close()
                raise
            self._loop, self._loop_thread = loop, thread
        return self._loop

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run an event loop until this pool stops, and close it with all it holds."""
        try:
            while not self._stopped:
                try:
                    loop.run_forever()
                    if not self._stopped:
                        logger.error("a handler stopped the event loop, which goes on: other runs are on it, too")
                except (
                    BaseException
                ):  # asyncio lets SystemExit and KeyboardInterrupt of a task out; other runs are here, too
                    logger.exception("a task that a handler had made broke out of the event loop, which goes on")
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
        finally:
            loop.close()

    def _start_task(self, loop: asyncio.AbstractEventLoop, run: Run) -> None:
        loop.create_task(self._arun(run))

    async def _arun(self, run: Run) -> None:
        if signals.is_heard(signals.job_started, run.job):
            await asyncio.to_thread(signals.emit, signals.job_started, run.job, run.execution)
        outcome = await aexecute(run)
        self._interrupter.unregister(run)
        self._end(run, outcome)

    def _end(self, run: Run, outcome: Outcome) -> None:
        with self._lock:
            # An abandoned run was ended without its handler; what it says now comes too late.
            if run not in self._active:
                return
            was_full = len(self._active) >= self.slots
            self._leave(run, outcome)
        if was_full:
            self._on_free()

    def _leave(self, run: Run, outcome: Outcome) -> None:
        run.outcome = outcome
        # The finisher knows the run before the pool forgets it, so that one of them always owns the row.
        self._on_ended(run)
        del self._active[run]
        self._sync_active -= not run.job.is_async

    def _abandon(self, run: Run, outcome: Outcome) -> None:
        """End a run whose handler does not stop, and replace its slot; called by the ladder."""
        loop = self._active.get(run)
        with self._lock:
            self._abandoned += 1
            self._threads.pop(run.thread_id, None)
            if loop is not None:
                # Later runs get a new one, whether this one is blocked or holds a task that does not end.
                self._loop = None
        logger.error(
            "%s %s does not stop: it is inside a call that does not return to Python (a long sleep, a socket without a "
            "timeout), or lets no exception in. Its row is ended without it, and its thread is left behind until this "
            "process ends; whatever it does still, it cannot change the row",
            run.job.name,
            run.execution.pk,
        )
        # Before the slot is free: where the process begins anew, nothing is to start in it any more.
        self._on_recycle(self._abandoned < self.slots)
        self._end(run, outcome)
        # At the end of the process each of its runs is given up by itself.
        if loop is not None and not self._is_ending:
            start_thread(partial(self._give_up_if_blocked, loop), name="loop check")

    def _give_up_if_blocked(self, loop: asyncio.AbstractEventLoop) -> None:
        """Give up every run of a loop that does not turn any more; in a thread of its own, since asking takes time."""
        if _answers(loop):
            return
        for run in [run for run, its_loop in list(self._active.items()) if its_loop is loop]:
            outcome = given_up(run)
            if run.gate.abandon():
                self._interrupter.unregister(run)
                self._end(run, outcome)


def _answers(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether a loop still turns, or is blocked by one of its tasks."""
    answered = threading.Event()
    try:
        loop.call_soon_threadsafe(answered.set)
    except RuntimeError:
        return False
    return answered.wait(LOOP_PATIENCE)
