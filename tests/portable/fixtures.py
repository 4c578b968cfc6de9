"""Makes the tasks of this app known to a test, on the backend of django_jobs, and no other job."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from django.test import override_settings

from django_jobs import registry
from tests.portable import Task, TaskResult
from tests.portable.settings import TASKS
from tests.support import wait_for


@contextlib.contextmanager
def portable_tasks(**options: Any) -> Iterator[ModuleType]:
    """Set TASKS, with these OPTIONS, and give the module of the tasks."""
    with override_settings(TASKS=TASKS), registry.isolated(empty=True):
        # The first import declares all tasks, which not all OPTIONS allow.
        module = importlib.import_module("tests.portable.tasks")
    default = {**TASKS["default"], "OPTIONS": options}
    with override_settings(TASKS={**TASKS, "default": default}), registry.isolated(empty=True):
        for task in vars(module).values():
            # Coroutines cannot be atomic.
            if isinstance(task, Task) and not (options.get("atomic") and inspect.iscoroutinefunction(task.func)):
                # As its decorator did under the settings of that time.
                task.using()
        module.ran.clear()
        module.began.clear()
        module.go_on.clear()
        yield module


def finished(result: TaskResult) -> TaskResult:
    """Wait until a task is finished and return its result as it is."""

    def over() -> bool:
        result.refresh()
        return result.is_finished

    wait_for(over, 15, f"{result.id} is finished")
    return result
