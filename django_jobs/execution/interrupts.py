"""The ladder by which every run is stopped (signal, exception, giving up); ticked by the pool."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING

from django_jobs.context import Reason
from django_jobs.exceptions import Cancelled, TimedOut
from django_jobs.execution.gate import Sent
from django_jobs.execution.judgement import given_up

if TYPE_CHECKING:
    from django_jobs.execution.outcomes import Outcome
    from django_jobs.execution.run import Run

logger = logging.getLogger("django_jobs")

# Seconds with nothing due; a registration or a cancel wakes the loop earlier.
IDLE = 60.0
# Seconds that a handler has at least to clean up after the exception, even with a grace of 0.
_UNWIND = 0.2
# Seconds between looks at a thread in code that must not be interrupted, and the number of looks.
_PAUSE = 0.005
_LOOKS = 100
# Seconds between looks at a handler that is shielded, or has not begun.
_LONG_PAUSE = 0.1
# A cancelled handler that must not be interrupted is waited for without end.
_NEVER = math.inf

OnAbandoned = Callable[["Run", "Outcome"], object]


class _Climb:
    """How far up the ladder one run is; instants are monotonic seconds."""

    __slots__ = ("give_up_at", "looks", "raise_at", "sent", "timed_out")

    def __init__(self) -> None:
        self.raise_at = _NEVER
        self.give_up_at = _NEVER
        self.sent = False
        self.timed_out = False
        self.looks = 0


class Interrupter:
    """Stops the runs of one pool when they are cancelled, late or lost, or at a shutdown.

    `on_abandoned(run, outcome)` is called from tick() for a run whose handler did not stop: it has to end the row with
    the outcome and replace the slot. `wake` makes the loop tick at once.
    """

    def __init__(self, *, grace: float, on_abandoned: OnAbandoned, wake: Callable[[], object] = lambda: None) -> None:
        self._grace = grace
        self._unwind = max(grace, _UNWIND)
        self._on_abandoned = on_abandoned
        self._wake = wake
        self._runs: dict[Run, _Climb | None] = {}
        self._lock = threading.Lock()
        self._next_at = -math.inf
        self._shutdown: tuple[float, float] | None = None

    def register(self, run: Run) -> None:
        """Watch a run; to be called before execute()."""
        self._runs[run] = None
        if self._shutdown is not None:
            self._tell_shutdown(run)
        if run.deadline is not None and run.deadline < self._next_at:
            self._wake()

    def unregister(self, run: Run) -> None:
        """Forget a run; to be called after execute(). Safe to repeat, and for runs that were given up."""
        self._runs.pop(run, None)

    @property
    def runs(self) -> list[Run]:
        """The runs that are watched."""
        return list(self._runs)

    def cancel(self, run: Run, now: float | None = None) -> None:
        """Begin to stop a run because somebody cancelled it; safe to repeat."""
        self._tell_and_wake(run, "cancelled", monotonic() if now is None else now)

    def lost(self, run: Run, now: float | None = None) -> None:
        """Begin to stop a run that has lost its row; safe to repeat."""
        self._tell_and_wake(run, "lost", monotonic() if now is None else now)

    def shutdown(self, *, give_up_at: float | None = None, now: float | None = None) -> None:
        """Begin to stop every run, including later ones; at the monotonic `give_up_at` the last is given up."""
        now = monotonic() if now is None else now
        limit = now + 2 * self._grace if give_up_at is None else give_up_at
        self._shutdown = (now, limit)
        for run in self.runs:
            self._tell_shutdown(run)
        self._wake()

    def tick(self, now: float | None = None) -> float:
        """Take every due run one step up; return the seconds until the next is due. Never raises."""
        now = monotonic() if now is None else now
        # So that registrations that come in the meantime wake the loop.
        self._next_at = math.inf
        delay = IDLE
        for run in self.runs:
            try:
                delay = min(delay, self._step(run, now))
            except Exception:
                logger.exception("%r could not be interrupted", run)
                delay = min(delay, 1.0)
        self._next_at = now + delay
        return delay

    def _step(self, run: Run, now: float) -> float:
        with self._lock:
            if run not in self._runs:
                return IDLE
            if run.deadline is not None and now >= run.deadline:
                self._tell(run, "timeout", now)
            climb = self._runs.get(run)
            if climb is None:
                return IDLE if run.deadline is None else run.deadline - now
            pause = self._raise(run, climb, now)
            if now < climb.give_up_at:
                times = [climb.give_up_at, now + pause]
                if not climb.sent and climb.raise_at > now:
                    times.append(climb.raise_at)
                if run.deadline is not None and not climb.timed_out:
                    times.append(run.deadline)
                return max(min(times) - now, 0.0)
            # Only when the run is not inside its handler at the moment; it is looked at again.
            climb.give_up_at = now + self._grace
        self._give_up(run)
        return self._grace

    def _raise(self, run: Run, climb: _Climb, now: float) -> float:
        """Send the exception if it is time; return the seconds after which to look again."""
        if climb.sent or now < climb.raise_at or not run.job.interrupt:
            return IDLE
        late = run.signal.peek() == "timeout"
        sent = run.gate.interrupt(TimedOut if late else Cancelled, insist=climb.looks >= _LOOKS)
        if sent is Sent.LATER:
            climb.looks += 1
            return _PAUSE
        if sent is not Sent.YES:
            return _LONG_PAUSE
        climb.sent = True
        climb.give_up_at = min(climb.give_up_at, now + self._unwind)
        return IDLE

    def _give_up(self, run: Run) -> None:
        if not run.gate.inside:
            return
        # Reads the stack, so before the run is abandoned.
        outcome = given_up(run)
        if run.gate.abandon():
            self._runs.pop(run, None)
            self._on_abandoned(run, outcome)

    def _tell_and_wake(self, run: Run, reason: Reason, now: float) -> None:
        with self._lock:
            self._tell(run, reason, now)
        self._wake()

    def _tell_shutdown(self, run: Run) -> None:
        if self._shutdown is None:
            return
        told_at, give_up_at = self._shutdown
        # There may be too little time for two steps: the exception comes at half of it, so that handlers can clean up.
        grace = min(self._grace, (give_up_at - told_at) / 2)
        with self._lock:
            self._tell(run, "shutdown", told_at, grace=grace, give_up_at=give_up_at)

    def _tell(
        self, run: Run, reason: Reason, now: float, *, grace: float | None = None, give_up_at: float = _NEVER
    ) -> None:
        """Set the signal and the times of the next steps; a second reason can only bring them forward."""
        if run not in self._runs:
            return
        climb = self._runs[run]
        if climb is None:
            climb = self._runs[run] = _Climb()
        elif reason == "timeout" and climb.timed_out:
            return
        run.signal.set(reason)
        late = reason == "timeout"
        climb.timed_out = climb.timed_out or late
        if late:
            grace, give_up_at = 0.0, now + self._unwind
        climb.raise_at = min(climb.raise_at, now + (self._grace if grace is None else grace))
        climb.give_up_at = min(climb.give_up_at, give_up_at)
