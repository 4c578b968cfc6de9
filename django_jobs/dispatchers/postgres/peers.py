"""Sends hints to the other processes on the same PostgreSQL and listens to theirs; for the database dispatcher."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Literal
from uuid import uuid4

from django.db import connections

from django_jobs.dispatchers.postgres import channel
from django_jobs.dispatchers.postgres.channel import Message
from django_jobs.dispatchers.postgres.listener import Listener
from django_jobs.dispatchers.postgres.sender import Sender
from django_jobs.models import jobs_alias

EVERYTHING = Message(queues=None, cancel=True)


class Peers:
    """Carries messages between this process and others; does nothing unless the database is PostgreSQL.

    Safe from any thread; not to be used after a fork.
    """

    def __init__(self, via: str | Literal[False] | None, hear: Callable[[Message], None]) -> None:
        """Take the alias to listen `via` (None: that of the jobs; False: not at all), and the callback `hear`."""
        self._via, self._hear = via, hear
        self._name = uuid4().hex
        self._lock = threading.Lock()
        # By alias, since each push asks.
        self._are_reached: dict[str, bool] = {}
        self._sender = Sender(self._name)
        self._listener: Listener | None = None

    def tell(self, *, queue: str | None = None, cancel: bool = False) -> None:
        """Tell the others to look for rows in the queue, or for cancel marks."""
        using = jobs_alias()
        if self._are_reached_by(using):
            self._sender.send(using, queue=queue, cancel=cancel)

    def listen(self) -> None:
        """Start to listen; safe to repeat."""
        using = jobs_alias()
        if not self._are_reached_by(using):
            return
        with self._lock:
            if self._listener is None:
                self._listener = Listener(
                    name=self._name,
                    using=using,
                    via=self._via or using,
                    hear=self._hear,
                    catch_up=lambda: self._hear(EVERYTHING),
                )

    def stop_listening(self) -> None:
        """Close the listening connection; safe to repeat."""
        with self._lock:
            listener, self._listener = self._listener, None
        if listener is not None:
            listener.stop()

    def close(self) -> None:
        """End threads and close connections."""
        self.stop_listening()
        self._sender.close()

    @property
    def are_reached(self) -> bool:
        """Whether this process sends and listens at all."""
        return self._are_reached_by(jobs_alias())

    def _are_reached_by(self, using: str) -> bool:
        if using not in self._are_reached:
            self._are_reached[using] = self._is_wanted(using) and self._obstacle(using) is None
        return self._are_reached[using]

    def problem(self) -> str | None:
        """Return in one line why no messages arrive; None while they do, or are not wanted."""
        listener = self._listener
        return self._obstacle(jobs_alias()) if listener is None else listener.problem()

    def _is_wanted(self, using: str) -> bool:
        return self._via is not False and connections[using].vendor == "postgresql"

    def _obstacle(self, using: str) -> str | None:
        """Return why PostgreSQL carries no messages although they are wanted."""
        if not self._is_wanted(using):
            return None
        if not connections[using].settings_dict["AUTOCOMMIT"]:
            return "with AUTOCOMMIT off, there is no telling when a push is committed"
        return channel.missing_driver()
