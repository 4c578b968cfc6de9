"""The settings of the tests, with the jobs that make processes, and Django's pool of connections as POOL says."""

from __future__ import annotations

import json
import os

from tests import settings
from tests.settings import *  # noqa: F403 - a settings module is made of another one this way

INSTALLED_APPS = [*settings.INSTALLED_APPS, "tests.cases.forking"]
_default = settings.DATABASES["default"]
_pool = json.loads(os.environ.get("POOL", "false"))
DATABASES = settings.DATABASES | {
    "default": _default | {"OPTIONS": _default.get("OPTIONS", {}) | ({"pool": _pool} if _pool else {})}
}
