"""What the supervisor of `runjobs --processes` tells a child: its place among the others."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace

from django_jobs.runtime.options import Options

# By environment, since a child has the command line of its supervisor.
ENVIRONMENT = "DJANGO_JOBS_CHILD"


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """The place of one child, which one process after another fills."""

    number: int
    roles: tuple[str, ...]

    def __str__(self) -> str:
        return f"process {self.number} ({', '.join(self.roles)})"

    def environment(self) -> dict[str, str]:
        """Return the environment in which the same command line becomes this child."""
        return {**os.environ, ENVIRONMENT: json.dumps({"number": self.number, "roles": self.roles})}

    def narrow(self, options: Options) -> Options:
        """Return the child's share of the supervisor's options, with its limits lowered a little at random."""
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
        """Return this process's place, or None; call it once: processes that a child starts are not children."""
        text = os.environ.pop(ENVIRONMENT, None)
        if text is None:
            return None
        place = json.loads(text)
        return cls(number=place["number"], roles=tuple(place["roles"]))
