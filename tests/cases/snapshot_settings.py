"""The settings of the tests with the stubborn jobs, and transactions that keep what they saw first."""

from __future__ import annotations

from tests.cases.stubborn import settings
from tests.cases.stubborn.settings import *  # noqa: F403 - a settings module is made of another one this way

# 3 is psycopg's IsolationLevel.REPEATABLE_READ, which cannot be imported where psycopg is not installed.
_level = {"postgres": 3, "mysql": "repeatable read"}[settings.ENGINE]
_default = settings.DATABASES["default"]
DATABASES = settings.DATABASES | {
    "default": _default | {"OPTIONS": _default.get("OPTIONS", {}) | {"isolation_level": _level}}
}
