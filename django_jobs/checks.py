"""The system checks: django_jobs.E0xx (it would not work) and W0xx (it may not work as expected)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from django.apps import AppConfig
from django.core import checks, mail
from django.core.checks import CheckMessage
from django.core.exceptions import ImproperlyConfigured
from django.core.management import get_commands
from django.db import DEFAULT_DB_ALIAS, connections
from django.utils.module_loading import import_string

from django_jobs import registry
from django_jobs.conf import DISPATCHERS, get_settings, misspelt, problems, raw_settings
from django_jobs.dispatchers import Dispatcher
from django_jobs.exceptions import DefinitionError
from django_jobs.models import JobExecution, jobs_alias
from django_jobs.retries import Retry
from django_jobs.schedules import configured

TAG = "django_jobs"
Apps = Sequence[AppConfig] | None
# Characters; 96 bits if they are chosen at random from 64.
SECRET_LENGTH = 16


@checks.register(TAG)
def check_settings(app_configs: Apps, **kwargs: Any) -> list[CheckMessage]:
    """E001 to E005, W008, W009, W011: a value in `DJANGO_JOBS` is invalid or unwise, or the setting is not read."""
    hint = "Correct DJANGO_JOBS in the settings; runjobs does not start until then."
    if found := problems(raw_settings()):
        return [checks.Error(text, hint=hint, id="django_jobs.E001") for text in found]
    return [*_name(), *_middleware(), *_dispatcher(), *_crons(), *_default_retry(), *_cron_secret(), *_for_tests()]


def _name() -> list[CheckMessage]:
    if (found := misspelt()) is None:
        return []
    return [
        checks.Warning(
            f"There is a setting {found}, which django_jobs does not read; did you mean DJANGO_JOBS?",
            hint="Give it that name.",
            id="django_jobs.W011",
        )
    ]


def _middleware() -> list[CheckMessage]:
    named = [("DJANGO_JOBS", entry) for entry in get_settings().middleware]
    named += [(f"The job {job.name}", entry) for job in registry.all_jobs() for entry in job.use]
    return [
        checks.Error(
            f"{place}: the middleware {entry!r} cannot be used: {fault}.",
            hint="Give a callable m(call), or its dotted path.",
            id="django_jobs.E002",
        )
        for place, entry in named
        if isinstance(entry, str) and (fault := _fault(entry))
    ]


def _dispatcher() -> list[CheckMessage]:
    spec = get_settings().dispatcher
    backend = spec.backend
    doing = "importing it"
    hint = "Give the name of a dispatcher of django_jobs, or the dotted path to a subclass of Dispatcher."
    try:
        found = import_string(backend)
        if isinstance(found, type) and issubclass(found, Dispatcher):
            # Making one opens nothing, and checks its options.
            doing, hint = "giving it its options", "Correct its OPTIONS."
            found(spec.options)
            return []
    except ImproperlyConfigured as error:
        return [
            checks.Error(
                str(error),
                hint="Correct it; until then pushes send no hints, and runjobs does not start.",
                id="django_jobs.E003",
            )
        ]
    except Exception as error:  # noqa: BLE001 - see _fault()
        fault = _raised(error, doing)
    else:
        fault = "it is not a subclass of django_jobs.dispatchers.Dispatcher"
    return [
        checks.Error(
            f"DJANGO_JOBS: the dispatcher {backend!r} cannot be used: {fault}.",
            hint=hint,
            id="django_jobs.E003",
        )
    ]


def _fault(path: str) -> str:
    try:
        found = import_string(path)
    except Exception as error:  # noqa: BLE001 - importing a module may raise anything
        return _raised(error)
    return "" if callable(found) else "it is not callable"


def _raised(error: Exception, doing: str = "importing it") -> str:
    return f"{doing} raises {type(error).__name__}: {error}"


def _crons() -> list[CheckMessage]:
    found: list[CheckMessage] = []
    keys: tuple[Literal["SWEEP_CRON", "TRIM_CRON"], ...] = ("SWEEP_CRON", "TRIM_CRON")
    for key in keys:
        try:
            configured(key)
        except DefinitionError as error:
            found.append(checks.Error(str(error), hint="Give a cron expression of five fields.", id="django_jobs.E004"))
    return found


def _default_retry() -> list[CheckMessage]:
    value = get_settings().default_retry
    try:
        Retry.of(value)
    except DefinitionError as error:
        return [
            checks.Error(
                f"DJANGO_JOBS: DEFAULT_RETRY is {value!r}: {error}",
                hint="Give None, a number of retries, or Retry(…).",
                id="django_jobs.E005",
            )
        ]
    return []


def _cron_secret() -> list[CheckMessage]:
    secret = get_settings().cron_secret
    if secret is None:
        return []
    faults = {
        f"has fewer than {SECRET_LENGTH} characters and can be guessed": len(secret) < SECRET_LENGTH,
        "has characters that many clients cannot send in a header": not (secret.isascii() and secret.isprintable()),
        "begins or ends with whitespace, which headers do not keep": secret != secret.strip(),
    }
    return [
        checks.Warning(
            f"DJANGO_JOBS['CRON_SECRET'] {fault}.",
            hint='Generate one: python -c "import secrets; print(secrets.token_urlsafe(32))"',
            id="django_jobs.W008",
        )
        for fault, found in faults.items()
        if found
    ]


def _for_tests() -> list[CheckMessage]:
    settings = get_settings()
    does = {
        DISPATCHERS["immediate"]: "each push waits until its job has run",
        DISPATCHERS["dummy"]: "no worker is told of new rows",
    }.get(settings.dispatcher.backend)
    # DEBUG is False in a test run as well; only there Django adds mail.outbox.
    if does is None or settings.debug or hasattr(mail, "outbox"):
        return []
    return [
        checks.Warning(
            f"DJANGO_JOBS: the dispatcher {settings.dispatcher.backend!r} is for tests, but DEBUG is False: {does}.",
            hint='Use "database", "redis" or "direct" in production.',
            id="django_jobs.W009",
        )
    ]


@checks.register(TAG)
def check_jobs(app_configs: Apps, **kwargs: Any) -> list[CheckMessage]:
    """W001, W003, W005: jobs that behave differently from what their definition suggests."""
    if problems(raw_settings()):
        return []
    return [*_atomic_on_sqlite(), *_seconds(), *_unserved()]


def _atomic_on_sqlite() -> list[CheckMessage]:
    if connections[jobs_alias()].vendor != "sqlite" or not (jobs := [j.name for j in registry.all_jobs() if j.atomic]):
        return []
    return [
        checks.Warning(
            f"Atomic jobs on SQLite hold its only write lock while they run: {', '.join(jobs)}.",
            hint="Keep them short, remove atomic=True, or use another database.",
            id="django_jobs.W001",
        )
    ]


def _seconds() -> list[CheckMessage]:
    return [
        checks.Warning(
            f"The job {job.name} has a cron expression of six fields, {job.cron.expression!r}: the last is seconds.",
            hint="Remove the sixth field, unless the job is to run more than once a minute.",
            id="django_jobs.W003",
        )
        for job in registry.all_jobs()
        if job.cron is not None and len(job.cron.expression.split()) == 6
    ]


def _unserved() -> list[CheckMessage]:
    served = get_settings().queues
    if served is None:
        return []
    unserved: dict[str, list[str]] = {}
    for job in registry.all_jobs():
        if job.queue not in served:
            unserved.setdefault(job.queue, []).append(job.name)
    return [
        checks.Warning(
            f"The queue {queue!r} is not in DJANGO_JOBS['QUEUES']; these jobs are pushed to it: {', '.join(names)}.",
            hint="Add the queue, or run a process for it (manage.py runjobs --queues "
            f"{queue}); otherwise its executions wait for ever.",
            id="django_jobs.W005",
        )
        for queue, names in unserved.items()
    ]


@checks.register(TAG)
def check_alias(app_configs: Apps, **kwargs: Any) -> list[CheckMessage]:
    """W002: push promises less if executions are not in the default database."""
    alias = jobs_alias()
    if alias == DEFAULT_DB_ALIAS:
        return []
    return [
        checks.Warning(
            f"Executions are in the database {alias!r}: a push inside a transaction on another database is written "
            "after that commit, and lost if the process dies in between (at most once).",
            hint=f"Route django_jobs to {DEFAULT_DB_ALIAS!r}, or push inside a transaction on {alias!r}.",
            id="django_jobs.W002",
        )
    ]


@checks.register(TAG)
def check_command(app_configs: Apps, **kwargs: Any) -> list[CheckMessage]:
    """W004: another app, such as django-extensions, has a command runjobs too, and comes first."""
    # The name of an app, or a command object.
    owner: Any = get_commands().get("runjobs", "django_jobs")
    name = owner if isinstance(owner, str) else type(owner).__module__
    if name == "django_jobs":
        return []
    return [
        checks.Warning(
            f"manage.py runjobs is the command of {name}, not that of django_jobs.",
            hint=f"Put 'django_jobs' before {name!r} in INSTALLED_APPS: the first one wins.",
            id="django_jobs.W004",
        )
    ]


@checks.register(checks.Tags.database)
def check_character_set(app_configs: Apps, databases: Sequence[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """W006: a table on MariaDB or MySQL that cannot store every character."""
    alias = jobs_alias()
    connection = connections[alias]
    if alias not in (databases or ()) or connection.vendor != "mysql":
        return []
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT table_collation FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = %s",
            [JobExecution._meta.db_table],
        )
        row = cursor.fetchone()
    if row is None or str(row[0]).startswith("utf8mb4"):
        return []
    return [
        checks.Warning(
            f"The table of executions has the collation {row[0]}, which cannot store every character.",
            hint=f"ALTER TABLE {JobExecution._meta.db_table} CONVERT TO CHARACTER SET utf8mb4;",
            id="django_jobs.W006",
        )
    ]
