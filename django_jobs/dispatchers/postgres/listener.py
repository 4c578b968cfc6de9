"""Listen on the channel, in a thread and on a connection of its own, which is opened again whenever it is lost."""

from __future__ import annotations

import contextlib
import logging
import random
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from django.db import connections

from django_jobs.dispatchers.postgres import channel
from django_jobs.dispatchers.postgres.channel import Message
from django_jobs.loop import FaultLog, start_thread
from django_jobs.text import one_line

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

logger = logging.getLogger("django_jobs")

# Seconds between probes, which the listener sends itself the way a push sends its NOTIFY: if a probe does not arrive
# soon, neither would theirs.
PROBE_INTERVAL = 60.0
PROBE_PATIENCE = 5.0
# Pauses before the next connection: they grow to MAX_PAUSE while connecting fails, and are UNHEARD_PAUSE when it
# succeeds but nothing arrives.
FIRST_PAUSE = 0.1
MAX_PAUSE = 5.0
UNHEARD_PAUSE = 60.0
# How many times to ask which server sessions are behind two connections.
ROUNDS = 5

NOT_YET = "the listening connection is not open yet"
LOST = "the listening connection is lost"
UNHEARD = "NOTIFY does not arrive here through a pooler like PgBouncer in transaction mode"


class _UnheardError(Exception):
    """A NOTIFY does not arrive on this connection."""


class Listener:
    """Calls `hear` with each message of other processes, and `catch_up` whenever some may have been missed."""

    def __init__(
        self,
        *,
        name: str,
        using: str,
        via: str,
        hear: Callable[[Message], None],
        catch_up: Callable[[], None],
    ) -> None:
        """Take the alias that others push `using` and the one to listen `via`, which are usually the same."""
        self._name, self._using, self._via = name, using, via
        self._hear, self._catch_up = hear, catch_up
        self._problem: str | None = NOT_YET
        self._faults = FaultLog()
        self._pause = FIRST_PAUSE
        # The number of probes sent, the number of the last one heard, and when the last one was sent.
        self._probes = self._heard = 0
        self._probed_at = 0.0
        self._stopped = threading.Event()
        # Interrupts the wait for messages.
        self._bell, self._ear = socket.socketpair()
        self._thread = start_thread(self._run, name="listen")

    def problem(self) -> str | None:
        """Return in one line why nothing is heard now; None while it is."""
        return self._problem

    def stop(self, timeout: float = 2.0) -> None:
        """Stop listening; the connection is closed when this returns, unless the server does not answer in time."""
        self._stopped.set()
        with contextlib.suppress(OSError):
            self._bell.send(b"\0")
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _run(self) -> None:
        with self._bell, self._ear:
            while not self._stopped.is_set():
                try:
                    with contextlib.closing(channel.open_listener(self._via)) as connection:
                        self._listen(connection)
                except _UnheardError:
                    self._fails(UNHEARD, UNHEARD)
                    self._pause = UNHEARD_PAUSE
                except Exception as error:  # noqa: BLE001 - whatever the driver raises, we try again
                    self._fails(LOST, f"{LOST}: {one_line(error)}")
                finally:
                    connections[self._using].close()
                self._stopped.wait(self._pause * random.uniform(0.5, 1.0))
                self._pause = min(self._pause * 2, MAX_PAUSE)

    def _listen(self, connection: BaseDatabaseWrapper) -> None:
        """Pass on messages until stop(); raises when the connection is lost or useless."""
        if _are_shared(connection, connections[self._using]):
            raise _UnheardError
        with connection.cursor() as cursor:
            cursor.execute("SET idle_session_timeout TO 0")
            # From here on nothing else is executed on this connection: messages that arrived meanwhile would be lost.
            cursor.execute(f'LISTEN "{channel.name(connection)}"')
        self._probed_at, self._heard = float("-inf"), self._probes
        if self._problem != UNHEARD:
            self._problem = None
        self._catch_up()
        raw: Any = connection.connection
        with selectors.DefaultSelector() as selector:
            selector.register(raw, selectors.EVENT_READ)
            selector.register(self._ear, selectors.EVENT_READ)
            while not self._stopped.is_set():
                selector.select(self._probe())
                for notify in list(raw.notifies(timeout=0)):
                    self._receive(Message.decode(notify.payload))

    def _probe(self) -> float:
        """Send a probe when it is time, raise when the last one did not arrive; return when to call again."""
        age = time.monotonic() - self._probed_at
        if self._heard != self._probes:
            if age > PROBE_PATIENCE:
                raise _UnheardError
            return PROBE_PATIENCE - age
        if age < PROBE_INTERVAL:
            return PROBE_INTERVAL - age
        self._probes, self._probed_at = self._probes + 1, time.monotonic()
        # On this thread's ordinary Django connection, as for a push.
        with contextlib.closing(connections[self._using]) as connection:
            channel.send(connection, Message(sender=self._name, probe=self._probes))
        return PROBE_PATIENCE

    def _receive(self, message: Message) -> None:
        if message.sender != self._name:
            self._hear(message)
        elif message.probe == self._probes:
            self._heard = message.probe
            self._works()

    def _works(self) -> None:
        if self._faults.end():
            logger.warning("wake-ups arrive again")
        self._problem, self._pause = None, FIRST_PAUSE

    def _fails(self, problem: str, explanation: str) -> None:
        # Drivers name hosts, ports and users: that is for the log, not for whoever can reach the health port.
        self._problem = problem
        if self._faults.is_news(problem):
            logger.warning("no wake-ups arrive, work is found by polling: %s", explanation)


def _are_shared(connection: BaseDatabaseWrapper, other: BaseDatabaseWrapper) -> bool:
    """Whether a pooler shares the server's sessions between connections.

    LISTEN must not even be tried there: it would stay with a session of the pool, and each NOTIFY would put a line into
    the log of PgBouncer. An idle pool gives both connections the session that was used last, a busy one others.
    """
    ours, theirs = set(), set()
    for _ in range(ROUNDS):
        ours.add(_session(connection))
        theirs.add(_session(other))
    return len(ours) > 1 or not ours.isdisjoint(theirs)


def _session(connection: BaseDatabaseWrapper) -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        return int(cursor.fetchone()[0])
