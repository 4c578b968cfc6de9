"""The jobs that this process knows, by name; filled by @job."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import threading
from functools import wraps
from typing import TYPE_CHECKING, Any

from django.apps import AppConfig, apps
from django.utils.module_loading import module_has_submodule

from django_jobs.exceptions import DefinitionError, UnknownJob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from django_jobs.definition import Job

_jobs: dict[str, Job[...]] = {}
# By every name, aliases included.
_names: dict[str, Job[...]] = {}
# The same names, case-folded: MySQL ignores case, so two names must differ in more than that.
_folded: dict[str, str] = {}
_answers: dict[Any, frozenset[str]] = {}
_lock = threading.RLock()


def register(job: Job[...]) -> None:
    """Add a job under its name and aliases; raise DefinitionError when another job has one of them.

    A module that is imported again (autoreload, importlib.reload, another import path) replaces its own jobs.
    """
    with _lock:
        known = _jobs.get(job.name)
        if known is not None and _is_reimport(known, job):
            unregister(job.name)
        taken = _names | {name: _names[exact] for name, exact in _folded.items()}
        for name in job.names:
            other = taken.get(name) or taken.get(name.casefold())
            if other is not None:
                raise DefinitionError(
                    f"Two jobs are called {name!r}: {place(other)} and {place(job)}. "
                    f"Names and aliases are unique, ignoring case: give one of them another name=…."
                )
        _jobs[job.name] = job
        for name in job.names:
            _names[name] = job
            _folded[name.casefold()] = name
        _answers.clear()


def unregister(name: str) -> None:
    """Forget the job with this name, and its aliases; ignores unknown names."""
    with _lock:
        job = _jobs.pop(name, None)
        for known in job.names if job else ():
            del _names[known], _folded[known.casefold()]
        _answers.clear()


def get(name: str) -> Job[...]:
    """Return the job with this name or alias; raise UnknownJob with a suggestion."""
    try:
        return _names[name]
    except KeyError:
        near = difflib.get_close_matches(name, _names, n=1)
        mend = f"did you mean {near[0]!r}?" if near else "is it in the jobs.py of an installed app?"
        raise UnknownJob(f"No job is called {name!r}; {mend}") from None


def find(name: str) -> Job[...] | None:
    """Return the job with this name or alias; None if it is not registered."""
    return _names.get(name)


def all_jobs() -> list[Job[...]]:
    """Return every job, sorted by name."""
    return [_jobs[name] for name in sorted(_jobs)]


def _remembered(ask: Callable[[], frozenset[str]]) -> Callable[[], frozenset[str]]:
    """Cache an answer until a job is registered or unregistered, as every claim asks."""

    @wraps(ask)
    def answer() -> frozenset[str]:
        known = _answers.get(ask)
        if known is None:
            # Inside the lock, so that an answer from before a change is not cached after it.
            with _lock:
                known = _answers[ask] = ask()
        return known

    return answer


@_remembered
def names() -> frozenset[str]:
    """Return every name that a row of a known job can carry, aliases included."""
    return frozenset(_names)


@_remembered
def limited_names() -> frozenset[str]:
    """Return those names that belong to jobs with `concurrency=`."""
    return frozenset(name for job in _jobs.values() if job.concurrency is not None for name in job.names)


@_remembered
def queues() -> frozenset[str]:
    """Return every queue that a job declares."""
    return frozenset(job.queue for job in _jobs.values())


@contextlib.contextmanager
def isolated(*, empty: bool = False) -> Iterator[None]:
    """Undo registrations made inside the block; with `empty` it begins without any job. For tests."""
    tables: list[dict[str, Any]] = [_jobs, _names, _folded]
    with _lock:
        saved = [dict(table) for table in tables]
        if empty:
            for table in tables:
                table.clear()
            _answers.clear()
    try:
        yield
    finally:
        with _lock:
            for table, content in zip(tables, saved, strict=True):
                table.clear()
                table.update(content)
            _answers.clear()


def autodiscover(name: str = "jobs") -> list[ModuleType]:
    """Import the module with this name of every installed app, and return the modules.

    A missing module is fine; a broken one raises, with a note that names it.
    """
    found = []
    for config in apps.get_app_configs():
        module = f"{config.name}.{name}"
        # Checked beforehand: an ImportError inside a jobs.py must not pass for a missing one.
        if config.module is None or not module_has_submodule(config.module, name):
            continue
        try:
            found.append(importlib.import_module(module))
        except Exception as error:
            error.add_note(f"django_jobs: raised while importing the {name} of app {config.label!r} ({module}).")
            raise
    return found


def resolve() -> None:
    """Resolve what had to wait for all modules: forward references, and names made before the apps were ready."""
    for job in all_jobs():
        job.resolve()


def place(job: Job[...]) -> str:
    """Return where a job's handler is defined, for messages: module, qualified name, file and line."""
    code = inspect.unwrap(job.func).__code__
    return f"{job.func.__module__}.{job.func.__qualname__} ({code.co_filename}:{code.co_firstlineno})"


def default_name(func: Any) -> str:
    """Return `<app_label>.<function>`, or the dotted module and the function outside any app.

    Before the app registry is ready, the label is derived from the package, like AppConfig's default; Job.resolve()
    raises if the app turns out to have another label.
    """
    module, name = func.__module__, func.__name__
    package, _, leaf = module.rpartition(".")
    if not apps.apps_ready:
        return f"{package.rpartition('.')[2] or leaf}.{name}"
    config: AppConfig | None = apps.get_containing_app_config(module)
    return f"{config.label}.{name}" if config else f"{module}.{name}"


def _is_reimport(known: Job[...], job: Job[...]) -> bool:
    old, new = inspect.unwrap(known.func), inspect.unwrap(job.func)
    if old.__qualname__ != new.__qualname__ or old.__code__ is new.__code__:
        # The same code object twice: a factory or a loop made two jobs.
        return False
    if old.__module__ == new.__module__ == "__main__":
        # A shell or a notebook, where a definition is typed again.
        return True
    if old.__module__ != new.__module__ and old.__code__.co_filename != new.__code__.co_filename:
        return False
    # Every import of a module, even a reload, makes a new spec; within one import, a second definition is another job.
    return known.module_spec is not job.module_spec
