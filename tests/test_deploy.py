"""The files of docs/deploy can be read by what they are for, and what they start is a valid command."""

from __future__ import annotations

import functools
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from django.core.management import load_command_class

from django_jobs.conf import DEFAULTS
from django_jobs.execution.engine import AFTER_DRAIN
from tests.support import ROOT

DEPLOY = ROOT / "docs" / "deploy"
pytestmark = pytest.mark.sqlite


@functools.cache
def parsed(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


def unit() -> dict[str, str]:
    lines = (line.split("=", 1) for line in (DEPLOY / "runjobs.service").read_text().splitlines() if "=" in line)
    return {key: value for key, value in lines if not key.startswith("#")}


def container() -> dict[str, Any]:
    found: dict[str, Any] = parsed("kubernetes.yaml")["spec"]["template"]["spec"]["containers"][0]
    return found


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield where a file starts runjobs, and with which arguments."""
    texts = {
        "runjobs.service": unit()["ExecStart"],
        "kubernetes.yaml": shlex.join(container()["command"]),
        "compose.yaml": shlex.join(parsed("compose.yaml")["services"]["jobs"]["command"]),
        "crontab": (DEPLOY / "crontab").read_text(),
        "Procfile": (DEPLOY / "Procfile").read_text(),
    }
    for name, text in texts.items():
        (line,) = (line for line in text.splitlines() if "runjobs" in line)
        yield name, shlex.split(line.partition("manage.py runjobs")[2])


def test_no_file_is_left_out_here_or_in_the_docs() -> None:
    files = {path.name for path in DEPLOY.iterdir()}
    assert files == {name for name, _ in commands()} | {"vercel.json"}
    pages = "".join(path.read_text() for path in (ROOT / "docs" / "howto").glob("*.md"))
    assert set(re.findall(r"\.\./deploy/(\S+)", pages)) == files


@pytest.mark.parametrize(
    ("name", "arguments"), list(commands()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_what_it_starts_is_a_valid_command(name: str, arguments: list[str]) -> None:
    command = load_command_class("django_jobs", "runjobs")
    chosen = vars(command.create_parser("manage.py", "runjobs").parse_args(arguments))
    assert command._options(chosen)


def test_each_of_them_waits_long_enough_for_an_orderly_end() -> None:
    needed = DEFAULTS["DRAIN_TIMEOUT"] + AFTER_DRAIN
    kubernetes = parsed("kubernetes.yaml")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    compose = parsed("compose.yaml")["services"]["jobs"]["stop_grace_period"]
    for seconds in (unit()["TimeoutStopSec"], kubernetes, compose.removesuffix("s")):
        assert needed < int(seconds) <= needed + 5


def test_the_probes_ask_for_what_is_served_where_it_is_served() -> None:
    port = container()["command"][container()["command"].index("--health-port") + 1]
    assert [(each["name"], str(each["containerPort"])) for each in container()["ports"]] == [("health", port)]
    asked = {kind: container()[kind]["httpGet"] for kind in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert {probe["port"] for probe in asked.values()} == {"health"}
    assert {kind: probe["path"] for kind, probe in asked.items()} == {
        "startupProbe": "/healthz",
        "livenessProbe": "/healthz",
        "readinessProbe": "/readyz",
    }


def test_the_file_that_compose_looks_at_is_the_one_that_is_written() -> None:
    jobs = parsed("compose.yaml")["services"]["jobs"]
    path = jobs["command"][jobs["command"].index("--heartbeat-file") + 1]
    assert path in jobs["healthcheck"]["test"][1]


def test_the_service_that_compose_waits_for_exists() -> None:
    services = parsed("compose.yaml")["services"]
    for service in services.values():
        assert set(service.get("depends_on", {})) <= set(services)


def test_the_path_that_vercel_calls_is_that_of_the_view() -> None:
    from django.urls import reverse

    (cron,) = json.loads((DEPLOY / "vercel.json").read_text())["crons"]
    assert cron["path"] == reverse("django_jobs:run")


@pytest.mark.subprocess
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    # The interpreter of the page is not there.
    text = (DEPLOY / "runjobs.service").read_text().replace("/srv/shop/venv/bin/python", sys.executable)
    (tmp_path / "shop-jobs.service").write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", tmp_path / "shop-jobs.service"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
