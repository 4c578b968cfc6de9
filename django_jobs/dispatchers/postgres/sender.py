"""Send NOTIFY for the database dispatcher: the first at once, then one per process in each gap of 10 to 40 ms."""

from __future__ import annotations

import atexit
import logging
import threading
import time

from django.db import Error, connections

from django_jobs.contention import in_transaction
from django_jobs.dispatchers.postgres import channel
from django_jobs.dispatchers.postgres.channel import Message
from django_jobs.loop import start_thread
from django_jobs.text import one_line

logger = logging.getLogger("django_jobs")

# Seconds. A transaction with a NOTIFY takes a lock at its commit that all such transactions share. While they follow
# one another, the gap doubles, up to the last look that workers take after a wake-up: until then they find new rows.
GAP, MAX_GAP = 0.010, 0.040
# Seconds for which the trailing thread keeps its connection. If it were longer, it would be in the way of a test run
# that drops its database.
LINGER = 0.1
# Seconds for unsent messages when the process ends.
GOODBYE = 0.2


class Sender:
    """Tells other processes of hints; those that come within the gap after a NOTIFY go out together when it is over.

    The leading NOTIFY is one more statement on the connection of the pushing thread. The trailing one is sent by a
    thread that lives as long as it has something to do.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._queues: set[str] = set()
        self._cancel = False
        self._sent_at = float("-inf")
        self._gap = GAP
        # Set while something waits for the thread.
        self._waiting = threading.Event()
        self._has_thread = self._is_busy = self._is_failing = False
        atexit.register(self.flush)

    def send(self, using: str, *, queue: str | None = None, cancel: bool = False) -> None:
        """Have workers elsewhere look for rows in the queue, or for cancel marks.

        Does nothing inside a transaction, such as a test's, since others do not see what was written there. Does not
        open a connection in a thread that has none.
        """
        connection = connections[using]
        if in_transaction(connection):
            return
        with self._lock:
            self._add({queue} if queue is not None else set(), cancel)
            is_early = time.monotonic() < self._sent_at + self._gap
            if (is_early or connection.connection is None) and self._leave_to_thread(using):
                return
            message = self._take()
        try:
            channel.send(connection, message)
        except Error:
            # Perhaps only this thread's connection is broken, and the message speaks for others as well.
            with self._lock:
                self._add(message.queues or set(), message.cancel)
                if not self._leave_to_thread(using):
                    raise

    def flush(self) -> None:
        """Wait at most GOODBYE seconds until everything is sent; called when the process ends."""
        deadline = time.monotonic() + GOODBYE
        while self._is_busy and time.monotonic() < deadline:
            time.sleep(0.002)

    def close(self) -> None:
        """Send what is left."""
        self.flush()
        atexit.unregister(self.flush)

    def _add(self, queues: set[str] | frozenset[str], cancel: bool) -> None:
        self._queues |= queues
        self._cancel |= cancel

    def _take(self) -> Message:
        message, now = Message(sender=self._name, queues=frozenset(self._queues), cancel=self._cancel), time.monotonic()
        self._gap = min(self._gap * 2, MAX_GAP) if now < self._sent_at + 2 * MAX_GAP else GAP
        self._queues, self._cancel, self._sent_at = set(), False, now
        self._waiting.clear()
        return message

    def _leave_to_thread(self, using: str) -> bool:
        """Have the thread send what is waiting; False when no thread can be started."""
        if not self._has_thread:
            try:
                start_thread(lambda: self._serve(using), name="notify")
            except RuntimeError:
                return False
            self._has_thread = True
        self._is_busy = True
        self._waiting.set()
        return True

    def _serve(self, using: str) -> None:
        while self._waiting.wait(LINGER) or self._goes_on():
            with self._lock:
                # A push that came just when the gap was over may have sent it along, and begun another gap.
                is_waiting, rest = self._waiting.is_set(), self._sent_at + self._gap - time.monotonic()
                message = self._take() if is_waiting and rest <= 0 else None
            if message is not None:
                self._send_or_tell(using, message)
            elif is_waiting:
                time.sleep(rest)
            with self._lock:
                self._is_busy = self._waiting.is_set()

    def _goes_on(self) -> bool:
        with self._lock:
            self._has_thread = self._waiting.is_set()
            return self._has_thread

    def _send_or_tell(self, using: str, message: Message) -> None:
        try:
            channel.send(connections[using], message)
        except Exception as error:  # noqa: BLE001 - whatever it is, the rows are stored and the thread goes on
            if not self._is_failing:
                logger.warning("NOTIFY failed; workers find rows by polling: %s", one_line(error))
            self._is_failing = True
            connections[using].close()
        else:
            self._is_failing = False
