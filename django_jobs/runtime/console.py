"""Show our own log lines on the terminal of `runjobs` when the project's LOGGING does not handle them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

FORMAT = "%(asctime)s %(levelname)-7s %(message)s"
FORMAT_WITH_PID = "%(asctime)s %(levelname)-7s [%(process)d] %(message)s"
LEVELS = {0: logging.WARNING, 1: logging.INFO, 2: logging.INFO, 3: logging.DEBUG}


@contextlib.contextmanager
def console(stream: Any, verbosity: int, *, with_pid: bool = False) -> Iterator[None]:
    """Write the lines of the logger `django_jobs` to the stream, unless they have a handler already.

    With the process id where several processes write. Other loggers, the root among them, are left as they are.
    """
    logger = logging.getLogger("django_jobs")
    if logger.hasHandlers() or logger.level != logging.NOTSET:
        yield
        return
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter(FORMAT_WITH_PID if with_pid else FORMAT))
    logger.addHandler(handler)
    logger.setLevel(LEVELS.get(verbosity, logging.DEBUG))
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
