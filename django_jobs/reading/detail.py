"""The long parts of one execution (payload, result, errors and logs) as plain data for a page or a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.utils.translation import gettext as _

from django_jobs import registry
from django_jobs.conf import get_settings
from django_jobs.models import JobExecution, Worker
from django_jobs.reading.words import parsed_moment, pretty_json
from django_jobs.states import Status

if TYPE_CHECKING:
    from django_jobs.definition import Job


def sections(execution: JobExecution) -> dict[str, Any]:
    """Return the context of the templates, which escape the texts: nothing is escaped here."""
    job = registry.find(execution.job_name)
    masked = job is not None and job.sensitive
    errors = [error_entry(entry) for entry in reversed(_listed(execution.errors))]
    return {
        "execution": execution,
        "is_known": job is not None,
        "is_masked": masked,
        "payload_text": "" if masked else pretty_json(execution.payload),
        "result_text": "" if masked or execution.result is None else pretty_json(execution.result),
        "has_result": execution.result is not None,
        "progress": progress(execution.progress),
        # Not "errors": the admin's own template would show those as errors of a form.
        "failures": _with_hosts(errors, execution),
        "logs": [] if masked else [log_entry(entry) for entry in _listed(execution.logs)],
        "has_logs": bool(execution.logs),
        "retention": retention(job),
    }


def _listed(value: Any) -> list[Any]:
    # The columns hold lists, but a row edited by hand must not break the page.
    return value if isinstance(value, list) else [value] if value else []


def error_entry(entry: Any) -> dict[str, Any]:
    """Return one failed attempt under the names the template knows."""
    if not isinstance(entry, dict):
        return {"message": str(entry)}
    return {
        "attempt": entry.get("attempt"),
        "exception": entry.get("exception", ""),
        "message": entry.get("message", ""),
        "traceback": entry.get("traceback", ""),
        "worker": entry.get("worker", ""),
        "times": [parsed_moment(entry[name]) for name in ("started_at", "failed_at", "ended_at") if entry.get(name)],
    }


def _with_hosts(errors: list[dict[str, Any]], execution: JobExecution) -> list[dict[str, Any]]:
    workers = worker_names({str(error.get("worker") or "") for error in errors} - {""}, execution)
    return [{**error, "host": workers.get(str(error.get("worker")), error.get("worker") or "")} for error in errors]


def worker_names(ids: set[str], execution: JobExecution) -> dict[str, str]:
    """Return host and process id of those of the workers whose rows still exist; at most one query."""
    wanted = {key: parsed for key in ids if (parsed := _uuid(key)) is not None}
    if not wanted:
        return {}
    found = Worker.objects.using(execution._state.db).in_bulk(list(wanted.values()))
    return {key: str(found[pk]) for key, pk in wanted.items() if pk in found}


def _uuid(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None


def log_entry(entry: Any) -> dict[str, str]:
    """Return one log line under the names the template knows."""
    if not isinstance(entry, dict):
        return {"time": "", "level": "", "logger": "", "message": str(entry)}
    level = str(entry.get("level", ""))
    return {
        "time": parsed_moment(entry["time"]) if entry.get("time") else "",
        "level": level,
        "css": level.lower() if level.isalpha() else "",
        "logger": str(entry.get("logger", "")),
        "message": str(entry.get("message", "")),
    }


def progress(value: Any) -> dict[str, Any] | None:
    """Return the progress that a handler last reported: a text, a note and, with a total, the numbers for a bar."""
    if not isinstance(value, dict):
        return None
    done, total = value.get("done"), value.get("total")
    has_bar = isinstance(done, int | float) and isinstance(total, int | float) and total > 0
    return {
        "text": str(done) if total is None else f"{done} / {total}",
        "note": str(value.get("note") or ""),
        "has_bar": has_bar,
        # Strings, since a template would localize 0.5 to "0,5".
        "value": str(done),
        "max": str(total),
    }


def retention(job: Job[...] | None) -> str:
    """Return the sentence that says how many finished executions are kept: of this job, or of any job for None."""
    settings = get_settings()
    age: Any
    if job is None:
        counts = _settings_counts()
        age = settings.keep_max_age
    else:
        counts = {status: job.retention(status) for status in (Status.OK, Status.ERROR, Status.CANCELLED)}
        age = job.effective_keep.max_age
    kept = ", ".join(
        (_("all %(status)s") if count is None else _("%(count)d %(status)s")) % {"count": count, "status": status.label}
        for status, count in counts.items()
    )
    text = (_("Kept of this job: the newest %(kept)s") if job else _("Kept of each job: the newest %(kept)s")) % {
        "kept": kept
    }
    if age is not None:
        text += _(", for at most %(days)g days") % {"days": round(age / 86400, 2)}
    return text + ("." if job else _(", unless the job says otherwise."))


def _settings_counts() -> dict[Status, int | None]:
    settings = get_settings()
    counts = {
        Status.OK: settings.keep_ok,
        Status.ERROR: settings.keep_error,
        Status.CANCELLED: settings.keep_cancelled,
    }
    if settings.record != "all":
        counts[Status.OK] = 0
    if settings.record == "none":
        counts = dict.fromkeys(counts, 0)
    return counts
