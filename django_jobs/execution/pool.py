"""The slots: threads for synchronous handlers and one event loop for async ones, with a limit on all runs together."""

from __future__ import annotations

import asyncio
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
from django_jobs.execution.event_loop import EventLoop
from django_jobs.execution.executor import aexecute, execute
from django_jobs.execution.interrupts import Interrupter
from django_jobs.execution.judgement import given_up
from django_jobs.execution.outcomes import Outcome, Released
from django_jobs.execution.run import Run
from django_jobs.loop import Loop, OnDeath, start_thread

logger = logging.getLogger("django_jobs.pool")


class Pool:
    """Runs handlers in `slots` slots and hands every ended run to `on_ended`.

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
        # A thread that takes a token takes work, and wakes the next thread while more is left: a burst of short
        # handlers costs few thread switches, and long ones still start at once.
        self._tokens: SimpleQueue[None] = SimpleQueue()
        self._token_out = False
        self._stopped = False
        self._lock = threading.Lock()
        # Runs in slots; for coroutine handlers, with their event loop.
        self._active: dict[Run, EventLoop | None] = {}
        # Threads that can take a run, by ident; without those that are stuck in a handler that was given up.
        self._threads: dict[int, threading.Thread] = {}
        self._sync_active = 0
        # Threads that are stuck in handlers that were given up.
        self._abandoned = 0
        self._is_ending = False
        self._loop: EventLoop | None = None
        self._interrupter = Interrupter(
            grace=get_settings().interrupt_grace, on_abandoned=self._abandon, wake=self._look_at_ladder
        )
        # Stops runs that are late or cancelled, or at a shutdown.
        self.ladder = Loop(self._climb, name="interrupts", on_death=on_death)

    def start(self) -> None:
        """Start the thread of the ladder; slots start when they are first needed."""
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

    def running(self) -> Mapping[UUID, Run]:
        """Runs in slots, by execution id."""
        return {run.execution.id: run for run in list(self._active)}

    def submit(self, runs: Sequence[Run]) -> None:
        """Start runs, at most `free` of them.

        Raises RuntimeError when the system cannot start a thread; their rows are handed back then.
        """
        with self._lock:
            self._active.update(dict.fromkeys(runs))
            self._sync_active += sum(not run.job.is_async for run in runs)
            try:
                for _ in range(self._sync_active - len(self._threads)):
                    self._start_slot()
                loop = self._event_loop() if any(run.job.is_async for run in runs) else None
            except RuntimeError:
                for run in runs:
                    self._leave(run, Released())
                raise
        for run in runs:
            self._interrupter.register(run)
            if loop is not None and run.job.is_async:
                self._active[run] = loop
                loop.run(partial(self._arun, run))
            else:
                self._work.append(run)
        if self._work:
            self._wake_slot()

    def cancel(self, run: Run) -> None:
        """Begin to stop a run whose cancellation was requested."""
        self._interrupter.cancel(run)

    def lost(self, run: Run) -> None:
        """Begin to stop a run whose row no longer belongs to it."""
        self._interrupter.lost(run)

    def lose_all(self) -> None:
        """Drop every run: this process no longer owns its rows."""
        for run in list(self._active):
            self.lost(run)

    def interrupt_all(self, give_up_at: float) -> None:
        """Begin to stop every run for a shutdown; at the monotonic `give_up_at` the last is given up."""
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
        if self._loop is not None:
            self._loop.stop()
            threads.append(self._loop.thread)
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
                # Nothing else may run here: an exception for this thread may still be on its way, or another thread has
                # taken its place.
                return
            # So that the thread holds no payload while it waits.
            del run

    def _execute(self, run: Run) -> bool:
        """Run a handler in this thread; return whether the thread has to end."""
        signals.emit(signals.job_started, run.job, run.execution)
        outcome = execute(run)
        self._interrupter.unregister(run)
        retired = run.gate.sent or run.gate.abandoned
        if retired:
            with self._lock:
                self._threads.pop(threading.get_ident(), None)
        self._end(run, outcome)
        return retired

    def _wake_slot(self) -> None:
        if not self._token_out:
            self._token_out = True
            self._tokens.put(None)

    def _event_loop(self) -> EventLoop:
        if self._loop is None:
            self._loop = EventLoop()
        return self._loop

    async def _arun(self, run: Run) -> None:
        if signals.is_heard(signals.job_started, run.job):
            await asyncio.to_thread(signals.emit, signals.job_started, run.job, run.execution)
        outcome = await aexecute(run)
        self._interrupter.unregister(run)
        self._end(run, outcome)

    def _end(self, run: Run, outcome: Outcome) -> None:
        with self._lock:
            # An abandoned run was ended without its handler, whose outcome comes too late.
            if run not in self._active:
                return
            was_full = len(self._active) >= self.slots
            self._leave(run, outcome)
        if was_full:
            self._on_free()

    def _leave(self, run: Run, outcome: Outcome) -> None:
        run.outcome = outcome
        # The finisher gets the run before the pool forgets it, so that one of them always owns the row.
        self._on_ended(run)
        del self._active[run]
        self._sync_active -= not run.job.is_async

    def _abandon(self, run: Run, outcome: Outcome) -> None:
        """End a run whose handler does not stop, and replace its slot; called by the ladder."""
        loop = self._active.get(run)
        with self._lock:
            self._abandoned += 1
            self._threads.pop(run.gate.thread_id, None)
            if loop is not None:
                # Later runs get a new loop, whether this one is blocked or just holds a task that does not end.
                self._loop = None
        logger.error(
            "%s %s does not stop: it is inside a call that does not return to Python (a long sleep, a socket without a "
            "timeout), or suppresses the exception. Its row is ended without it, and its thread is left behind until "
            "this process ends; whatever the handler still does, it cannot change the row",
            run.job.name,
            run.execution.pk,
        )
        # Before the slot is free: if the process restarts, nothing must start in it any more.
        self._on_recycle(self._abandoned < self.slots)
        self._end(run, outcome)
        # At the end of the process, each of the loop's runs is given up on its own.
        if loop is not None and not self._is_ending:
            start_thread(partial(self._give_up_if_blocked, loop), name="loop check")

    def _give_up_if_blocked(self, loop: EventLoop) -> None:
        """Give up every run of a blocked event loop; in a thread of its own, since finding out takes time."""
        if loop.answers():
            return
        for run in [run for run, its_loop in list(self._active.items()) if its_loop is loop]:
            outcome = given_up(run)
            if run.gate.abandon():
                self._interrupter.unregister(run)
                self._end(run, outcome)
