"""What the tests of the verbs share."""

from __future__ import annotations

from datetime import datetime

import pytest

from django_jobs.models import Worker
from tests.factories import WorkerFactory


@pytest.fixture
def worker(now: datetime) -> Worker:
    return WorkerFactory(now=now)
