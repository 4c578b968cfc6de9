"""`jobs list --jobs` and `--queues`: each job and queue, as the code declares it and the tables know it."""

from __future__ import annotations

from typing import Any

from django_jobs import registry
from django_jobs.cli import records
from django_jobs.cli.terminal import Terminal
from django_jobs.models import jobs_alias
from django_jobs.reading import words
from django_jobs.reading.figures import Figure
from django_jobs.reading.overview import JobFacts, read_overview
from django_jobs.runtime.portions import portions

# As many jobs are read in one statement as on a page of the admin.
PER_PAGE = 50


def list_jobs(terminal: Terminal) -> None:
    """Show the jobs that this process knows, their state in the tables, and the names that are not registered."""
    using = jobs_alias()
    jobs = registry.all_jobs()
    # Without any job, one empty page: names that are not registered are read with each.
    pages = [read_overview(page, using=using) for page in portions(jobs, PER_PAGE)] or [read_overview((), using=using)]
    nameless = pages[0].nameless
    facts = [each for page in pages for each in page.jobs]
    terminal.json({"jobs": [_job_record(each) for each in facts], "unregistered": _figures(nameless)})
    if facts:
        terminal.table(
            ("JOB", "MODE", "NEXT RUN", "EXECUTIONS", "LAST", "PAUSED"), [_job_cells(each) for each in facts]
        )
    else:
        terminal.line("No job is registered. Decorate a function with @job in the jobs.py of an installed app.")
    for name, figure in nameless.items():
        terminal.line(f"No worker knows a job called {name!r}: {figure} parked.")


def _job_cells(facts: JobFacts) -> tuple[str, ...]:
    job, cron = facts.job, facts.job.cron
    ended = facts.last.completed_at if facts.last else None
    return (
        job.name,
        f"{job.mode} {cron.expression} {cron.effective_zone}" if cron else job.mode,
        words.moment(facts.next_run) if facts.next_run else "",
        ", ".join(f"{figure} {kind.word}" for kind, figure in facts.counts.items()),
        f"{facts.last.status} {words.age(ended, facts.now)} ago" if facts.last and ended else "",
        _since(facts.pause),
    )


def _job_record(facts: JobFacts) -> dict[str, Any]:
    job, cron = facts.job, facts.job.cron
    return {
        "name": job.name,
        "aliases": list(job.aliases),
        "description": str(job.description),
        "mode": job.mode,
        "cron": cron.expression if cron else None,
        "timezone": str(cron.effective_zone) if cron else None,
        "next_run_at": records.moment(facts.next_run),
        "queue": job.queue,
        "priority": job.priority,
        "retries": job.retries,
        "timeout": job.effective_timeout,
        "concurrency": job.concurrency,
        **_pause_record(facts.pause),
        "skips": facts.state.skips if facts.state else 0,
        "last_skip_at": records.moment(facts.state.last_skip_at) if facts.state else None,
        "last": records.ending(facts.last) if facts.last else None,
        "executions": _figures({kind.name: figure for kind, figure in facts.counts.items()}),
    }


def list_queues(terminal: Terminal) -> None:
    """Show the queues that jobs or the settings name, that are paused, or that have pending executions."""
    found = read_overview((), using=jobs_alias())
    terminal.json(
        {
            "queues": [
                {"name": each.name, "pending": _figure(each.pending), **_pause_record(each.pause)}
                for each in found.queues
            ]
        }
    )
    terminal.table(
        ("QUEUE", "PENDING", "PAUSED"), [(each.name, str(each.pending), _since(each.pause)) for each in found.queues]
    )


def _since(pause: Any) -> str:
    if pause is None:
        return ""
    return f"since {words.moment(pause.paused_at)}" + (f" by {pause.paused_by_name}" if pause.paused_by_name else "")


def _pause_record(pause: Any) -> dict[str, Any]:
    return {
        "paused_at": records.moment(pause.paused_at) if pause else None,
        "paused_by": (pause.paused_by_name or None) if pause else None,
    }


def _figure(figure: Figure) -> dict[str, Any]:
    return {"count": figure.count, "has_more": figure.is_cut}


def _figures(figures: dict[str, Figure]) -> dict[str, Any]:
    return {name: _figure(figure) for name, figure in figures.items()}
