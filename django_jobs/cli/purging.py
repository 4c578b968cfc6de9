"""`jobs purge`: delete what is left of jobs that nobody knows any more."""

from __future__ import annotations

import time

from django_jobs import clock
from django_jobs.cli.errors import NothingDone, UsageError
from django_jobs.cli.terminal import Terminal
from django_jobs.conf import get_settings
from django_jobs.models import Worker, jobs_alias
from django_jobs.runtime.purge import COUNTED, Leftover, leftovers, purge, unregistered

# Jobs have the database for half of the time.
PAUSE = 0.02


def purge_unregistered(terminal: Terminal, *, unregistered_only: bool, yes: bool, by: str) -> None:
    """Show what is left, ask, and delete its finished and parked rows portion by portion."""
    if not unregistered_only:
        raise UsageError("Say what to purge: --unregistered is what is left of jobs that nobody knows.")
    using = jobs_alias()
    found = leftovers(unregistered(using=using), using=using)
    if not found:
        terminal.json({"deleted": 0, "names": [], "left": 0})
        terminal.line("Nothing to purge.")
        return
    terminal.table(("NAME", "FINISHED", "PARKED", "WAIT OR RUN"), [_cells(each) for each in found])
    names = [each.name for each in found if each.purgeable]
    deleted = 0
    if names:
        if not Worker.objects.using(using).fresh(clock.now(using), get_settings().worker_lost_after).exists():
            terminal.note("No process is live that could know more jobs than the settings of this one.")
        if not terminal.confirm(f"Delete the finished and parked executions of {len(names)} name(s)?", yes=yes):
            raise NothingDone("Nothing was purged.")
        for count in purge(names, using=using, by=by):
            deleted += count
            terminal.progress(f"{deleted:,} deleted")
            time.sleep(PAUSE)
        terminal.end_progress()
    live = sum(each.live for each in found)
    terminal.json({"deleted": deleted, "names": names, "left": live})
    left = f", {live:,} that wait or run were left alone; cancel them first" if live else ""
    if not deleted:
        raise NothingDone(f"Nothing was purged{left}.")
    terminal.line(f"{deleted:,} deleted{left}.")


def _cells(each: Leftover) -> tuple[str, ...]:
    return (each.name or "?", *(_number(count) for count in (each.finished, each.parked, each.live)))


def _number(count: int) -> str:
    return f"{COUNTED:,}+" if count > COUNTED else f"{count:,}"
