"""Dispatchers tell workers that there is work; the table is the truth, so a hint may be lost or come twice."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from uuid import UUID

from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.utils.module_loading import import_string

from django_jobs.conf import DispatcherSpec, get_settings
from django_jobs.context import shielded
from django_jobs.dispatchers.base import Dispatcher, Subscription, Unavailable

__all__ = ["Dispatcher", "Subscription", "Unavailable", "announce", "announce_all", "announce_cancel", "get_dispatcher"]

logger = logging.getLogger("django_jobs")

# Seconds between log lines: with a broker that is down, every push fails. A line counts the failures since the last.
LOG_INTERVAL = 30.0

_lock = threading.Lock()
_current: tuple[DispatcherSpec, Dispatcher] | None = None
_logged_at = float("-inf")
_unlogged = 0


def get_dispatcher() -> Dispatcher:
    """Return the dispatcher that the settings name: one per process, made at first use and again when they change."""
    global _current
    spec = get_settings().dispatcher
    current = _current
    if current is not None and current[0] is spec:
        return current[1]
    with _lock:
        if _current is None or _current[0] != spec:
            previous, _current = _current, (spec, _make(spec))
            if previous is not None:
                previous[1].close()
        else:
            # Other settings changed; subscriptions to this dispatcher go on.
            _current = (spec, _current[1])
        return _current[1]


def _forget(*, setting: str, **kwargs: Any) -> None:
    """Make a new dispatcher next time when settings that name its server change, as in tests."""
    global _current
    if setting == "CACHES":
        with _lock:
            previous, _current = _current, None
        if previous is not None:
            previous[1].close()


setting_changed.connect(_forget, dispatch_uid="django_jobs.dispatchers")


def announce(queue: str, ids: Sequence[UUID], *, priority: int = 0) -> None:
    """Send a hint for rows of one queue and priority. A failure is logged, never raised."""
    _tell(lambda dispatcher: dispatcher.hint(queue, ids, priority=priority), f"{len(ids)} hint(s) for queue {queue!r}")


def announce_all(rows: Iterable[tuple[str, int, UUID]]) -> None:
    """Send hints for rows given as queue, rank and id, one for each queue and rank, the best rank first."""
    batches: dict[tuple[int, str], list[UUID]] = {}
    for queue, rank, pk in rows:
        batches.setdefault((rank, queue), []).append(pk)
    for (rank, queue), ids in sorted(batches.items()):
        announce(queue, ids, priority=-rank)


def announce_cancel(ids: Sequence[UUID]) -> None:
    """Tell the workers to look at the cancel marks of these running rows now; see announce()."""
    _tell(lambda dispatcher: dispatcher.cancel_hint(ids), f"{len(ids)} cancel hint(s)")


def _tell(send: Callable[[Dispatcher], None], what: str) -> None:
    try:
        # A handler that pushes may be interrupted at any moment, but not between a command and its answer.
        with shielded():
            send(get_dispatcher())
    except Exception as error:  # noqa: BLE001 - whatever the dispatcher's technology raises, the rows are stored
        _log_failure(error, what)


def _make(spec: DispatcherSpec) -> Dispatcher:
    try:
        backend = import_string(spec.backend)
    except ImportError as error:
        raise ImproperlyConfigured(
            f"DJANGO_JOBS: DISPATCHER is {spec.backend!r}, which cannot be imported ({error}); expected the path "
            "of a django_jobs.dispatchers.Dispatcher."
        ) from error
    if not isinstance(backend, type) or not issubclass(backend, Dispatcher):
        raise ImproperlyConfigured(
            f"DJANGO_JOBS: DISPATCHER is {spec.backend!r}, which is {backend!r}; expected a subclass of "
            "django_jobs.dispatchers.Dispatcher."
        )
    return backend(spec.options)


def _log_failure(error: Exception, what: str) -> None:
    global _logged_at, _unlogged
    with _lock:
        if time.monotonic() - _logged_at < LOG_INTERVAL:
            _unlogged += 1
            return
        left_out, _unlogged, _logged_at = _unlogged, 0, time.monotonic()
    more = f" ({left_out} more failures since the last message)" if left_out else ""
    # When the server is at fault, a traceback would add nothing to the text.
    is_known = isinstance(error, Unavailable)
    logger.error(
        "the dispatcher failed, %s not sent%s; the rows are stored, and workers find them by polling%s",
        what,
        more,
        f": {error}" if is_known else "",
        exc_info=None if is_known else error,
    )
