"""Routers for tests."""

from __future__ import annotations

from typing import Any


class Elsewhere:
    """The executions live in the second database."""

    def db_for_read(self, model: Any, **hints: Any) -> str | None:
        return "other" if model._meta.app_label == "django_jobs" else None

    db_for_write = db_for_read


class Replica:
    """Reads go to the second database, writes to the default one."""

    def db_for_read(self, model: Any, **hints: Any) -> str:
        return "other"

    def db_for_write(self, model: Any, **hints: Any) -> str:
        return "default"
