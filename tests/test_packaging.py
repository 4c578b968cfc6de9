"""What holds of the package as a whole: its exports, its migrations, its layers and who may touch what."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

import django_jobs
from tests.support import ROOT

# Nothing here depends on the database: once is enough.
pytestmark = pytest.mark.sqlite

PACKAGE = ROOT / "django_jobs"

PUBLIC = {
    "job",
    "Job",
    "JobContext",
    "Retry",
    "Backoff",
    "Keep",
    "Reschedule",
    "Status",
    "current_context",
    "job_pushed",
    "job_started",
    "job_succeeded",
    "job_failed",
    "job_cancelled",
    "job_finished",
    "JobsError",
    "DefinitionError",
    "InvalidPayload",
    "InvalidResult",
    "UnknownJob",
    "Conflict",
    "AlreadyRunning",
    "KeyTaken",
    "WrongStatus",
    "Cancelled",
    "TimedOut",
    "WorkerLost",
}


@cache
def modules() -> list[tuple[str, list[ast.AST]]]:
    """The modules of the package, each as the nodes of its syntax tree."""
    return [
        (str(path.relative_to(PACKAGE)), list(ast.walk(ast.parse(path.read_text(), filename=str(path)))))
        for path in sorted(PACKAGE.rglob("*.py"))
    ]


def django(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-m", "django", *args],
        cwd=ROOT,
        env={**os.environ, "ENGINE": "sqlite", "DJANGO_SETTINGS_MODULE": "tests.settings", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_the_public_names_are_those_documented() -> None:
    assert set(django_jobs.__all__) == PUBLIC
    assert len(django_jobs.__all__) == len(PUBLIC)


def test_every_public_name_is_there() -> None:
    assert {name for name in PUBLIC if not hasattr(django_jobs, name)} == set()


def test_the_version_is_told_once() -> None:
    from importlib.metadata import version

    assert version("django-outbox-jobs") == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


@pytest.mark.subprocess
@pytest.mark.parametrize(
    "settings",
    [
        {"DEFAULT_AUTO_FIELD": "django.db.models.AutoField"},
        {"DEFAULT_AUTO_FIELD": "django.db.models.BigAutoField"},
        {"DEFAULT_AUTO_FIELD": "tests.acc.fields.WideAutoField"},
        {"LANGUAGE_CODE": "de"},
        {"USE_TZ": "0", "TIME_ZONE": "America/New_York"},
        {"ACC_CRON": "* * * * *"},
        {"DJANGO_JOBS_OVERRIDES": '{"QUEUES": ["a", "b"], "RECORD": "none"}'},
        {"AUTH_USER_MODEL": "acc.Person"},
    ],
    ids=lambda settings: " ".join(f"{name}={value}" for name, value in settings.items()),
)
def test_no_setting_of_a_project_makes_a_new_migration(settings: dict[str, str]) -> None:
    """makemigrations found changes because of a project's own settings (Koed00/django-q#584)."""
    result = django("makemigrations", "django_jobs", "--check", "--dry-run", **settings)
    assert (result.returncode, result.stdout) == (0, "No changes detected in app 'django_jobs'\n"), result.stderr


def test_the_wheel_would_hold_templates_styles_and_types() -> None:
    """hatchling takes every file of the package that git does not ignore; this holds that none is ignored."""
    files = [
        str(path.relative_to(ROOT)) for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ]
    assert str(Path("django_jobs", "py.typed")) in files
    ignored = subprocess.run(
        ["git", "check-ignore", "--no-index", "--stdin"],
        input="\n".join(files),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ignored.stdout == ""


@pytest.mark.medium
def test_only_conf_reads_djangos_settings() -> None:
    def reads_settings(node: ast.AST) -> bool:
        if isinstance(node, ast.ImportFrom):
            return node.module == "django.conf" and any(name.name == "settings" for name in node.names)
        return isinstance(node, ast.Import) and any(name.name.startswith("django.conf") for name in node.names)

    guilty = {name for name, nodes in modules() if any(map(reads_settings, nodes))}
    assert guilty == {"conf.py"}


def writes_status(node: ast.AST) -> bool:
    """Say whether this is `update(status=…)`, `bulk_update(…, ["status"])` or an assignment to `.status`."""
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if name in {"update", "aupdate", "update_or_create", "aupdate_or_create"}:
            return any(keyword.arg == "status" for keyword in node.keywords)
        if name in {"bulk_update", "abulk_update", "save", "asave"}:
            return any(isinstance(part, ast.Constant) and part.value == "status" for part in ast.walk(node))
        if name == "setattr" or (isinstance(node.func, ast.Name) and node.func.id == "setattr"):
            return len(node.args) > 1 and isinstance(node.args[1], ast.Constant) and node.args[1].value == "status"
        return False
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign) and node.value is not None:
        targets = [node.target]
    return any(isinstance(target, ast.Attribute) and target.attr == "status" for target in targets)


@pytest.mark.medium
def test_only_transitions_writes_the_status() -> None:
    guilty = {Path(name).parent.name for name, nodes in modules() if any(map(writes_status, nodes))}
    assert guilty == {"transitions"}


@pytest.mark.medium
def test_no_sql_outside_transitions_changes_rows() -> None:
    def begins_a_write(node: ast.AST) -> bool:
        writes = ("UPDATE ", "INSERT INTO ", "DELETE FROM ")
        return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(writes)

    guilty = {Path(name).parent.name for name, nodes in modules() if any(map(begins_a_write, nodes))}
    assert guilty == {"transitions"}


@pytest.mark.parametrize(
    "code",
    [
        "rows.update(status='ok')",
        "row.status = 'ok'",
        "row.status: str = 'ok'",
        "setattr(row, 'status', 'ok')",
        "JobExecution.objects.bulk_update(rows, ['status'])",
        "row.save(update_fields=['status'])",
    ],
)
def test_a_write_of_the_status_is_seen(code: str) -> None:
    assert any(writes_status(node) for node in ast.walk(ast.parse(code)))


@pytest.mark.parametrize("code", ["rows.filter(status='ok')", "status = row.status", "rows.update(error='')"])
def test_a_read_of_the_status_is_not_taken_for_a_write(code: str) -> None:
    assert not any(writes_status(node) for node in ast.walk(ast.parse(code)))


@pytest.mark.medium
def test_nothing_that_travels_can_be_executed() -> None:
    forbidden = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}

    def names(node: ast.AST) -> set[str]:
        if isinstance(node, ast.Import):
            return {name.name.split(".")[0] for name in node.names}
        if isinstance(node, ast.ImportFrom):
            return {(node.module or "").split(".")[0]}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"eval", "exec"}:
            return {"pickle"}
        return set()

    guilty = {name for name, nodes in modules() if any(names(node) & forbidden for node in nodes)}
    assert guilty == set()


def test_every_module_has_its_place_in_the_layers() -> None:
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    placed = {name.strip(" ()") for layer in contract["layers"] for name in layer.split("|")}
    there = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert there - {"__init__"} == placed


@pytest.mark.subprocess
def test_imports_only_go_down() -> None:
    # In a process of its own: import-linter sets up logging for itself, which silences every logger there is.
    code = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(cache_dir=None))"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert result.returncode == 0, result.stdout


@pytest.mark.subprocess
def test_starting_up_makes_no_query() -> None:
    """Queries in ready() or at import broke migrate on an empty database (inventree/InvenTree#10806)."""
    code = (
        "import django; from django.db.backends.base.base import BaseDatabaseWrapper as B\n"
        "def refuse(self): raise AssertionError('a connection at start-up')\n"
        "B.connect = refuse; django.setup(); import django_jobs.registry as r; assert r.names()"
    )
    result = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", code],
        cwd=ROOT,
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
