"""Do what is due when a platform's cron calls a URL; for projects without a process for `runjobs`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict

from django.contrib.auth.decorators import login_not_required
from django.db import connections, transaction
from django.http import HttpRequest, HttpResponse, HttpResponseBase, HttpResponseNotAllowed, JsonResponse
from django.urls import Resolver404
from django.utils.crypto import constant_time_compare
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.debug import sensitive_variables

from django_jobs.conf import get_settings
from django_jobs.runtime.serverless import Failure, run_within

# Seconds; many platforms end a request after a minute.
MAX_TIME = 50
# Seconds; less leaves no time beside an orderly end, and for more `runjobs --once` is better.
MAX_TIMES = range(8, 901)
MAX_JOBS = range(1, 1_000_001)

logger = logging.getLogger("django_jobs")

# Seconds between log lines of a kind, as anybody may call without the secret.
LOG_INTERVAL = 60.0
# When each line was logged last, by time.monotonic().
_logged: dict[str, float] = {}

View = Callable[..., HttpResponseBase]


def _outside_transactions(view: View) -> View:
    """Exempt a view from ATOMIC_REQUESTS, on every database that has it."""
    for alias in connections:
        view = transaction.non_atomic_requests(using=alias)(view)
    return view


@_outside_transactions
@csrf_exempt
@login_not_required
def run(request: HttpRequest) -> HttpResponse:
    """Fire due ticks, take over from dead processes, run due executions; answer with counts, as JSON.

    GET, which some platforms' cron uses, or POST, with the header `Authorization: Bearer <CRON_SECRET>`; without it,
    the answer is a 404. `?max_time=` bounds the whole call, 8 to 900 seconds, `?max_jobs=` the number of runs.
    """
    if not _is_authorised(request):
        # As for a URL that no pattern matches, so that the project's own 404 page is the same.
        raise Resolver404
    if request.method not in {"GET", "POST"}:
        return HttpResponseNotAllowed(["GET", "POST"])
    try:
        _refuse_unknown(request)
        max_time = _number(request, "max_time", MAX_TIMES) or MAX_TIME
        max_jobs = _number(request, "max_jobs", MAX_JOBS)
    except ValueError as error:
        return _answer({"error": str(error)}, status=400)
    try:
        return _answer(asdict(run_within(max_time, max_jobs=max_jobs)), status=200)
    except Failure as error:
        return _answer({"error": str(error)}, status=503)


@sensitive_variables()
def _is_authorised(request: HttpRequest) -> bool:
    secret = get_settings().cron_secret
    if secret is None:
        _log("the URL of django_jobs was called, but CRON_SECRET is not set: everybody gets a 404")
        return False
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    # Servers decode the bytes of a header as Latin-1, in which the last one of "à" is a space.
    right = constant_time_compare(token.strip(" \t").encode("latin-1", "replace"), secret.encode())
    if right and scheme.lower() == "bearer":
        return True
    _log("the URL of django_jobs was called without the right secret: the answer was a 404", every=LOG_INTERVAL)
    return False


def _log(text: str, *, every: float = float("inf")) -> None:
    """Log a warning, once in so many seconds for each process."""
    now = time.monotonic()
    if now - _logged.get(text, float("-inf")) >= every:
        _logged[text] = now
        logger.warning(text)


def _refuse_unknown(request: HttpRequest) -> None:
    for name in request.GET:
        if name not in {"max_time", "max_jobs"}:
            raise ValueError(f"There is no parameter {name[:20]!r}; expected max_time or max_jobs.")


def _number(request: HttpRequest, name: str, allowed: range) -> int | None:
    text = request.GET.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) in allowed):
        raise ValueError(f"{name} is {text[:20]!r}; expected a whole number from {allowed[0]} to {allowed[-1]}.")
    return int(text)


def _answer(body: dict[str, object], *, status: int) -> HttpResponse:
    return JsonResponse(body, status=status, headers={"Cache-Control": "no-store"})
