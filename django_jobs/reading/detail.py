"""The long parts of one execution (payload, result, errors and logs) as plain data for a page or a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.utils.translation import gettext as _

from django_jobs import registry
from django_jobs.models import JobExecution, Worker
from django_jobs.policies import Policy
from django_jobs.reading.words import parsed_moment, pretty_json
from django_jobs.states import Status

if TYPE_CHECKING:
    from django_jobs.definition import Job


def sections(execution: JobExecution) -> dict[str, Any]:
    """Return the context of the templates, which escape the texts: nothing is escaped here."""
    job, masked = registry.find(execution.job_name), is_masked(execution)
    return {
        "execution": execution,
        "is_known": job is not None,
        "is_masked": masked,
        "payload_text": "" if masked else pretty_json(execution.payload),
        "result_text": "" if masked or execution.result is None else pretty_json(execution.result),
        "has_result": execution.result is not None,
        "progress": progress(execution.progress),
        # Not "errors": the admin's own template would show those as errors of a form.
        "failures": [error_entry(entry) for entry in reversed(_listed(execution.errors))],
        "logs": [] if masked else [log_entry(entry) for entry in _listed(execution.logs)],
        "has_logs": bool(execution.logs),
        "retention": retention(job),
    }


def is_masked(execution: JobExecution) -> bool:
    """Whether payload, result and logs are hidden, since the job is sensitive."""
    job = registry.find(execution.job_name)
    return job is not None and job.sensitive


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
        "worker": entry.get("worker") or "",
        "times": [parsed_moment(entry[name]) for name in ("started_at", "failed_at") if entry.get(name)],
    }


def worker_name(execution: JobExecution) -> str | None:
    """Return host and process id of the worker that has, or had, the row; None if it has no row any more."""
    if execution.worker_id is None:
        return None
    found = Worker.objects.using(execution._state.db).only("host", "pid").filter(pk=execution.worker_id).first()
    return None if found is None else str(found)


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
    policy = job or Policy(name="")
    counts = {status: policy.retention(status) for status in (Status.OK, Status.ERROR, Status.CANCELLED)}
    kept = ", ".join(
        (_("all %(status)s") if count is None else _("%(count)d %(status)s")) % {"count": count, "status": status.label}
        for status, count in counts.items()
    )
    text = (_("Kept of this job: the newest %(kept)s") if job else _("Kept of each job: the newest %(kept)s")) % {
        "kept": kept
    }
    if (age := policy.effective_max_age) is not None:
        text += _(", for at most %(days)g days") % {"days": round(age / 86400, 2)}
    return text + ("." if job else _(", unless the job says otherwise."))
