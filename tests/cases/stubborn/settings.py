"""The settings of the tests, with the stubborn jobs."""

from __future__ import annotations

from tests import settings
from tests.settings import *  # noqa: F403 - a settings module is made of another one this way

INSTALLED_APPS = [*settings.INSTALLED_APPS, "tests.cases.stubborn"]
