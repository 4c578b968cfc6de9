"""`manage.py runjobs`: run jobs, fire cron ticks, and clean up the tables.

Exit codes:

- 0: stopped as asked, by a signal, `--max-time`, `--max-jobs`, `--max-memory` or the end of `--once`
- 1: something broke while running, or outcomes could not be written at the end; `--check` found no live process
- 2: a wrong option or setting
- 3: the database cannot be reached or refuses the login, or its tables are missing
- 4: a child of `--processes` asks to be replaced; only its supervisor sees this
- 130, 143: ended at once by a second SIGINT or SIGTERM; running executions are rescued
"""

from __future__ import annotations

import contextlib
import io
import signal
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, OutputWrapper, SystemCheckError

from django_jobs.management.streams import escape_unencodable, flush_or_discard, open_missing
from django_jobs.runtime.child import Child
from django_jobs.runtime.console import console
from django_jobs.runtime.exits import FAILED, NO_DATABASE, USAGE, end_soon
from django_jobs.runtime.live_processes import missing
from django_jobs.runtime.options import ROLES, Options, UsageError
from django_jobs.runtime.reload import run_reloading
from django_jobs.runtime.runner import Runner
from django_jobs.runtime.startup import DatabaseNotReady
from django_jobs.runtime.supervisor import Supervisor
from django_jobs.runtime.watching import only_watches
from django_jobs.text import one_line


class Command(BaseCommand):
    """Arguments only; the work is done by runtime.Runner."""

    help = "Runs background jobs and cron jobs; without --worker, --scheduler or --sweep it takes on all three roles."
    requires_migrations_checks = False

    # Was the process started for this command?
    _is_own_process = False
    # Is it to say only what needs somebody's attention?
    _is_silent = False
    _child: Child | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        open_missing()
        super().__init__(*args, **kwargs)

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the options."""
        parser.add_argument("--worker", action="store_true", help="Claim and run executions.")
        parser.add_argument("--scheduler", action="store_true", help="Fire the ticks of cron jobs.")
        parser.add_argument("--sweep", action="store_true", help="Announce stale executions again, trim finished ones.")
        parser.add_argument(
            "--queues",
            type=_names,
            metavar="A,B",
            help="Serve these queues only (default: the setting QUEUES, or any).",
        )
        parser.add_argument("--exclude", type=_names, default=[], metavar="A,B", help="Do not serve these queues.")
        parser.add_argument("--concurrency", type=int, metavar="N", help="Run N at once (default: CONCURRENCY).")
        parser.add_argument("--processes", type=int, metavar="N", help="Start N workers and replace those that end.")
        parser.add_argument("--once", action="store_true", help="Run what is due now, then end; for a system cron.")
        parser.add_argument("--max-time", type=float, metavar="S", help="End after S seconds.")
        parser.add_argument("--max-jobs", type=int, metavar="N", help="End after N runs; with --processes, each.")
        parser.add_argument(
            "--max-memory", type=float, metavar="MB", help="End after a run that leaves more than MB megabytes in use."
        )
        parser.add_argument(
            "--health-port", type=int, metavar="P", help="Answer GET /healthz and /readyz on this port."
        )
        parser.add_argument(
            "--heartbeat-file", type=Path, metavar="PATH", help="Touch this file while all roles are alive."
        )
        parser.add_argument(
            "--check", action="store_true", help="Only check whether a live process exists; exit code 0 if so."
        )
        parser.add_argument("--reload", action="store_true", help="Restart when a source file changes (development).")

    def run_from_argv(self, argv: list[str]) -> None:
        """Run as a process of its own, which ends when its work does."""
        code = 1
        escape_unencodable()
        self._is_own_process, self._child = True, Child.of_environment()
        try:
            super().run_from_argv(argv)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            raise
        finally:
            # A second Ctrl-C that comes so late ends it as well, and not with the traceback of a KeyboardInterrupt.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            end_soon(code)
            flush_or_discard()

    def execute(self, *args: Any, **options: Any) -> Any:
        """Note for check(), which gets no options, whether its warnings are to be shown."""
        self._is_silent = not options["verbosity"]
        return super().execute(*args, **options)

    def check(self, *args: Any, **kwargs: Any) -> Any:
        """Run the system checks; an error that they find ends the command with the exit code of a wrong setting.

        Mere warnings are not shown with --verbosity 0: a system cron would mail them at each call.

        Checks that query a database are left out, as in Django 6.1: it may be down, and is waited for. None run in a
        child, whose supervisor has run them, nor in the watching process of --reload, since they import the sources.
        """
        if self._child is not None or only_watches():
            return []
        kwargs["databases"] = []
        shown = self.stderr
        if self._is_silent:
            self.stderr = OutputWrapper(io.StringIO())
        try:
            return super().check(*args, **kwargs)
        except SystemCheckError as error:
            error.returncode = USAGE
            raise
        except ImproperlyConfigured as error:
            # Raised by another app's check that imports what a setting names, such as the backend of a cache.
            raise CommandError(one_line(error), returncode=USAGE) from error
        finally:
            self.stderr = shown

    def handle(self, *args: Any, **options: Any) -> None:
        """Run until stopped; leave with an exit code other than 0 when something went wrong."""
        with console(self.stderr, options["verbosity"], with_pid=options["processes"] is not None):
            if options["check"]:
                self._check_workers(options)
            elif options["reload"]:
                self._check_reload(options)
                run_reloading(self._run_reporting, lambda: self._runner(self._options(options), options))
            elif code := self._run(self._make(options)):
                raise SystemExit(code)

    def _check_reload(self, options: dict[str, Any]) -> None:
        # First, since no change of a source mends the command line.
        self._options(options)
        self._refuse_to_start_another("--reload")
        if options["once"]:
            raise CommandError("--once ends by itself and --reload does not: give only one of them.", returncode=USAGE)
        if options["processes"] is not None:
            raise CommandError(
                "--reload is for development, where one process is enough: leave out --processes.", returncode=USAGE
            )

    def _check_workers(self, options: dict[str, Any]) -> None:
        # Validates the names first: a wrong one is a mistake, not a missing process. Excluded queues are not asked for.
        served = self._options(options).served
        try:
            lacking = missing(
                roles=[role for role in ROLES if options[role]],
                queues=() if options["queues"] is None else sorted(served.names),
            )
        except DatabaseNotReady as error:
            raise CommandError(str(error), returncode=NO_DATABASE) from error
        if lacking:
            raise CommandError(f"There is no live {', no live '.join(lacking)}.", returncode=FAILED)

    def _options(self, options: dict[str, Any]) -> Options:
        try:
            return Options.of(
                roles=[role for role in ROLES if options[role]],
                queues=options["queues"],
                exclude=options["exclude"],
                concurrency=options["concurrency"],
                once=options["once"],
                max_time=options["max_time"],
                max_jobs=options["max_jobs"],
                max_memory=options["max_memory"],
                processes=options["processes"],
                health_port=options["health_port"],
                heartbeat_file=options["heartbeat_file"],
            )
        except (UsageError, ImproperlyConfigured) as error:
            raise CommandError(str(error), returncode=USAGE) from error

    def _make(self, options: dict[str, Any]) -> Runner | Supervisor:
        chosen = self._options(options)
        if self._child is not None:
            return Runner(self._child.narrow(chosen), child=self._child)
        if chosen.processes is None:
            return self._runner(chosen, options)
        self._refuse_to_start_another("--processes")
        return Supervisor(chosen, say=self._say if options["verbosity"] else lambda line: None)

    def _refuse_to_start_another(self, option: str) -> None:
        if not self._is_own_process:
            raise CommandError(
                f"{option} starts the command line of this process again, so it works only from the command line: "
                f"manage.py runjobs {option}.",
                returncode=USAGE,
            )

    def _runner(self, chosen: Options, options: dict[str, Any]) -> Runner:
        return Runner(chosen, say=self._say if options["verbosity"] else lambda line: None)

    def _run(self, runner: Runner | Supervisor) -> int:
        try:
            return runner.run()
        except DatabaseNotReady as error:
            raise CommandError(str(error), returncode=NO_DATABASE) from error
        except (UsageError, ImproperlyConfigured) as error:
            raise CommandError(str(error), returncode=USAGE) from error

    def _run_reporting(self, runner: Runner) -> int:
        try:
            return self._run(runner)
        except CommandError as error:
            self.stderr.write(f"CommandError: {error}")
            return error.returncode

    def _say(self, line: str) -> None:
        # The reader may be gone.
        with contextlib.suppress(OSError):
            self.stdout.write(line)


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name.strip()]
