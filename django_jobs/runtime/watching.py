"""Tell the process of `runjobs --reload` that only watches: it must outlive code that cannot be loaded."""

from __future__ import annotations

import os
import sys

from django.utils.autoreload import DJANGO_AUTORELOAD_ENV


def only_watches() -> bool:
    """Whether this process starts those that run jobs anew, so that what is wrong in the sources is theirs to tell.

    Asked while Django is set up, before any command has parsed its arguments.
    """
    return sys.argv[1:2] == ["runjobs"] and "--reload" in sys.argv and not is_watched()


def is_watched() -> bool:
    """Whether this process is one that is started anew."""
    return os.environ.get(DJANGO_AUTORELOAD_ENV) == "true"
