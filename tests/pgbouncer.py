"""PgBouncer before the PostgreSQL under test; where it is not installed the run says so at its end."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.engines import die_with_parent
from tests.support import free_port, wait_for

# Debian puts it where only root looks.
BINARY = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/usr/local/sbin")


class PgBouncer:
    """A pooler on a port of its own, that lets everybody in as the user of the tests."""

    def __init__(self, home: Path, server: dict[str, Any]) -> None:
        """Take the entry of DATABASES that leads to the server."""
        self._home, self._server = home, dict(server)
        self.log_path = home / "log"
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """What leads to it; the name of the database comes from elsewhere."""
        return f"postgres://tests@127.0.0.1:{self.port}/postgres"

    @property
    def log(self) -> str:
        """What it wrote so far."""
        return self.log_path.read_text(errors="replace")

    def start(self) -> None:
        """Start it in transaction mode, and wait until it answers."""
        # It refuses to run as root.
        user: dict[str, Any] = {}
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            user = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
            os.chown(self._home, nobody.pw_uid, nobody.pw_gid)
        self._configure("transaction")
        with self.log_path.open("ab") as output:
            self._process = subprocess.Popen(
                [str(BINARY), str(self._home / "ini")],
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                cwd=self._home,
                start_new_session=True,
                preexec_fn=die_with_parent,
                **user,
            )
        wait_for(self._answers, 15, "PgBouncer answers")

    def change_mode(self, mode: str) -> None:
        """Have it pool by "transaction" or "session" from now on."""
        self._configure(mode)
        assert self._process is not None
        self._process.send_signal(signal.SIGHUP)

    def stop(self) -> None:
        if self._process is not None:
            # At once, without waiting for clients.
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(10)

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True
        return False

    def _configure(self, mode: str) -> None:
        wanted = {"host": "HOST", "port": "PORT", "user": "USER", "password": "PASSWORD"}
        server = {key: str(self._server[name]) for key, name in wanted.items() if self._server[name]}
        target = " ".join("{}='{}'".format(key, value.replace("'", "''")) for key, value in server.items())
        path = self._home / "ini"
        path.write_text(
            f"[databases]\n* = {target}\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {self.port}\n"
            f"unix_socket_dir =\nauth_type = any\npool_mode = {mode}\ndefault_pool_size = 20\nmax_client_conn = 200\n"
        )
        os.chown(path, self._home.stat().st_uid, -1)
        path.chmod(0o600)


@contextlib.contextmanager
def pgbouncer() -> Iterator[PgBouncer]:
    """Run one before the server of this test."""
    from django.db import connection

    home = Path(tempfile.mkdtemp(prefix="pgbouncer-"))
    pooler = PgBouncer(home, connection.settings_dict)
    try:
        pooler.start()
        yield pooler
    finally:
        pooler.stop()
        shutil.rmtree(home, ignore_errors=True)
