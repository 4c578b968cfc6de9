"""The settings of the tests, with the executions in the second database and connections that end after each use."""

from __future__ import annotations

from tests import settings
from tests.settings import *  # noqa: F403 - a settings module is made of another one this way

DATABASE_ROUTERS = ["tests.cases.routers.Elsewhere"]
DATABASES = {alias: database | {"CONN_MAX_AGE": 0} for alias, database in settings.DATABASES.items()}
