"""What a project's commands do before anything of ours is asked for."""

from __future__ import annotations

import os
import subprocess
import sys

import django
import pytest

from tests.support import ROOT

pytestmark = pytest.mark.subprocess

# No connection of any kind, and a warning of Django about one is an error.
COMMAND = """
import sys
from django.db.backends.base.base import BaseDatabaseWrapper

def refuse(self):
    raise AssertionError("a connection at start-up")

BaseDatabaseWrapper.connect = refuse
from django.core.management import execute_from_command_line
execute_from_command_line(sys.argv)
"""


# From Django 6.1 on its own checks ask the database what it supports, whatever apps are installed.
ASKING = [] if django.VERSION >= (6, 1) else ["check", "makemigrations django_jobs --check --dry-run"]


@pytest.mark.sqlite
@pytest.mark.parametrize("command", [*ASKING, "shell -c pass", "help runjobs", "collectstatic --dry-run --no-input"])
def test_a_projects_commands_need_no_database(command: str) -> None:
    """Access to the database in ready() or at import: warnings, a broken migrate, tests that touch real data.

    Sources: inventree/InvenTree#10806, horilla/horilla-hr#871, django-tenants/django-tenants#1036.
    """
    code = COMMAND
    if command.startswith("makemigrations"):
        # It looks into the database for the history, and only warns where there is none.
        code = code.replace("raise AssertionError", "from django.db import OperationalError; raise OperationalError")
    warn = [] if command.startswith("makemigrations") else ["-W", "error::RuntimeWarning"]
    done = subprocess.run(
        [sys.executable, *warn, "-c", code, *command.split()],
        cwd=ROOT,
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
