"""Run the whole demo: the database, the sample data, the shop and a worker, until Ctrl-C."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError, CommandParser

if TYPE_CHECKING:
    from collections.abc import Callable

# Seconds. `runjobs` drains and hands back within 27 s; a process that is still there after that is killed.
PATIENCE = 30.0

WELCOME = """
  The shop    http://127.0.0.1:{port}/
  The admin   http://127.0.0.1:{port}/admin/   {login}

  1. Order something and watch its jobs on the order's page.
  2. There, press "Call the flaky webhook": it fails twice, then works.
  3. On the first page, start a stock take, or the import of a catalogue; watch and cancel it in the admin.
  4. In the admin's list of executions, look at the shop.resize_image that fails on purpose, and retry it.
  5. The admin's page of jobs shows the cron jobs, and runs them now.
  6. The receipts are files in {mail}.

  Ctrl-C ends both processes. If a job is running, it gets 20 s to finish; another Ctrl-C ends it at once.
"""


class StopDemoError(Exception):
    """A signal asked the demo to end."""


class Command(BaseCommand):
    """Keep `runserver` and `runjobs` as two children and end them together."""

    help = "Migrate, add sample data, then run the shop and a worker until Ctrl-C."

    def add_arguments(self, parser: CommandParser) -> None:
        """Take the port of the shop."""
        parser.add_argument("--port", type=int, default=8000, help="the shop's port on 127.0.0.1 (default 8000)")

    def handle(self, *args: Any, **options: Any) -> None:
        """See the module."""
        port: int = options["port"]
        self._refuse_a_taken_port(port)
        call_command("migrate", verbosity=0, interactive=False)
        call_command("demo_data", stdout=self.stdout)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)
        children: dict[str, subprocess.Popen[bytes]] = {}
        try:
            children["runserver"] = self._start("runserver", f"127.0.0.1:{port}", "--noreload", "--skip-checks")
            children["runjobs"] = self._start("runjobs")
            # The children write a lot when they start; the welcome should be below that.
            self._wait(children, until=lambda: _answers(port))
            login = "login: admin, password: admin" if settings.DEBUG else ""
            self.stdout.write(WELCOME.format(port=port, login=login, mail=settings.EMAIL_FILE_PATH))
            # Else it stays in the buffer until the end where the output is a pipe or a file.
            self.stdout.flush()
            self._wait(children, until=lambda: False)
        except StopDemoError:
            self.stdout.write("Stopping ...")
        finally:
            self._end(children)

    def _refuse_a_taken_port(self, port: int) -> None:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except (OSError, OverflowError) as error:
                raise CommandError(f"Port {port} cannot be used ({error}); choose another one with --port.") from error

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        # A session of its own: a Ctrl-C in the terminal then reaches only this process, which tells each child once.
        return subprocess.Popen([sys.executable, sys.argv[0], *arguments], start_new_session=True)  # noqa: S603

    def _wait(self, children: dict[str, subprocess.Popen[bytes]], *, until: Callable[[], bool]) -> None:
        while not until():
            for name, child in children.items():
                if child.poll() is not None:
                    raise CommandError(f"{name} ended by itself with code {child.returncode}; see its lines above.")
            time.sleep(0.3)

    def _end(self, children: dict[str, subprocess.Popen[bytes]]) -> None:
        def tell(*_signal: object) -> None:
            for child in children.values():
                if child.poll() is None:
                    child.terminate()

        for number in (signal.SIGINT, signal.SIGTERM):
            # At the second one, runjobs does not wait for what runs.
            signal.signal(number, tell)
        tell()
        for child in children.values():
            try:
                child.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    def _stop(self, number: int, frame: object) -> None:
        raise StopDemoError


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
