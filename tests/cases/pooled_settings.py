"""The settings of the tests behind PgBouncer, with an alias that goes past it."""

from __future__ import annotations

import os

from tests import settings
from tests.engines import database_settings
from tests.settings import *  # noqa: F403 - a settings module is made of another one this way

_default = settings.DATABASES["default"] | {"DISABLE_SERVER_SIDE_CURSORS": "SERVER_SIDE_CURSORS" not in os.environ}
DATABASES = settings.DATABASES | {"default": _default}
if (url := os.environ.get("DIRECT_URL")) is not None:
    DATABASES["direct"] = database_settings("postgres", url) | {"NAME": _default["NAME"]}
