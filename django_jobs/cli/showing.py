"""`jobs show`: everything about one execution."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django_jobs import clock
from django_jobs.cli import records
from django_jobs.cli.choosing import begun_id, gone
from django_jobs.cli.errors import UsageError
from django_jobs.cli.terminal import Terminal
from django_jobs.models import JobExecution, jobs_alias
from django_jobs.reading import detail, words

HIDDEN = "(hidden: the job is sensitive)"


def show(terminal: Terminal, text: str) -> None:
    """Show everything about one execution."""
    using = jobs_alias()
    pk = begun_id(text, using=using)
    row = JobExecution.objects.using(using).filter(pk=pk).first()
    if row is None:
        raise UsageError(gone(pk))
    terminal.json(records.full(row))
    if terminal.as_json:
        return
    now = clock.now(using)
    sections = detail.sections(row)
    facts = [(label, value) for label, value in _facts(row, now, sections) if value]
    width = max(len(label) for label, _value in facts)
    for label, value in facts:
        terminal.text(f"{label.ljust(width)}  {value}")
    for title, body in _sections(sections):
        terminal.text(f"\n{title}")
        terminal.text("\n".join(f"  {line}" for line in body.splitlines()))


def _facts(row: JobExecution, now: datetime, sections: dict[str, Any]) -> list[tuple[str, str]]:
    _kind, word, note = words.state(row, now)
    progress = sections["progress"]
    return [
        ("Execution", str(row.pk)),
        ("Job", row.job_name + ("" if sections["is_known"] else " (not registered here)")),
        ("Status", f"{word} ({note})" if note else word),
        ("Error", row.error),
        ("Attempt", f"{row.attempt} of {row.max_attempts}"),
        ("Rescues", str(row.rescues) if row.rescues else ""),
        ("Queue", row.queue),
        ("Priority", words.priority(row.priority)),
        ("Key", row.key),
        ("Organization", row.organization_id or ""),
        ("Created", words.moment(row.created_at)),
        ("Due", words.moment(row.scheduled_at)),
        ("Cron tick", words.moment(row.tick_at) if row.tick_at else ""),
        ("Started", words.moment(row.started_at) if row.started_at else ""),
        ("Completed", words.moment(row.completed_at) if row.completed_at else ""),
        ("Took", "" if (took := words.run_time(row, now)) == words.EMPTY else took),
        ("Worker", detail.worker_name(row) or str(row.worker_id or "")),
        ("Progress", f"{progress['text']} {progress['note']}".strip() if progress else ""),
        ("Pushed by", "" if (who := words.who(row)) == words.EMPTY else who),
        ("Cancel requested", _by(row.cancel_requested_at, row.cancelled_by_name)),
        ("Retried", _by(row.retried_at, row.retried_by_name)),
        ("Copy of", str(row.copied_from or "")),
    ]


def _by(at: datetime | None, name: str) -> str:
    return "" if at is None else words.moment(at) + (f" by {name}" if name else "")


def _sections(sections: dict[str, Any]) -> list[tuple[str, str]]:
    is_masked = sections["is_masked"]
    found = [("Payload", HIDDEN if is_masked else sections["payload_text"])]
    if sections["has_result"]:
        found.append(("Result", HIDDEN if is_masked else sections["result_text"]))
    found += [_failure(error) for error in sections["failures"]]
    if sections["has_logs"]:
        found.append(("Logs", HIDDEN if is_masked else "\n".join(map(_log_line, sections["logs"]))))
    return found


def _failure(error: dict[str, Any]) -> tuple[str, str]:
    attempt = f"Attempt {error['attempt']}: " if error.get("attempt") else ""
    where = f"on {error['worker']}" if error.get("worker") else ""
    when = " ".join(filter(None, [" – ".join(error.get("times", ())), where]))
    lines = filter(None, [error["message"], when, error.get("traceback", "")])
    return f"{attempt}{error.get('exception', '')}", "\n".join(lines)


def _log_line(entry: dict[str, str]) -> str:
    return " ".join(filter(None, map(entry.get, ("time", "level", "logger", "message"))))
