"""What happens in a process that a job made; importable without Django, as the start method spawn asks for."""

from __future__ import annotations


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
