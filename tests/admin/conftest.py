from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.admin import site
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.test import Client

from django_jobs.models import JobExecution
from tests.admin.support import Admin
from tests.factories import JobExecutionFactory


@pytest.fixture(autouse=True)
def narrow_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the admin's own side bar, which every page would draw again."""
    monkeypatch.setattr(site, "enable_nav_sidebar", False)


@pytest.fixture
def as_user(db: None) -> Callable[..., Admin]:
    """Log in a member of staff with these permissions on executions; "all" is a superuser."""

    def log_in(*permissions: str, name: str = "mia", worker: bool = False) -> Admin:
        if permissions == ("all",):
            user: Any = get_user_model().objects.create_superuser(name)
        else:
            user = get_user_model().objects.create_user(name, is_staff=True)
            codes = [f"{permission}_jobexecution" for permission in permissions] + ["view_worker"] * worker
            user.user_permissions.set(Permission.objects.filter(codename__in=codes))
        client = Client(headers={"accept-language": "en"})
        client.force_login(user)
        return Admin(client, user)

    return log_in


@pytest.fixture
def admin(as_user: Callable[..., Admin]) -> Admin:
    """A superuser."""
    return as_user("all")


@pytest.fixture
def failed(db: None) -> JobExecution:
    return JobExecutionFactory(failed=True)
