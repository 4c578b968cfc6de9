"""Serve `/healthz` and `/readyz` over HTTP for `runjobs --health-port`, from a thread of its own."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Iterator
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any

from django_jobs.loop import start_thread
from django_jobs.runtime.health import Answer, Probes
from django_jobs.runtime.options import UsageError

logger = logging.getLogger("django_jobs.health")

# Seconds for a whole connection, however slowly its request trickles in.
LIFETIME = 5.0
# Open connections. Probes are answered within milliseconds, so the oldest of so many belongs to a client that keeps
# connections open.
MOST = 32
LOOK_EVERY = 0.25

_running: set[Server] = set()


@contextlib.contextmanager
def health_port(probes: Probes, port: int | None) -> Iterator[None]:
    """Answer on this port of every interface while the block runs; with None do nothing.

    Raises UsageError when the port cannot be opened.
    """
    if port is None:
        yield
        return
    try:
        server = Server(probes, port)
    except OSError as error:
        raise UsageError(f"--health-port {port} cannot be opened: {error.strerror or error}.") from error
    _close_in_forks()
    with server:
        start_thread(lambda: server.serve_forever(LOOK_EVERY), name="health port")
        _running.add(server)
        try:
            yield
        finally:
            _running.discard(server)
            server.shutdown()


@cache
def _close_in_forks() -> None:
    # A process that a handler forks may outlive this one, and would keep the port from its successor.
    os.register_at_fork(after_in_child=_forget_all)


def _forget_all() -> None:
    for server in _running:
        server.forget()


class Server(socketserver.ThreadingTCPServer):
    """Takes connections and ends those that last too long or are too many, the oldest first."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, probes: Probes, port: int) -> None:
        self.probes = probes
        # When each connection was accepted; the oldest comes first.
        self._open: dict[Any, float] = {}
        self._lock = threading.Lock()
        if socket.has_dualstack_ipv6():
            self.address_family = socket.AF_INET6
        super().__init__(("", port), _Handler)

    def server_bind(self) -> None:
        """Bind for IPv4 as well."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def get_request(self) -> Any:
        """Accept a connection; called at once again while one waits, also if no file is left to open for it."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(LOOK_EVERY)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread; called for each connection."""
        with self._lock:
            while len(self._open) >= MOST:
                self._cut(next(iter(self._open)))
            self._open[request] = time.monotonic()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """End connections that are too old; called several times a second."""
        too_old = time.monotonic() - LIFETIME
        with self._lock:
            for request in [request for request, taken_at in self._open.items() if taken_at < too_old]:
                self._cut(request)

    def shutdown_request(self, request: Any) -> None:
        """End a connection that was answered, or could not be."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log the error, unless the client just went away before it had its answer."""
        if not isinstance(error := sys.exception(), OSError):
            logger.error("the health port could not answer", exc_info=error)

    def forget(self) -> None:
        """Close the sockets that a fork copied into this process; the parent keeps its own."""
        for end in (self.socket, *self._open):
            end.close()

    def _cut(self, request: Any) -> None:
        # Its thread, which waits for more, reads the end of the connection.
        del self._open[request]
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version = "django_jobs"
    sys_version = ""
    # Seconds for each read; see LIFETIME.
    timeout = LIFETIME

    def do_GET(self) -> None:
        """Answer a probe."""
        probes = self.server.probes
        probe = {"/healthz": probes.alive, "/readyz": probes.ready}.get(self.path.partition("?")[0])
        if probe is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        answer = probe()
        self._send(HTTPStatus.OK if answer.is_good else HTTPStatus.SERVICE_UNAVAILABLE, answer)

    def do_HEAD(self) -> None:
        """See do_GET()."""
        self.do_GET()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse a request without repeating anything of it."""
        status = HTTPStatus(code)
        self._send(status, Answer(status=status.phrase.lower()))

    def _send(self, code: HTTPStatus, answer: Answer) -> None:
        body = json.dumps({"status": answer.status, "problems": list(answer.problems)}).encode() + b"\n"
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: Any, **kwargs: Any) -> None:
        """Say nothing: probes come every few seconds."""
