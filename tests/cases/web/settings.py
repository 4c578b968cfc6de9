from __future__ import annotations

from tests.settings import *  # noqa: F403
from tests.settings import DJANGO_JOBS as BASE

ROOT_URLCONF = "tests.cases.web.urls"
MIDDLEWARE: list[str] = []
DJANGO_JOBS = {**BASE, "DISPATCHER": "direct"}
