"""What a child of `runjobs --processes` is told by its supervisor: its place among the others."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

from django_jobs.runtime.options import Options

# The command line of a child is its supervisor's.
ENVIRONMENT = "DJANGO_JOBS_CHILD"


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """The place of one child; the process that fills it changes."""

    number: int
    roles: tuple[str, ...]
    # The file in which it tells how it is, if anybody wants to know.
    report: Path | None = None

    def __str__(self) -> str:
        return f"process {self.number} ({', '.join(self.roles)})"

    def environment(self) -> dict[str, str]:
        """Return the environment in which the same command line becomes this child."""
        place = {"number": self.number, "roles": self.roles, "report": self.report and str(self.report)}
        return {**os.environ, ENVIRONMENT: json.dumps(place)}

    def narrow(self, options: Options) -> Options:
        """Return what of the options of the whole is this child's; its limits are a little lower, by chance."""
        return replace(
            options,
            roles=self.roles,
            processes=None,
            max_time=None,
            limits=options.limits.lowered(),
            health_port=None,
            heartbeat_file=None,
        )

    @classmethod
    def of_environment(cls) -> Child | None:
        """Return what this process is, if it is a child; asked once, since what it starts itself is none."""
        text = os.environ.pop(ENVIRONMENT, None)
        if text is None:
            return None
        place = json.loads(text)
        report = place["report"] and Path(place["report"])
        return cls(number=place["number"], roles=tuple(place["roles"]), report=report)
