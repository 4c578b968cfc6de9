"""The Django app: imports the checks, every app's jobs.py and, for TASKS, its tasks.py, once all models are loaded."""

from __future__ import annotations

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _

from django_jobs import conf, registry
from django_jobs.runtime.watching import only_watches


class DjangoJobsConfig(AppConfig):
    """Makes the jobs of a project known in each of its processes; starts no thread and makes no query."""

    name = "django_jobs"
    verbose_name = _("Jobs")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register the checks, the log receivers and the jobs; an error in a jobs.py is raised here."""
        from django_jobs import checks, signals  # noqa: F401 - the checks register themselves

        signals.connect_logging()
        if only_watches():
            return
        registry.autodiscover()
        if (alias := conf.alias_of_tasks("django_jobs.backends.JobsBackend")) is not None:
            from django_jobs import backends

            backends.autodiscover(alias)
        registry.resolve()
