"""The only way for an exception into a running handler, and the shield that keeps it out of our own code.

At most one exception is sent to a run. It is sent under the gate's lock, while the handler is inside and no shield is
up; closing the gate and raising a shield first take an exception that is on its way. So it can land in the handler or
in close(), and nowhere else. (Python swallows one that lands in a finalizer; the ladder then gives the run up.)
"""

from __future__ import annotations

import asyncio
import ctypes
import sys
import threading
import time
from enum import Enum
from types import FrameType

# An exception between taking a lock and the following `try` would leave the lock held for ever. `with lock` has no such
# gap, but these modules have one, and their locks are shared: nothing is sent while the thread is in one of them.
_FRAGILE = ("logging", "importlib._bootstrap", "django_jobs.")

_set_async_exc = ctypes.pythonapi.PyThreadState_SetAsyncExc
_set_async_exc.argtypes = (ctypes.c_ulong, ctypes.py_object)


class Sent(Enum):
    """What became of an exception that was meant for a handler."""

    YES = "on its way, or already there"
    SHIELDED = "raised by the shield when it ends"
    LATER = "the thread is in code that must not be interrupted; ask again in a moment"
    NEVER = "the handler is not running"


class Gate:
    """Lets one exception into one run's handler."""

    __slots__ = ("_depth", "_due", "_is_task", "_loop", "_task", "abandoned", "inside", "lock", "sent", "thread_id")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        # The ident of the handler's thread; 0 before it began.
        self.thread_id = 0
        self.inside = False
        # Was an exception let in? Then the thread must not be used again.
        self.sent = False
        # Has the run been given up while its handler was still inside?
        self.abandoned = False
        self._depth = 0
        self._due: type[BaseException] | None = None
        # Is the handler a coroutine? Then its task is cancelled instead of raising in its thread.
        self._is_task = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[object] | None = None

    def open(self) -> None:
        """Make the handler in this thread reachable."""
        self.thread_id = threading.get_ident()
        self.inside = True

    def open_task(self) -> None:
        """Make the handler in the current task reachable."""
        self._is_task = True
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self.open()

    def close(self) -> None:
        """Make the handler unreachable; safe to repeat.

        An exception that was on its way is raised here, once: the caller catches it and closes the gate again.
        """
        with self.lock:
            self.inside = False
            self._due = None
            # Breaks a cycle: the task holds the context, which holds this gate.
            self._loop = self._task = None
        if self.sent and not self._is_task:
            _checkpoint()

    def interrupt(self, exception: type[BaseException], *, insist: bool = False) -> Sent:
        """Send the exception to the handler, as soon as no shield is up; called from another thread.

        `insist` sends it even while the thread is in fragile code.
        """
        # Take a fresh turn of the interpreter lock, so that what is seen below is still true when it is acted on.
        time.sleep(0)
        with self.lock:
            if not self.inside:
                return Sent.NEVER
            if self.sent:
                return Sent.YES
            self._due = exception
            if self._depth:
                return Sent.SHIELDED
            if self._loop is not None:
                try:
                    self._loop.call_soon_threadsafe(self._cancel_task)
                except RuntimeError:
                    return Sent.NEVER
            elif not insist and _is_fragile(sys._current_frames().get(self.thread_id)):
                return Sent.LATER
            else:
                _set_async_exc(self.thread_id, exception)
                self.sent = True
                self._due = None
            return Sent.YES

    def abandon(self) -> bool:
        """Give the run up if its handler is still inside; its outcome is ignored from then on."""
        with self.lock:
            if self.inside:
                self.abandoned = True
                self.inside = False
                return True
            return False

    def __enter__(self) -> None:
        """Raise the shield; an exception that was on its way is raised before it is up."""
        if threading.get_ident() != self.thread_id:
            return
        with self.lock:
            self._depth += 1
        if self.sent and not self._is_task:
            try:
                _checkpoint()
            except BaseException:
                self._depth -= 1
                raise

    def __exit__(self, *_: object) -> None:
        """Lower the shield, and raise an exception that waited for it."""
        if threading.get_ident() != self.thread_id:
            return
        with self.lock:
            # __enter__() raised before it counted.
            self._depth -= 1
            due = self._due
            if due is None or self._depth > 0 or self.sent or not self.inside:
                return
            self.sent = True
            self._due = None
        if self._task is not None:
            self._task.cancel()
        else:
            raise due()

    def stack(self) -> FrameType | None:
        """Return the frame that the handler's thread is in; None for coroutine handlers."""
        return None if self._is_task else sys._current_frames().get(self.thread_id)

    def _cancel_task(self) -> None:
        if self.inside and not self.sent and self._depth == 0 and self._task is not None:
            self.sent = True
            self._due = None
            self._task.cancel()


def _is_fragile(frame: FrameType | None) -> bool:
    if frame is None:
        return False
    name = frame.f_globals.get("__name__")
    return isinstance(name, str) and name.startswith(_FRAGILE)


def _checkpoint() -> None:
    """Do nothing: an exception that was sent to this thread is raised at the latest when a function is entered."""
