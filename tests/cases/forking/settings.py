"""The settings of the tests, with the jobs that make processes; POOL and SSLMODE change how they connect."""

from __future__ import annotations

import json
import os

from tests import settings
from tests.settings import *  # noqa: F403 - a settings module is made of another one this way

INSTALLED_APPS = [*settings.INSTALLED_APPS, "tests.cases.forking"]
_default = settings.DATABASES["default"]
_options = dict(_default.get("OPTIONS", {}))
if pool := json.loads(os.environ.get("POOL", "false")):
    _options["pool"] = pool
if mode := os.environ.get("SSLMODE"):
    _options["sslmode"] = mode
DATABASES = settings.DATABASES | {"default": _default | {"OPTIONS": _options}}
