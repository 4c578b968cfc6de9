"""The settings of the tests, with the app that is deployed in two versions."""

from __future__ import annotations

from tests import settings
from tests.settings import *  # noqa: F403 - a settings module is made of another one this way

INSTALLED_APPS = [*settings.INSTALLED_APPS, "tests.cases.deployed"]
