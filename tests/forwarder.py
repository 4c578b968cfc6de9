"""A network cable to the database server that a test can cut and mend, or that falls silent."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import quote, urlsplit


@dataclass(slots=True, eq=False)
class Line:
    """One connection through the forwarder."""

    client: socket.socket
    server: socket.socket
    # Closed by the last of them: the number of a socket closed under the other one's recv() may be a new one's.
    pumps: int = 2
    # Has it said what the answer is to be swallowed after?
    is_suspect: bool = False
    is_deaf: bool = False


class Forwarder:
    """Forwards a local port to a server; without the port nobody gets through, and what was connected is cut off."""

    def __init__(self, server: tuple[str, int] | str) -> None:
        self._server = server
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._trap: tuple[bytes, bytes] | None = None
        self.swallowed = threading.Event()
        # Set when somebody has connected since the last hush().
        self.reached = threading.Event()
        # Clear while everything is taken and nothing passed on.
        self._passing = threading.Event()
        self._passing.set()
        # Seconds before each byte of an answer.
        self._drip = 0.0
        self._listener = self._listen(0)
        self.port: int = self._listener.getsockname()[1]

    def cut(self) -> None:
        """Refuse connections from now, and end those there are."""
        with self._lock:
            # A thread that waits in accept() would keep a closed socket listening.
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            for end in self._open:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
        # What was held back by hush() finds its connection closed.
        self._passing.set()

    def mend(self) -> None:
        """Let connections through again."""
        self._listener = self._listen(self.port)

    def redirect(self, server: tuple[str, int]) -> None:
        """Lead connections from now to another server; those there are stay."""
        self._server = server

    def hush(self) -> None:
        """Take what is sent and connections from now, and never answer."""
        self.reached.clear()
        self._passing.clear()

    def drip(self, seconds: float) -> None:
        """Pass on answers from now byte by byte, each after so many seconds."""
        self._drip = seconds

    def swallow_answer(self, *, after: bytes, at: bytes) -> None:
        """Cut off, once, a connection that sent `after` when the server answers to `at`; then `swallowed` is set."""
        self.swallowed.clear()
        with self._lock:
            self._trap = after, at

    def _listen(self, port: int) -> socket.socket:
        listener = socket.create_server(("127.0.0.1", port))
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return listener

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            self.reached.set()
            try:
                server = self._connect()
            except OSError:
                # As without the cable: nobody is there.
                client.close()
                continue
            with self._lock:
                if listener.fileno() < 0:
                    client.close()
                    server.close()
                    return
                self._open |= {client, server}
            line = Line(client, server)
            for ends in ((client, server), (server, client)):
                threading.Thread(target=self._pump, args=(*ends, line), daemon=True).start()

    def _connect(self) -> socket.socket:
        if isinstance(self._server, tuple):
            return socket.create_connection(self._server)
        server = socket.socket(socket.AF_UNIX)
        server.connect(self._server)
        return server

    def _pump(self, source: socket.socket, target: socket.socket, line: Line) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._passing.wait()
                if source is line.client:
                    self._listen_in(data, line)
                elif line.is_deaf:
                    # The server has done what it was asked for, and nobody hears of it.
                    self.swallowed.set()
                    break
                elif self._drip:
                    for byte in data:
                        time.sleep(self._drip)
                        target.sendall(bytes([byte]))
                    continue
                target.sendall(data)
        self._shut(line)

    def _shut(self, line: Line) -> None:
        for end in (line.client, line.server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        with self._lock:
            line.pumps -= 1
            if line.pumps == 0:
                self._open -= {line.client, line.server}
                line.client.close()
                line.server.close()

    def _listen_in(self, data: bytes, line: Line) -> None:
        with self._lock:
            if self._trap is None:
                return
            after, at = self._trap
            line.is_suspect |= after in data
            if line.is_suspect and at in data:
                line.is_deaf, self._trap = True, None


@contextlib.contextmanager
def forwarded_database() -> Iterator[tuple[Forwarder, str]]:
    """Yield a forwarder to the test's server, and the DATABASE_URL that leads through it."""
    from django.conf import settings
    from django.db import connection

    server = connection.settings_dict
    scheme, port = ("postgres", 5432) if connection.vendor == "postgresql" else ("mysql", 3306)
    host, port = str(server["HOST"]) or "127.0.0.1", int(server["PORT"] or port)
    # A folder stands for the socket of PostgreSQL in it.
    forwarder = Forwarder(f"{host}/.s.PGSQL.{port}" if host.startswith("/") else (host, port))
    login = quote(str(server["USER"]), safe="")
    if server["PASSWORD"]:
        login += ":" + quote(str(server["PASSWORD"]), safe="")
    name = urlsplit(settings.DATABASE_URL).path or "/"
    try:
        yield forwarder, f"{scheme}://{login}@127.0.0.1:{forwarder.port}{name}"
    finally:
        forwarder.cut()
