"""The settings of the tests, with SQLite as Django sets it up by itself: no WAL, deferred transactions, 5 seconds."""

from __future__ import annotations

from tests import settings
from tests.settings import *  # noqa: F403 - a settings module is made of another one this way

DATABASES = {alias: database | {"OPTIONS": {}} for alias, database in settings.DATABASES.items()}
