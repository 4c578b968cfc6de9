from django.db import migrations, models
from django.db.models import Q

import django_jobs.fields
from django_jobs.migrations._operations import AddPartialIndex, ExactText, RefuseCompactRows


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        RefuseCompactRows(),
        migrations.CreateModel(
            name="JobState",
            fields=[
                ("job_name", models.CharField(max_length=200, primary_key=True, serialize=False, verbose_name="job")),
                ("schedule", models.CharField(blank=True, default="", max_length=255, verbose_name="schedule")),
                ("last_tick_at", django_jobs.fields.UTCDateTimeField(null=True, verbose_name="last tick")),
                ("paused_at", django_jobs.fields.UTCDateTimeField(null=True, verbose_name="paused")),
                ("paused_by", models.CharField(blank=True, default="", max_length=255)),
                ("paused_by_name", models.CharField(blank=True, default="", max_length=255, verbose_name="paused by")),
                ("last_skip_at", django_jobs.fields.UTCDateTimeField(null=True, verbose_name="last skipped tick")),
                (
                    "last_skip_reason",
                    models.CharField(blank=True, default="", max_length=16, verbose_name="why it was skipped"),
                ),
                ("skips", models.PositiveBigIntegerField(default=0, verbose_name="skipped ticks")),
            ],
            options={
                "verbose_name": "job",
                "verbose_name_plural": "jobs",
                "default_permissions": (),
            },
        ),
        migrations.CreateModel(
            name="QueueState",
            fields=[
                ("queue", models.CharField(max_length=100, primary_key=True, serialize=False, verbose_name="queue")),
                ("paused_at", django_jobs.fields.UTCDateTimeField(null=True, verbose_name="paused")),
                ("paused_by", models.CharField(blank=True, default="", max_length=255)),
                ("paused_by_name", models.CharField(blank=True, default="", max_length=255, verbose_name="paused by")),
            ],
            options={
                "verbose_name": "queue state",
                "verbose_name_plural": "queue states",
                "default_permissions": (),
            },
        ),
        migrations.CreateModel(
            name="Worker",
            fields=[
                (
                    "id",
                    models.UUIDField(
                        default=django_jobs.fields.uuid7, editable=False, primary_key=True, serialize=False
                    ),
                ),
                ("host", models.CharField(max_length=255, verbose_name="host")),
                ("pid", models.PositiveIntegerField(verbose_name="process id")),
                ("version", models.CharField(blank=True, default="", max_length=64, verbose_name="version")),
                ("roles", django_jobs.fields.StrictJSONField(default=list, verbose_name="roles")),
                ("queues", django_jobs.fields.StrictJSONField(null=True, verbose_name="queues")),
                ("names", django_jobs.fields.StrictJSONField(default=list, verbose_name="jobs it knows")),
                ("slots", models.PositiveIntegerField(default=0, verbose_name="slots")),
                ("memory", models.PositiveBigIntegerField(null=True, verbose_name="memory")),
                ("started_at", django_jobs.fields.UTCDateTimeField(verbose_name="started")),
                ("heartbeat_at", django_jobs.fields.UTCDateTimeField(verbose_name="last heartbeat")),
                ("suspected_at", django_jobs.fields.UTCDateTimeField(editable=False, null=True)),
                ("stopped_at", django_jobs.fields.UTCDateTimeField(null=True, verbose_name="stopped")),
                (
                    "stop_reason",
                    models.CharField(blank=True, default="", max_length=255, verbose_name="why it stopped"),
                ),
            ],
            options={
                "verbose_name": "worker",
                "verbose_name_plural": "workers",
                "default_permissions": ("view",),
            },
        ),
        migrations.CreateModel(
            name="JobExecution",
            fields=[
                (
                    "id",
                    models.UUIDField(
                        default=django_jobs.fields.uuid7, editable=False, primary_key=True, serialize=False
                    ),
                ),
                ("job_name", models.CharField(max_length=200, verbose_name="job")),
                ("queue", models.CharField(default="default", max_length=100, verbose_name="queue")),
                (
                    "status",
                    models.CharField(
                        choices=[
                            ("pending", "pending"),
                            ("running", "running"),
                            ("scheduled", "scheduled"),
                            ("ok", "ok"),
                            ("error", "error"),
                            ("cancelled", "cancelled"),
                        ],
                        max_length=16,
                        verbose_name="status",
                    ),
                ),
                ("rank", models.SmallIntegerField(default=0, verbose_name="rank")),
                ("payload", django_jobs.fields.StrictJSONField(default=dict, verbose_name="payload")),
                ("key", models.CharField(blank=True, default="", max_length=255, verbose_name="key")),
                ("key_digest", models.CharField(editable=False, max_length=64, null=True)),
                ("active_key", models.CharField(editable=False, max_length=64, null=True)),
                (
                    "organization_id",
                    models.CharField(blank=True, max_length=64, null=True, verbose_name="organization"),
                ),
                ("context", django_jobs.fields.StrictJSONField(default=dict, editable=False)),
                ("attempt", models.PositiveIntegerField(default=0, verbose_name="attempt")),
                ("max_attempts", models.PositiveIntegerField(default=1, verbose_name="attempts allowed")),
                ("run_no", models.PositiveBigIntegerField(default=0, editable=False)),
                ("scheduled_at", django_jobs.fields.UTCDateTimeField(verbose_name="due")),
                ("tick_at", django_jobs.fields.UTCDateTimeField(null=True, verbose_name="cron tick")),
                ("parked_reason", models.CharField(blank=True, default="", max_length=32, verbose_name="parked")),
                ("created_at", django_jobs.fields.UTCDateTimeField(verbose_name="created")),
                ("updated_at", django_jobs.fields.UTCDateTimeField(verbose_name="updated")),
                ("hinted_at", django_jobs.fields.UTCDateTimeField(editable=False)),
                ("started_at", django_jobs.fields.UTCDateTimeField(null=True, verbose_name="started")),
                ("completed_at", django_jobs.fields.UTCDateTimeField(null=True, verbose_name="completed")),
                ("worker_id", models.UUIDField(null=True, verbose_name="worker")),
                (
                    "cancel_requested_at",
                    django_jobs.fields.UTCDateTimeField(null=True, verbose_name="cancel asked for"),
                ),
                ("error", models.TextField(blank=True, default="", verbose_name="last error")),
                ("errors", django_jobs.fields.StrictJSONField(default=list, verbose_name="errors")),
                ("fingerprint", models.CharField(editable=False, max_length=32, null=True)),
                ("logs", django_jobs.fields.StrictJSONField(default=list, verbose_name="logs")),
                ("result", django_jobs.fields.StrictJSONField(null=True, verbose_name="result")),
                ("progress", django_jobs.fields.StrictJSONField(null=True, verbose_name="progress")),
                ("triggered_by", models.CharField(blank=True, default="", max_length=255)),
                (
                    "triggered_by_name",
                    models.CharField(blank=True, default="", max_length=255, verbose_name="pushed by"),
                ),
                ("cancelled_by", models.CharField(blank=True, default="", max_length=255)),
                (
                    "cancelled_by_name",
                    models.CharField(blank=True, default="", max_length=255, verbose_name="cancelled by"),
                ),
                ("retried_by", models.CharField(blank=True, default="", max_length=255)),
                (
                    "retried_by_name",
                    models.CharField(blank=True, default="", max_length=255, verbose_name="retried by"),
                ),
                ("retried_at", django_jobs.fields.UTCDateTimeField(null=True, verbose_name="retried")),
                ("copied_from", models.UUIDField(null=True, verbose_name="copy of")),
                ("rescues", models.PositiveSmallIntegerField(default=0, verbose_name="rescues")),
            ],
            options={
                "verbose_name": "execution",
                "verbose_name_plural": "executions",
                "permissions": [
                    ("trigger_jobexecution", "Can push or trigger jobs"),
                    ("retry_jobexecution", "Can retry executions"),
                    ("cancel_jobexecution", "Can cancel executions"),
                    ("pause_jobexecution", "Can pause and resume jobs and queues"),
                    ("purge_jobexecution", "Can purge executions of unregistered jobs"),
                ],
                "default_permissions": ("view", "delete"),
                "indexes": [models.Index(fields=["status", "id"], name="django_jobs_list")],
                "constraints": [
                    models.UniqueConstraint(fields=("job_name", "active_key"), name="django_jobs_active_key"),
                    models.CheckConstraint(
                        condition=models.Q(
                            models.Q(("completed_at__isnull", False), ("status__in", ["cancelled", "error", "ok"])),
                            models.Q(
                                models.Q(("status__in", ["cancelled", "error", "ok"]), _negated=True),
                                ("completed_at__isnull", True),
                            ),
                            _connector="OR",
                        ),
                        name="django_jobs_completed_iff_final",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            models.Q(("status__in", ["cancelled", "error", "ok"]), _negated=True),
                            ("active_key__isnull", True),
                            _connector="OR",
                        ),
                        name="django_jobs_final_frees_key",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(("rank__gte", -100), ("rank__lte", 100)), name="django_jobs_priority_range"
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="JobStat",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("span", models.CharField(max_length=8)),
                ("bucket", django_jobs.fields.UTCDateTimeField()),
                ("worker_id", models.UUIDField()),
                ("job_name", models.CharField(max_length=200)),
                ("queue", models.CharField(max_length=100)),
                ("outcome", models.CharField(max_length=16)),
                ("count", models.PositiveBigIntegerField(default=0)),
                ("wait", django_jobs.fields.StrictJSONField(default=dict)),
                ("run", django_jobs.fields.StrictJSONField(default=dict)),
            ],
            options={
                "verbose_name": "statistic",
                "verbose_name_plural": "statistics",
                "default_permissions": (),
                "constraints": [
                    models.UniqueConstraint(
                        fields=("span", "bucket", "worker_id", "job_name", "queue", "outcome"), name="django_jobs_stat"
                    )
                ],
            },
        ),
        AddPartialIndex(
            "JobExecution",
            "django_jobs_claim",
            ["status", "queue", "rank", "scheduled_at", "id"],
            Q(status="pending"),
        ),
        AddPartialIndex(
            "JobExecution", "django_jobs_due", ["status", "parked_reason", "scheduled_at"], Q(status="scheduled")
        ),
        AddPartialIndex("JobExecution", "django_jobs_owner", ["worker_id", "status"], Q(status="running")),
        AddPartialIndex(
            "JobExecution",
            "django_jobs_retention",
            ["job_name", "status", "completed_at"],
            Q(completed_at__isnull=False),
        ),
        AddPartialIndex("JobExecution", "django_jobs_key", ["key_digest"], Q(key_digest__isnull=False)),
        AddPartialIndex(
            "JobExecution", "django_jobs_fingerprint", ["job_name", "fingerprint"], Q(fingerprint__isnull=False)
        ),
        ExactText(["JobExecution", "JobState", "QueueState", "Worker", "JobStat"]),
    ]
