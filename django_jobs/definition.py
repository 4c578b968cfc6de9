"""@job and Job: the definition of a job, and the calls that projects make on it; services do the work behind them."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, Generic, ParamSpec, Protocol, Unpack, overload

from asgiref.sync import iscoroutinefunction

from django_jobs import options as check
from django_jobs import registry
from django_jobs.context import JobContext, enter_context, leave_context
from django_jobs.exceptions import DefinitionError, InvalidPayload
from django_jobs.options import UNSET, JobOptions, PushOptions
from django_jobs.payloads import Schema
from django_jobs.policies import Policy

if TYPE_CHECKING:
    from datetime import datetime, timedelta
    from uuid import UUID

    from django_jobs.models import JobExecution

P = ParamSpec("P")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Job(Policy, Generic[P]):
    """One registered job; made by @job. Two jobs are equal when their names are."""

    # Not slotted: functools.wraps() puts __doc__, __name__ and __wrapped__ of the handler on the instance.
    func: Callable[..., Any]
    schema: Schema
    is_async: bool
    # Was the name derived from app and function, rather than given?
    is_default_name: bool = False
    # The import spec of the module that defined the handler, at that time: a reload puts another one into the module.
    module_spec: Any = None
    # What using() set on this copy.
    options: PushOptions = field(default_factory=PushOptions)

    # Must templates, which call any callable, not call a job in their context? That would run the handler.
    do_not_call_in_templates: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Take on the handler's name and documentation."""
        for attribute in functools.WRAPPER_ASSIGNMENTS:
            self.__dict__[attribute] = getattr(self.func, attribute, None)
        self.__dict__["__wrapped__"] = self.func

    def __eq__(self, other: object) -> bool:
        return self.name == other.name if isinstance(other, Job) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"<Job {self.name}>"

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError(f"{self.name}: a Job cannot be pickled; send its name and call registry.get(name) there.")

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Run the handler here and now, without a row; a context is supplied if it takes one."""
        if not self.takes_context or (args and isinstance(args[0], JobContext)):
            return self.func(*args, **kwargs)
        context = JobContext.detached(self.name, {**dict(zip(self.schema.parameters, args, strict=False)), **kwargs})
        if self.is_async:
            return self._acall(context, args, kwargs)
        token = enter_context(context)
        try:
            return self.func(context, *args, **kwargs)
        finally:
            leave_context(token)

    def push(self, /, *args: P.args, **kwargs: P.kwargs) -> JobExecution:
        """Add an execution with these arguments to the outbox; it runs after the transaction commits.

        Raises InvalidPayload before anything is written. `created` of the returned row is False if the key found a live
        one.
        """
        from django_jobs import services

        return services.push(self.base, self.options, self._dumped(args, kwargs))

    async def apush(self, /, *args: P.args, **kwargs: P.kwargs) -> JobExecution:
        """See push()."""
        from django_jobs import services

        return await services.apush(self.base, self.options, self._dumped(args, kwargs))

    def push_many(self, items: Iterable[Mapping[str, Any] | Item], /) -> list[JobExecution]:
        """Add one execution for each dict of arguments or item(), all or none; returns them in the same order."""
        from django_jobs import services

        return services.push_many(self._items(items))

    async def apush_many(self, items: Iterable[Mapping[str, Any] | Item], /) -> list[JobExecution]:
        """See push_many()."""
        from django_jobs import services

        return await services.apush_many(self._items(items))

    def item(self, /, *args: Any, **values: Any) -> Item:
        """Return one entry for push_many(): arguments of the handler, and options of using(), by name.

        A name that is both belongs to the handler; give such an option by `job.using(…).item(…)`.
        """
        given = {name: values.pop(name) for name in check.PUSH if name in values and name not in self.schema.parameters}
        job = self.using(**given) if given else self
        return Item(job=self.base, options=job.options, payload_json=job._dumped(args, values))

    def using(
        self,
        *,
        key: str | None = UNSET,
        delay: timedelta | float | None = UNSET,
        scheduled_at: datetime | None = UNSET,
        priority: int | str | None = UNSET,
        queue: str | None = UNSET,
        organization_id: str | int | UUID | None = UNSET,
        by: Any = UNSET,
    ) -> Job[P]:
        """Return a copy whose pushes have these options; scheduled_at overrides delay. Raises DefinitionError."""
        given = {
            "key": key,
            "delay": delay,
            "scheduled_at": scheduled_at,
            "priority": priority,
            "queue": queue,
            "organization_id": organization_id,
            "by": by,
        }
        with check.naming(self.name):
            changed = check.push_options(self.options, given)
        copy: Job[P] = object.__new__(type(self))
        copy.__dict__.update(self.__dict__, options=changed, base=self.base)
        return copy

    def trigger(self, *, by: Any = None) -> JobExecution:
        """Run a cron job now; raise AlreadyRunning if overlap="skip" and an execution of it is live."""
        from django_jobs import services

        return services.trigger(self, by=by)

    async def atrigger(self, *, by: Any = None) -> JobExecution:
        """See trigger()."""
        from django_jobs import services

        return await services.atrigger(self, by=by)

    def pause(self, *, by: Any = None) -> bool:
        """Start no execution and fire no tick of this job, in any process, until resume(); False if already paused."""
        from django_jobs import services

        return services.pause_job(self.name, by=by)

    async def apause(self, *, by: Any = None) -> bool:
        """See pause()."""
        from django_jobs import services

        return await services.apause_job(self.name, by=by)

    def resume(self, *, by: Any = None) -> bool:
        """End a pause: waiting executions run, ticks that came in the meantime do not; False if it was not paused."""
        from django_jobs import services

        return services.resume_job(self.name, by=by)

    async def aresume(self, *, by: Any = None) -> bool:
        """See resume()."""
        from django_jobs import services

        return await services.aresume_job(self.name, by=by)

    @functools.cached_property
    def base(self) -> Job[P]:
        """The registered job, of which using() makes copies; the sender of the signals."""
        return self

    @property
    def takes_context(self) -> bool:
        """Whether the handler's first parameter is a JobContext."""
        return self.schema.takes_context

    @property
    def mode(self) -> str:
        """What starts its runs: "cron", or the `kind` of the dispatcher: "database", "queue" (redis) or "direct"."""
        from django_jobs import services

        return services.mode(self)

    def resolve(self) -> None:
        """Resolve what had to wait for other modules; raise DefinitionError if it turns out to be wrong."""
        self.schema.resolve()
        if self.is_default_name and (name := registry.default_name(self.func)) != self.name:
            raise DefinitionError(
                f"{self.name} was defined before the app registry was ready, and its app turned out to name it {name}: "
                f"give it name=…, or import {self.func.__module__} later."
            )
        if self.cron is not None and self.schema.required:
            raise DefinitionError(_split(self))

    def _dumped(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        if self.cron is not None:
            raise DefinitionError(f"{self.name} is a cron job, which cannot be pushed; call trigger() to run it now.")
        return self.schema.dump(args, kwargs)

    def _items(self, items: Iterable[Mapping[str, Any] | Item]) -> list[Item]:
        made = []
        for index, item in enumerate(items):
            if isinstance(item, Item):
                if item.job != self:
                    raise DefinitionError(f"{self.name}: item {index} is for {item.job.name}; push it there.")
                made.append(item)
            elif isinstance(item, Mapping):
                try:
                    text = self._dumped((), item)
                except InvalidPayload as error:
                    raise InvalidPayload(f"item {index}: {error}") from error
                made.append(Item(job=self.base, options=self.options, payload_json=text))
            else:
                raise InvalidPayload(f"{self.name}: item {index} is {type(item).__name__}; expected a dict or item(…).")
        return made

    async def _acall(self, context: JobContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        token = enter_context(context)
        try:
            return await self.func(context, *args, **kwargs)
        finally:
            leave_context(token)


# A template calls whatever callable it names, but must not call these.
for _verb in (
    *("push", "apush", "push_many", "apush_many", "trigger", "atrigger"),
    *("pause", "apause", "resume", "aresume"),
):
    getattr(Job, _verb).alters_data = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One checked entry of push_many(); made by Job.item()."""

    job: Job[...]
    options: PushOptions
    payload_json: str


class JobDecorator(Protocol):
    """The type of `job(…)` with options; a leading JobContext is not a parameter of the job."""

    @overload
    def __call__(self, func: Callable[Concatenate[JobContext, P], Any], /) -> Job[P]: ...
    @overload
    def __call__(self, func: Callable[P, Any], /) -> Job[P]: ...


@overload
def job(func: Callable[Concatenate[JobContext, P], Any], /) -> Job[P]: ...
@overload
def job(func: Callable[P, Any], /) -> Job[P]: ...
@overload
def job(**options: Unpack[JobOptions]) -> JobDecorator: ...
def job(func: Any = None, /, **options: Any) -> Any:
    """Register a function as a job, with or without options; raise DefinitionError if anything is wrong."""
    # The locals around a job that is defined inside a function: its annotations may name classes defined there.
    frame = sys._getframe(1)
    localns = frame.f_locals if frame.f_locals is not frame.f_globals else None
    if func is None:
        return lambda function: _define(function, options, localns)
    return _define(func, options, localns)


def _define(func: Any, options: dict[str, Any], localns: Mapping[str, Any] | None) -> Job[...]:
    given = options.get("name")
    _check_function(func, given)
    with check.naming(given or func.__qualname__):
        check.check_known(options)
        name = check.name(registry.default_name(func) if given is None else given)
    with check.naming(name):
        is_async = iscoroutinefunction(func) or iscoroutinefunction(inspect.unwrap(func))
        fields = check.job_options(options, is_async=is_async)
        aliases = check.aliases(options.get("aliases", ()))
        description = _description(func, options.get("description"))
    made: Job[...] = Job(
        name=name,
        func=func,
        schema=Schema(name, func, localns),
        is_async=is_async,
        aliases=aliases,
        is_default_name=given is None,
        module_spec=getattr(inspect.unwrap(func), "__globals__", {}).get("__spec__"),
        description=description,
        **fields,
    )
    if made.schema.is_resolved:
        made.resolve()
    registry.register(made)
    return made


def _check_function(func: Any, name: Any) -> None:
    plain = inspect.unwrap(func) if callable(func) and not isinstance(func, Job) else func
    if not inspect.isfunction(plain) or isinstance(func, type):
        what = "already a job" if isinstance(func, Job) else f"{func!r}"
        raise DefinitionError(f"@job decorates a plain function, written `@job` or `@job(name=…)`; this is {what}.")
    if inspect.isgeneratorfunction(plain) or inspect.isasyncgenfunction(plain):
        raise DefinitionError(
            f"{func.__qualname__}: a generator cannot be a handler; nobody would iterate it. Use a loop."
        )
    if func.__name__ == "<lambda>" and name is None:
        raise DefinitionError(
            "@job decorates a plain function; a lambda has no name for its rows. Write a def, or name=…."
        )


def _description(func: Any, given: Any) -> str:
    if given is None:
        given = (inspect.getdoc(func) or "").strip().partition("\n")[0]
    if not isinstance(given, str):
        raise DefinitionError(f"description={given!r}; expected text.")
    return check.storable(given, "description")


def _split(made: Job[...]) -> str:
    return (
        f"{made.name} is a cron job, but its handler needs {', '.join(sorted(made.schema.required))}. A job is cron or "
        f"pushed, never both: split it into a cron job without parameters and another job that it pushes."
    )
