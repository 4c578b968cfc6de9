"""`jobs purge`: delete the executions of jobs that no process knows any more."""

from __future__ import annotations

import time

from django_jobs import clock
from django_jobs.cli.errors import NothingDone, UsageError
from django_jobs.cli.terminal import Terminal
from django_jobs.models import Worker, jobs_alias
from django_jobs.runtime.purge import COUNTED, Leftover, leftovers, purge, unregistered

# Seconds between portions: half of the time the database is left to the jobs.
PAUSE = 0.02


def purge_unregistered(terminal: Terminal, *, unregistered_only: bool, yes: bool, by: str) -> None:
    """Show the executions of unknown jobs, ask, and delete the finished and parked ones portion by portion."""
    if not unregistered_only:
        raise UsageError("Say what to purge: --unregistered means the executions of jobs that no process knows.")
    using = jobs_alias()
    found = leftovers(unregistered(using=using), using=using)
    if not found:
        terminal.json({"deleted": 0, "names": [], "left": 0})
        terminal.line("Nothing to purge.")
        return
    terminal.table(("NAME", "FINISHED", "PARKED", "WAITING OR RUNNING"), [_cells(each) for each in found])
    names = [each.name for each in found if each.purgeable]
    deleted = 0
    if names:
        if not Worker.objects.using(using).fresh(clock.now(using)).exists():
            terminal.note("No other process is live, so only the jobs that this one imports count as known.")
        if not terminal.confirm(f"Delete the finished and parked executions of {len(names)} name(s)?", yes=yes):
            raise NothingDone("Nothing was purged.")
        for count in purge(names, using=using, by=by):
            deleted += count
            terminal.progress(f"{deleted:,} deleted")
            time.sleep(PAUSE)
        terminal.end_progress()
    live = sum(each.live for each in found)
    terminal.json({"deleted": deleted, "names": names, "left": live})
    left = f", {live:,} that are waiting or running were left alone; cancel them first" if live else ""
    if not deleted:
        raise NothingDone(f"Nothing was purged{left}.")
    terminal.line(f"{deleted:,} deleted{left}.")


def _cells(each: Leftover) -> tuple[str, ...]:
    return (each.name or "?", *(_number(count) for count in (each.finished, each.parked, each.live)))


def _number(count: int) -> str:
    return f"{COUNTED:,}+" if count > COUNTED else f"{count:,}"
