"""Run `runjobs` under Django's autoreloader: for development only."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable

from django.utils import autoreload

from django_jobs.runtime.exits import DONE, FAILED
from django_jobs.runtime.runner import Runner

# A person waits for the reload: what runs is handed back soon.
DRAIN = 1.0
PATIENCE = 10.0


def run_reloading(run: Callable[[Runner], int], make: Callable[[], Runner]) -> None:
    """Run in a child process that is started anew whenever a source file changes; `run` reports mistakes and errors.

    The reloader has the child's main thread, so signals and changes end it by leaving that thread: what runs is then
    handed back on the way out.
    """

    def main() -> None:
        autoreload.raise_last_exception()
        runner, ended = make(), threading.Event()

        def end() -> None:
            runner.stop("reload", drain=DRAIN)
            ended.wait(PATIENCE)

        atexit.register(end)
        try:
            code = run(runner)
        finally:
            ended.set()
        if code != DONE:
            sys.stdout.flush()
            sys.stderr.flush()
            # Not the code itself: the reloader takes 3 for a change of the sources.
            os._exit(FAILED)

    autoreload.run_with_reloader(main)
