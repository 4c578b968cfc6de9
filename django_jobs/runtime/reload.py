"""Run `runjobs --reload`: a process that is restarted with each change of the sources, and one that watches over it."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from django.apps import apps
from django.utils import autoreload

from django_jobs.runtime.exits import DONE, FAILED, LINGER
from django_jobs.runtime.runner import Runner
from django_jobs.runtime.stopping import SIGNALS, StopRequests, end_at_once
from django_jobs.runtime.watching import is_watched

logger = logging.getLogger("django_jobs.runner")

# Seconds. A person waits for the reload, so running executions are handed back soon.
DRAIN = 1.0
PATIENCE = 10.0
# Exit code of a child whose sources have changed; set by Django's reloader.
CHANGED = 3
LOOK_EVERY = 0.1
LOOK_FOR_CHANGES_EVERY = 1.0


def run_reloading(run: Callable[[Runner], int], make: Callable[[], Runner]) -> None:
    """Run in a child process that is restarted whenever a source file changes; `run` reports mistakes and errors.

    Django's own parent process would not do: a quarter of a second after Ctrl-C it kills the child, which has not yet
    handed back its executions; and it ends with the first mistake in a source.
    """
    if is_watched():
        _be_child(run, make)
    elif code := _Parent().run():
        raise SystemExit(code)


def _be_child(run: Callable[[Runner], int], make: Callable[[], Runner]) -> None:
    """Run until a signal comes or a source changes.

    The reloader has the main thread, so both end the process by leaving it, and running executions are handed back.
    """
    runners: list[Runner] = []
    # Why it ends; the first reason counts.
    reasons: list[str] = []
    ended = threading.Event()

    def main() -> None:
        autoreload.raise_last_exception()
        runners.append(runner := make())
        try:
            code = run(runner)
        finally:
            ended.set()
        if code != DONE:
            sys.stdout.flush()
            sys.stderr.flush()
            # Not the code itself, which may equal CHANGED.
            os._exit(FAILED)

    def leave(number: int, frame: Any) -> None:
        # A terminal signals this process and the parent, which passes it on, and which kills at a second signal.
        if not reasons:
            reasons.append(signal.Signals(number).name)
            sys.exit(DONE)

    for number in SIGNALS:
        # An ignored signal stays ignored: nohup wants that.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, leave)
    try:
        autoreload.start_django(autoreload.get_reloader(), main)
    finally:
        reasons.append("reload")
        for runner in runners:
            runner.stop(reasons[0], drain=DRAIN)
            ended.wait(PATIENCE)


class _Parent:
    """Starts the child again and again, and lets it end in order on a signal."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._requests = StopRequests(insisted=self._kill)
        self._requests.is_starting = False

    def run(self) -> int:
        """Run until the child ends as asked; return its exit code."""
        with self._requests.signals():
            while True:
                # Taken before the start: a file that is saved while the child fails counts as a change.
                sources = _sources()
                code = self._run_child()
                if code == DONE or self._requests.wait(0) is not None:
                    return max(code, DONE)
                if code != CHANGED:
                    logger.warning("ended with exit code %d, see above; restarts when a source file changes", code)
                    while _sources() == sources:
                        if self._requests.wait(LOOK_FOR_CHANGES_EVERY) is not None:
                            return DONE

    def _run_child(self) -> int:
        environment = {**os.environ, autoreload.DJANGO_AUTORELOAD_ENV: "true"}
        # Open descriptors are inherited: the command line may name one.
        self._child = child = subprocess.Popen(  # noqa: S603 - this very command
            autoreload.get_child_arguments(), env=environment, close_fds=False
        )
        while (code := child.poll()) is None:
            if self._requests.wait(LOOK_EVERY) is not None:
                return self._end(child)
        return code

    def _end(self, child: subprocess.Popen[bytes]) -> int:
        """Tell the child to end, which may know already; kill it when it takes too long."""
        child.terminate()
        try:
            return child.wait(PATIENCE + LINGER + 1)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            return FAILED

    def _kill(self, number: int) -> None:
        if self._child is not None:
            self._child.kill()
        end_at_once(number)


def _sources() -> dict[Path, float]:
    """Return when each source file of the project, imported yet or not, was last modified."""
    reloader = autoreload.StatReloader()
    for app in apps.get_app_configs():
        if not {"site-packages", "dist-packages"} & set(Path(app.path).parts):
            reloader.watch_dir(app.path, "**/*.py")
    return dict(reloader.snapshot_files())
