"""The admin pages: executions and workers; they read, and act through the services only."""

from __future__ import annotations

from django_jobs.admin.executions import ExecutionAdmin
from django_jobs.admin.workers import WorkerAdmin

__all__ = ["ExecutionAdmin", "WorkerAdmin"]
