"""The tables: executions (the outbox), the state of jobs and queues, workers and statistics."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

from django.db import models, router
from django.utils.translation import gettext_lazy as _

from django_jobs.fields import StrictJSONEncoder, StrictJSONField, UTCDateTimeField, text_name, uuid7
from django_jobs.options import BY_LENGTH, KEY_LENGTH, NAME_LENGTH, ORGANIZATION_LENGTH, QUEUE_LENGTH
from django_jobs.querysets import ExecutionQuerySet, WorkerQuerySet
from django_jobs.states import FINAL, Status


def jobs_alias() -> str:
    """Return the alias of the database with the executions, which the project's routers choose for writes."""
    return router.db_for_write(JobExecution)


class JobExecution(models.Model):
    """One requested run of a job: a row of the outbox, from push to end."""

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    job_name = models.CharField(_("job"), max_length=NAME_LENGTH)
    queue = models.CharField(_("queue"), max_length=QUEUE_LENGTH, default="default")
    status = models.CharField(_("status"), max_length=16, choices=Status.choices)
    # The negated priority, so that the claim index is ascending throughout.
    rank = models.SmallIntegerField(_("rank"), default=0)
    payload = StrictJSONField(_("payload"), default=dict)
    key = models.CharField(_("key"), max_length=KEY_LENGTH, blank=True, default="")
    # NULL without a key, so that its index holds keyed rows only.
    key_digest = models.CharField(max_length=64, null=True, editable=False)  # noqa: DJ001
    # The digest while the row is live, NULL afterwards: its unique index keeps the dedup promise.
    active_key = models.CharField(max_length=64, null=True, editable=False)  # noqa: DJ001 - NULLs are distinct
    organization_id = models.CharField(_("organization"), max_length=ORGANIZATION_LENGTH, null=True, blank=True)  # noqa: DJ001
    context = StrictJSONField(default=dict, editable=False)
    attempt = models.PositiveIntegerField(_("attempt"), default=0)
    max_attempts = models.PositiveIntegerField(_("attempts allowed"), default=1)
    # The fence: incremented by every claim; a worker with an older number cannot change the row.
    run_no = models.PositiveBigIntegerField(default=0, editable=False)
    scheduled_at = UTCDateTimeField(_("due"))
    tick_at = UTCDateTimeField(_("cron tick"), null=True)
    parked_reason = models.CharField(_("parked"), max_length=32, blank=True, default="")
    created_at = UTCDateTimeField(_("created"))
    updated_at = UTCDateTimeField(_("updated"))
    hinted_at = UTCDateTimeField(editable=False)
    started_at = UTCDateTimeField(_("started"), null=True)
    completed_at = UTCDateTimeField(_("completed"), null=True)
    worker_id = models.UUIDField(_("worker"), null=True)
    cancel_requested_at = UTCDateTimeField(_("cancel asked for"), null=True)
    error = models.TextField(_("last error"), blank=True, default="")
    errors = StrictJSONField(_("errors"), default=list)
    fingerprint = models.CharField(max_length=32, null=True, editable=False)  # noqa: DJ001 - as above
    logs = StrictJSONField(_("logs"), default=list)
    result = StrictJSONField(_("result"), null=True)
    progress = StrictJSONField(_("progress"), null=True)
    triggered_by = models.CharField(max_length=BY_LENGTH, blank=True, default="")
    triggered_by_name = models.CharField(_("pushed by"), max_length=BY_LENGTH, blank=True, default="")
    cancelled_by = models.CharField(max_length=BY_LENGTH, blank=True, default="")
    cancelled_by_name = models.CharField(_("cancelled by"), max_length=BY_LENGTH, blank=True, default="")
    retried_by = models.CharField(max_length=BY_LENGTH, blank=True, default="")
    retried_by_name = models.CharField(_("retried by"), max_length=BY_LENGTH, blank=True, default="")
    retried_at = UTCDateTimeField(_("retried"), null=True)
    copied_from = models.UUIDField(_("copy of"), null=True)
    rescues = models.PositiveSmallIntegerField(_("rescues"), default=0)

    objects = ExecutionQuerySet.as_manager()

    # Whether the push made this row (False: its key found a live one); None on rows that were not just pushed.
    created: bool | None = None
    _payload_json: str | None = None

    class Meta:
        verbose_name = _("execution")
        verbose_name_plural = _("executions")
        default_permissions = ("view", "delete")
        permissions = [
            ("trigger_jobexecution", "Can push or trigger jobs"),
            ("retry_jobexecution", "Can retry executions"),
            ("cancel_jobexecution", "Can cancel executions"),
            ("pause_jobexecution", "Can pause and resume jobs and queues"),
            ("purge_jobexecution", "Can purge executions of unregistered jobs"),
        ]
        # The migration makes the other indexes, partial if the database can, so that a transition writes few of them.
        indexes = [models.Index(fields=["status", "id"], name="django_jobs_list")]
        constraints = [
            models.UniqueConstraint(fields=["job_name", "active_key"], name="django_jobs_active_key"),
            models.CheckConstraint(
                condition=models.Q(status__in=sorted(FINAL), completed_at__isnull=False)
                | (~models.Q(status__in=sorted(FINAL)) & models.Q(completed_at__isnull=True)),
                name="django_jobs_completed_iff_final",
            ),
            models.CheckConstraint(
                condition=~models.Q(status__in=sorted(FINAL)) | models.Q(active_key__isnull=True),
                name="django_jobs_final_frees_key",
            ),
            models.CheckConstraint(
                condition=models.Q(rank__gte=-100, rank__lte=100), name="django_jobs_priority_range"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.job_name} {self.id}"

    @property
    def priority(self) -> int:
        """The priority, -100 to 100, higher first."""
        return -self.rank

    @property
    def payload_json(self) -> str:
        """The payload as JSON text; as the database returned it, if that is known."""
        if self._payload_json is None:
            self._payload_json = json.dumps(self.payload, cls=StrictJSONEncoder)
        return self._payload_json

    def get_deferred_fields(self) -> set[str]:
        """See Model; a column whose text came with the row is not deferred, even if it was not parsed yet."""
        return {name for name in super().get_deferred_fields() if text_name(name) not in vars(self)}

    @property
    def is_final(self) -> bool:
        """Whether only a person can move this row again."""
        return self.status in FINAL

    @property
    def is_cancelling(self) -> bool:
        """Whether it is running, and a cancel was requested that the handler has not obeyed yet."""
        return self.status == Status.RUNNING and self.cancel_requested_at is not None

    @property
    def duration(self) -> timedelta | None:
        """How long the last attempt took; None before it ended, and for a row that was cancelled while it waited."""
        if self.started_at is None or self.completed_at is None:
            return None
        lasted: timedelta = self.completed_at - self.started_at
        return lasted

    def cancel(self, *, by: Any = None) -> JobExecution:
        """Cancel a waiting row at once, mark a running one; raise WrongStatus when it is finished or gone."""
        from django_jobs import services

        return services.cancel(self, by=by)

    async def acancel(self, *, by: Any = None) -> JobExecution:
        """See cancel()."""
        from django_jobs import services

        return await services.acancel(self, by=by)

    def retry(self, *, by: Any = None) -> JobExecution:
        """Queue a failed or cancelled row again with its own payload; raise WrongStatus or KeyTaken."""
        from django_jobs import services

        return services.retry(self, by=by)

    async def aretry(self, *, by: Any = None) -> JobExecution:
        """See retry()."""
        from django_jobs import services

        return await services.aretry(self, by=by)

    def copy(self, *, by: Any = None) -> JobExecution:
        """Push a copy of this finished execution and return it; raise WrongStatus or KeyTaken."""
        from django_jobs import services

        return services.copy(self, by=by)

    async def acopy(self, *, by: Any = None) -> JobExecution:
        """See copy()."""
        from django_jobs import services

        return await services.acopy(self, by=by)

    def start_now(self, *, by: Any = None) -> JobExecution:
        """Make a scheduled or parked row pending now; raise WrongStatus for any other."""
        from django_jobs import services

        return services.start_now(self, by=by)

    async def astart_now(self, *, by: Any = None) -> JobExecution:
        """See start_now()."""
        from django_jobs import services

        return await services.astart_now(self, by=by)


# A template calls whatever callable it names, but must not call these.
for _verb in ("cancel", "acancel", "retry", "aretry", "copy", "acopy", "start_now", "astart_now"):
    getattr(JobExecution, _verb).alters_data = True


class JobState(models.Model):
    """The state of one job that all processes share: its cron cursor, its pause and its last skipped tick."""

    job_name = models.CharField(_("job"), max_length=NAME_LENGTH, primary_key=True)
    schedule = models.CharField(_("schedule"), max_length=255, blank=True, default="")
    last_tick_at = UTCDateTimeField(_("last tick"), null=True)
    paused_at = UTCDateTimeField(_("paused"), null=True)
    paused_by = models.CharField(max_length=BY_LENGTH, blank=True, default="")
    paused_by_name = models.CharField(_("paused by"), max_length=BY_LENGTH, blank=True, default="")
    last_skip_at = UTCDateTimeField(_("last skipped tick"), null=True)
    last_skip_reason = models.CharField(_("why it was skipped"), max_length=16, blank=True, default="")
    skips = models.PositiveBigIntegerField(_("skipped ticks"), default=0)

    class Meta:
        verbose_name = _("job")
        verbose_name_plural = _("jobs")
        default_permissions = ()

    def __str__(self) -> str:
        return self.job_name


class QueueState(models.Model):
    """Whether a queue is paused."""

    queue = models.CharField(_("queue"), max_length=QUEUE_LENGTH, primary_key=True)
    paused_at = UTCDateTimeField(_("paused"), null=True)
    paused_by = models.CharField(max_length=BY_LENGTH, blank=True, default="")
    paused_by_name = models.CharField(_("paused by"), max_length=BY_LENGTH, blank=True, default="")

    class Meta:
        verbose_name = _("queue state")
        verbose_name_plural = _("queue states")
        default_permissions = ()

    def __str__(self) -> str:
        return self.queue


class Worker(models.Model):
    """One process that runs, stages or schedules jobs: a new row at every start, kept fresh by heartbeats."""

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    host = models.CharField(_("host"), max_length=255)
    pid = models.PositiveIntegerField(_("process id"))
    version = models.CharField(_("version"), max_length=64, blank=True, default="")
    roles = StrictJSONField(_("roles"), default=list)
    # See served.Served.
    queues = StrictJSONField(_("queues"), null=True)
    names = StrictJSONField(_("jobs it knows"), default=list)
    slots = models.PositiveIntegerField(_("slots"), default=0)
    memory = models.PositiveBigIntegerField(_("memory"), null=True)
    started_at = UTCDateTimeField(_("started"))
    heartbeat_at = UTCDateTimeField(_("last heartbeat"))
    suspected_at = UTCDateTimeField(null=True, editable=False)
    stopped_at = UTCDateTimeField(_("stopped"), null=True)
    stop_reason = models.CharField(_("why it stopped"), max_length=255, blank=True, default="")

    objects = WorkerQuerySet.as_manager()

    class Meta:
        verbose_name = _("worker")
        verbose_name_plural = _("workers")
        default_permissions = ("view",)

    def __str__(self) -> str:
        return f"{self.host} pid {self.pid}"


class JobStat(models.Model):
    """Counts and histograms of ended runs, one row per span of time, worker, job, queue and outcome."""

    id = models.BigAutoField(primary_key=True)
    span = models.CharField(max_length=8)
    bucket = UTCDateTimeField()
    worker_id = models.UUIDField()
    job_name = models.CharField(max_length=NAME_LENGTH)
    queue = models.CharField(max_length=QUEUE_LENGTH)
    outcome = models.CharField(max_length=16)
    count = models.PositiveBigIntegerField(default=0)
    wait = StrictJSONField(default=dict)
    run = StrictJSONField(default=dict)

    class Meta:
        verbose_name = _("statistic")
        verbose_name_plural = _("statistics")
        default_permissions = ()
        constraints = [
            models.UniqueConstraint(
                fields=["span", "bucket", "worker_id", "job_name", "queue", "outcome"], name="django_jobs_stat"
            )
        ]

    def __str__(self) -> str:
        return f"{self.job_name} {self.outcome} {self.bucket}"
