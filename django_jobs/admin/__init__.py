"""The admin pages: jobs, executions and workers; they read, and act through the services only."""

from __future__ import annotations

from django_jobs.admin.executions import ExecutionAdmin
from django_jobs.admin.jobs import JobsAdmin
from django_jobs.admin.workers import WorkerAdmin

__all__ = ["ExecutionAdmin", "JobsAdmin", "WorkerAdmin"]
