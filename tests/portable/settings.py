"""The settings of the tests, with an app of tasks and the backend that runs them."""

from __future__ import annotations

import os

import django

from tests.settings import *  # noqa: F403 - the same, but for what follows
from tests.settings import INSTALLED_APPS

INSTALLED_APPS = [*INSTALLED_APPS, "tests.portable"]
FRAMEWORK = "django.tasks"
if django.VERSION < (6, 0):
    FRAMEWORK = "django_tasks"
    # It registers the framework's checks.
    INSTALLED_APPS.append(FRAMEWORK)
TASKS = {
    "default": {
        "BACKEND": "django_jobs.backends.JobsBackend",
        "QUEUES": os.environ.get("TASKS_QUEUES", "default,mail").split(","),
    },
    "elsewhere": {"BACKEND": f"{FRAMEWORK}.backends.dummy.DummyBackend"},
}
