"""The settings of the tests with the stubborn jobs, as a developer has them: DEBUG remembers every query."""

from __future__ import annotations

from tests.cases.stubborn.settings import *  # noqa: F403 - a settings module is made of another one this way

DEBUG = True
