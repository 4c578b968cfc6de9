"""The event loop of coroutine handlers, in a thread that no handler can end; made by the pool."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any

logger = logging.getLogger("django_jobs.pool")

# Seconds within which an event loop that is not blocked answers, however busy the machine is.
PATIENCE = 1.0


class EventLoop:
    """Runs coroutines, however their tasks end, until it is stopped."""

    def __init__(self) -> None:
        """Start the thread; raises RuntimeError when the system cannot start one."""
        self._stopped = False
        self._loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._serve, name="django_jobs event loop", daemon=True)
        try:
            self.thread.start()
        except RuntimeError:
            self._loop.close()
            raise

    def run(self, handle: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start a task for the coroutine; from any thread."""
        self._loop.call_soon_threadsafe(lambda: self._loop.create_task(handle()))

    def answers(self) -> bool:
        """Whether the loop still turns, rather than being blocked by a task."""
        answered = threading.Event()
        try:
            self._loop.call_soon_threadsafe(answered.set)
        except RuntimeError:
            return False
        return answered.wait(PATIENCE)

    def stop(self) -> None:
        """Have the thread end; returns at once."""
        self._stopped = True
        # A handler that stops it at this very moment ends it for us.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _serve(self) -> None:
        """Run until stop(), and close the loop with all it holds."""
        loop = self._loop
        try:
            while not self._stopped:
                try:
                    loop.run_forever()
                    if not self._stopped:
                        logger.error("a handler stopped the event loop, which goes on: other runs are on it as well")
                except BaseException:
                    # asyncio lets a task's SystemExit and KeyboardInterrupt out, but other runs are on this loop.
                    logger.exception("a handler's task broke out of the event loop, which goes on")
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
        finally:
            loop.close()
