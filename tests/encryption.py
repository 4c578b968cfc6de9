"""TLS before the PostgreSQL under test, which may know none; where openssl is not installed the run says so."""

from __future__ import annotations

import contextlib
import select
import shutil
import socket
import ssl
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

BINARY = shutil.which("openssl")

# What a client sends first that wants TLS: a length, and a number in place of the version.
SSL_REQUEST = struct.pack("!ii", 8, 80877103)


class Encryption:
    """Takes connections with TLS on a port of its own and passes what they carry on; others are turned away."""

    def __init__(self, certificate: Path, key: Path, server: dict[str, Any]) -> None:
        """Take the entry of DATABASES that leads to the server."""
        self._server = server
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate, key)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self.connections = 0
        threading.Thread(target=self._accept, name="encryption", daemon=True).start()

    @property
    def url(self) -> str:
        """What leads to it; the name of the database comes from elsewhere."""
        user, password = (quote(self._server[key], safe="") for key in ("USER", "PASSWORD"))
        return f"postgres://{user}:{password}@127.0.0.1:{self._listener.getsockname()[1]}/"

    def close(self) -> None:
        with self._lock:
            for end in (self._listener, *self._open):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), name="encrypted", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            if client.recv(8, socket.MSG_WAITALL) != SSL_REQUEST:
                return
            client.sendall(b"S")
            with self._context.wrap_socket(client, server_side=True) as outside, self._connect() as inside:
                with self._lock:
                    self.connections += 1
                    self._open |= {outside, inside}
                try:
                    pass_on(outside, inside)
                finally:
                    with self._lock:
                        self._open -= {outside, inside}

    def _connect(self) -> socket.socket:
        host, port = self._server["HOST"], int(self._server["PORT"] or 5432)
        if not host.startswith("/"):
            return socket.create_connection((host, port))
        inside = socket.socket(socket.AF_UNIX)
        inside.connect(f"{host}/.s.PGSQL.{port}")
        return inside


def pass_on(outside: ssl.SSLSocket, inside: socket.socket) -> None:
    """Carry what comes on either side to the other, until one ends; in one thread, since TLS is not for two."""
    while True:
        ready = [outside] if outside.pending() else select.select([outside, inside], [], [])[0]
        for source in ready:
            data = source.recv(65536)
            if not data:
                return
            (inside if source is outside else outside).sendall(data)


@contextlib.contextmanager
def encryption(home: Path) -> Iterator[Encryption]:
    """Run it before the server of this test, with a certificate that it signs itself."""
    from django.db import connection

    certificate, key = home / "certificate.pem", home / "key.pem"
    subject = ("-subj", "/CN=127.0.0.1", "-days", "2")
    subprocess.run(
        [str(BINARY), "req", "-x509", "-newkey", "rsa:2048", "-nodes", *subject, "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )
    front = Encryption(certificate, key, connection.settings_dict)
    try:
        yield front
    finally:
        front.close()
