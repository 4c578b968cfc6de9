"""The settings of the tests, with a server that ends sessions after a second without a statement."""

from __future__ import annotations

import os

from tests import settings
from tests.settings import *  # noqa: F403 - a settings module is made of another one this way

_options = {
    "postgres": {"options": "-c idle_session_timeout=1s"},
    "mysql": {"init_command": "SET SESSION wait_timeout = 1"},
}
_default = settings.DATABASES["default"]
_age = os.environ["CONN_MAX_AGE"]
DATABASES = settings.DATABASES | {
    "default": _default
    | {
        "OPTIONS": _default.get("OPTIONS", {}) | _options[settings.ENGINE],
        "CONN_MAX_AGE": None if _age == "None" else int(_age),
        "CONN_HEALTH_CHECKS": False,
    }
}
