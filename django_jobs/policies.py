"""The options of a job combined with the current settings; the base of Job."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from django.utils.module_loading import import_string

from django_jobs.conf import get_settings
from django_jobs.options import INHERIT, Keep, Middleware
from django_jobs.retries import Retry
from django_jobs.states import Status

if TYPE_CHECKING:
    from django_jobs.schedules import Cron


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Policy:
    """The options that @job was given, and their effect together with `DJANGO_JOBS`."""

    name: str
    aliases: tuple[str, ...] = ()
    description: str = ""
    cron: Cron | None = None
    misfire: str = "latest"
    misfire_grace: float | None = None
    overlap: str = "skip"
    priority: int = 0
    queue: str = "default"
    # None inherits the setting; likewise in timeout, where 0 is no limit, and record.
    retry: Retry | None = None
    timeout: float | None = None
    interrupt: bool = True
    concurrency: int | None = None
    record: str | None = None
    keep: Keep = field(default_factory=Keep)
    atomic: bool = False
    use: tuple[Middleware | str, ...] = ()
    sensitive: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that its rows may have: its own first, then its aliases."""
        return (self.name, *self.aliases)

    def names_besides(self, name: str) -> tuple[str, ...]:
        """Return its other names."""
        return tuple(each for each in self.names if each != name)

    @property
    def kind(self) -> Literal["cron", "push"]:
        """Whether the clock or a push starts executions."""
        return "push" if self.cron is None else "cron"

    @property
    def effective_retry(self) -> Retry | None:
        """The retry policy in force."""
        return self.retry if self.retry is not None else Retry.of(get_settings().default_retry)

    @property
    def retries(self) -> int:
        """How often a failed execution runs again."""
        retry = self.effective_retry
        return 0 if retry is None else retry.retries

    @property
    def has_retry(self) -> bool:
        """Whether an execution may run again after a crash."""
        return self.retries > 0

    @property
    def max_attempts(self) -> int:
        """How many attempts an execution has that is pushed now."""
        return self.retries + 1

    @property
    def effective_timeout(self) -> float | None:
        """The seconds one attempt may take; None for no limit."""
        return get_settings().timeout if self.timeout is None else self.timeout or None

    @property
    def effective_record(self) -> str:
        """Which finished rows are recorded at all: "all", "error" or "none"."""
        return self.record or get_settings().record

    @property
    def effective_max_age(self) -> float | None:
        """For how many seconds finished rows are kept; None for no limit."""
        own: Any = self.keep.max_age
        return get_settings().keep_max_age if own is INHERIT else own

    def retention(self, status: Status | str) -> int | None:
        """Return how many finished rows of this status are kept, by `record` and `keep` together; None means all.

        Under RECORD "error", a cron job without its own `record` keeps its last success, so that "last run" is right.
        """
        record, name = self.effective_record, Status(status).value
        if record == "none":
            return 0
        count: int | None = getattr(self.keep, name)
        if count is INHERIT:
            count = getattr(get_settings(), f"keep_{name}")
        if record == "error" and status == Status.OK:
            return 1 if count != 0 and self.cron is not None and self.record is None else 0
        return count

    @property
    def middleware(self) -> tuple[Middleware, ...]:
        """The middleware around the handler, outermost first: that of the settings, then that of `use`."""
        settings = get_settings()
        made_for, chain = self.__dict__.get("_chain", (None, ()))
        if made_for is not settings:
            entries = (*settings.middleware, *self.use)
            chain = tuple(import_string(entry) if isinstance(entry, str) else entry for entry in entries)
            self.__dict__["_chain"] = settings, chain
        return chain  # type: ignore[no-any-return]
