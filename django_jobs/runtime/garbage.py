"""Keep Python's garbage collector from traversing everything a process has loaded again and again; for the runner."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

# New containers between two collections of the youngest generation. Python's default is 700, or 2,000 in newer
# versions, which a hundred short runs reach.
YOUNGEST = 10_000


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Exclude objects that exist now from collections, and make collections of others rarer, until the block ends.

    A process that runs short jobs would spend a tenth of its time on them. A collector that the project has switched
    off stays off, and a higher threshold is kept.
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
