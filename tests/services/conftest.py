"""Fixtures for the services: a dispatcher that remembers, and jobs of a test's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from django_jobs import registry
from django_jobs.dispatchers import get_dispatcher
from tests.dispatchers.recording import RECORDING, RecordingDispatcher

if TYPE_CHECKING:
    from pytest_django import Settings


@pytest.fixture
def recorder(settings: Settings) -> RecordingDispatcher:
    """The dispatcher in force, which writes down what it is told."""
    # An option that equals nothing else makes a dispatcher of this test's own.
    spec = {"BACKEND": RECORDING, "OPTIONS": {"test": object()}}
    settings.DJANGO_JOBS = {**settings.DJANGO_JOBS, "DISPATCHER": spec}
    dispatcher = get_dispatcher()
    assert isinstance(dispatcher, RecordingDispatcher)
    return dispatcher


@pytest.fixture
def own_jobs() -> Iterator[None]:
    """Jobs that the test defines are forgotten after it."""
    with registry.isolated():
        yield
