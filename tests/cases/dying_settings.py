"""The settings of the tests, with a scheduler whose thread dies once: until the file named by DIED is there."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

from django.apps import AppConfig

from tests import settings
from tests.settings import *  # noqa: F403 - a settings module is made of another one this way


class Dying(AppConfig):
    name = "tests.cases"
    label = "dying"

    def ready(self) -> None:
        from django_jobs.runtime.scheduler import Scheduler

        tick, died = Scheduler.tick, Path(os.environ["DIED"])

        def die_once(self: Scheduler, now: datetime | None = None) -> float:
            if not died.exists():
                died.touch()
                raise SystemExit("the scheduler breaks")
            return tick(self, now)

        Scheduler.tick = die_once  # type: ignore[method-assign]


INSTALLED_APPS = [*settings.INSTALLED_APPS, "tests.cases.dying_settings.Dying"]
