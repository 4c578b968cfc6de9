"""The parts of one `runjobs` process, made for its options."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from django_jobs import dispatchers, registry
from django_jobs.dispatchers import Subscription
from django_jobs.execution.liveness import Liveness
from django_jobs.loop import Tick
from django_jobs.runtime.limits import MemoryLimit
from django_jobs.runtime.options import Options
from django_jobs.runtime.rescue import Rescue
from django_jobs.runtime.scheduler import Scheduler
from django_jobs.runtime.stage import Stage
from django_jobs.runtime.sweep import Sweep
from django_jobs.runtime.trim import Trim
from django_jobs.runtime.worker import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of a process; those of roles that it does not have are None."""

    using: str
    liveness: Liveness
    stage: Stage
    rescue: Rescue
    scheduler: Scheduler | None
    sweep: Sweep | None
    trim: Trim | None
    worker: Worker | None
    memory: MemoryLimit | None

    @classmethod
    def make(
        cls,
        options: Options,
        *,
        using: str,
        beat: Tick,
        on_recycle: Callable[[bool], None],
        on_limit: Callable[[str], None],
        on_death: Callable[[str, BaseException], None],
    ) -> Parts:
        """Make the parts; starts and reads nothing yet."""
        roles = options.roles
        is_worker = "worker" in roles
        liveness = Liveness(
            roles=list(roles),
            queues=options.served.to_row(),
            names=sorted(registry.names()),
            slots=options.concurrency if is_worker else 0,
            using=using,
        )
        stage = Stage(using=using, watch_queues=is_worker and options.served.is_any_but)
        worker = memory = None
        limits = options.limits
        if is_worker:
            worker = Worker(
                liveness=liveness,
                served=options.served,
                concurrency=options.concurrency,
                using=using,
                observed=stage,
                max_jobs=limits.max_jobs,
                on_recycle=on_recycle,
                on_spent=partial(on_limit, f"{limits.max_jobs} runs were started"),
                on_death=partial(on_death, "the worker"),
            )
            if limits.max_memory is not None:
                memory = MemoryLimit(limits.max_memory, worker, on_limit=on_limit)
        return cls(
            using=using,
            liveness=liveness,
            stage=stage,
            rescue=Rescue(using=using, beat=beat),
            scheduler=Scheduler(using=using) if "scheduler" in roles else None,
            sweep=Sweep(using=using) if "sweep" in roles else None,
            trim=Trim(using=using) if "sweep" in roles else None,
            worker=worker,
            memory=memory,
        )

    def ticks(self) -> dict[str, Tick]:
        """Return the functions to be called again and again, each in a thread of its own."""
        ticks: dict[str, Tick] = {"stage": self.stage.tick, "rescue": self.rescue.tick}
        if self.scheduler is not None:
            ticks["scheduler"] = self.scheduler.tick
        if self.sweep is not None:
            ticks["sweep"] = self.sweep.tick
        if self.trim is not None:
            ticks["trim"] = self.trim.tick
        return ticks


@contextlib.contextmanager
def subscribed(worker: Worker | None, options: Options) -> Iterator[Subscription | None]:
    """While the block runs, have the dispatcher wake the worker and run nothing itself."""
    dispatcher = dispatchers.get_dispatcher()
    with dispatcher.without_running():
        if worker is None:
            yield None
            return
        served = options.served
        queues, exclude = (None, served.names) if served.is_any_but else (served.names, ())
        subscription = dispatcher.subscribe(queues, worker.wake, worker.look, worker.wanted, exclude=exclude)
        try:
            yield subscription
        finally:
            subscription.close()
