"""What happens in a process that a job made; importable without Django, as the start method spawn asks for."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

# So many runs of multiplying() have to be there at once.
TOGETHER = 4


def make(name: str) -> None:
    """Make a Thing over a connection of this process."""
    import django

    django.setup()
    from tests.acc.models import Thing

    Thing.objects.create(name=name)
    assert Thing.objects.filter(name=name).exists()


def wait_for_ever() -> None:
    """Wait to be terminated."""
    import time

    time.sleep(600)


def opened() -> list[weakref.ref[Any]]:
    """Return the wrappers of Django whose connections are open, whatever thread they belong to."""
    from django.db.backends.base.base import BaseDatabaseWrapper

    known = [thing for thing in gc.get_objects() if isinstance(thing, BaseDatabaseWrapper)]
    return [weakref.ref(wrapper) for wrapper in known if wrapper.connection is not None]


def collect(connections: list[weakref.ref[Any]]) -> None:
    """Collect garbage, and exit with the number of those that are gone."""
    gc.collect()
    sys.exit(sum(ref() is None for ref in connections))
