"""The jobs of an app before and after a deploy, as the environment variable DEPLOYED says."""

from __future__ import annotations

import os

from django_jobs import JobContext, job
from tests.acc.jobs import AT_ONCE, nap, note, noted

VERSION = os.environ["DEPLOYED"]


@job(retry=AT_ONCE)
def long(ctx: JobContext, s: float = 60.0) -> None:
    """Sleep, in the old code; what the new code is handed is short."""
    with noted(ctx, VERSION):
        nap(ctx, s if VERSION == "old" else 0.0, heed=False)


@job(cron="* * * * * *" if VERSION == "old" else "* * * * * */2", overlap="allow")
def tick(ctx: JobContext) -> None:
    """Tell which code ran it."""
    note("TICK", ctx, VERSION)


def told(ctx: JobContext) -> None:
    """Tell which code ran it."""
    with noted(ctx, VERSION):
        pass


if VERSION == "old":
    job(name="deployed.renamed")(told)
    job(name="deployed.removed")(told)
else:
    job(name="deployed.renamed_since", aliases=["deployed.renamed"])(told)
    job(name="deployed.added")(told)
