"""Recognize the watching process of `runjobs --reload`, which must outlive code that cannot be loaded."""

from __future__ import annotations

import os
import sys

from django.utils.autoreload import DJANGO_AUTORELOAD_ENV


def only_watches() -> bool:
    """Whether this process only starts and restarts the one that runs jobs, which reports mistakes in the sources.

    Asked while Django is set up, before any command has parsed its arguments.
    """
    return sys.argv[1:2] == ["runjobs"] and "--reload" in sys.argv and not is_watched()


def is_watched() -> bool:
    """Whether this process is the one that is restarted."""
    return os.environ.get(DJANGO_AUTORELOAD_ENV) == "true"
