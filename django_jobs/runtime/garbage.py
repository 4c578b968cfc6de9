"""Keep Python's garbage collector from walking again and again through what a process has loaded; for the runner."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

# New containers between two collections of the youngest. Python counts to a few hundred, or to 2,000 from 3.12 on,
# which a hundred short runs bring about.
YOUNGEST = 10_000


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Leave what is loaded now out of collections, and make those of the rest rarer, until the block ends.

    A process that runs short jobs spends a tenth of its time on them otherwise. A project that has switched the
    collector off keeps it off, and one that counts further keeps that.
    """
    youngest, *older = gc.get_threshold()
    gc.collect()
    gc.freeze()
    if youngest:
        gc.set_threshold(max(youngest, YOUNGEST), *older)
    try:
        yield
    finally:
        gc.set_threshold(youngest, *older)
        gc.unfreeze()
