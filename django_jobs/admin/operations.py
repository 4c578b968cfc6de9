"""The buttons of an execution's page, as data: label, permission, when it is shown, and the service it calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django.utils.translation import gettext_lazy as _

from django_jobs import services
from django_jobs.models import JobExecution
from django_jobs.states import FINAL, LIVE, TRANSITIONS, Status

if TYPE_CHECKING:
    from django.utils.functional import _StrPromise


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One button of the detail page."""

    verb: str
    label: _StrPromise
    # The first part of the codename `<permission>_jobexecution`.
    permission: str
    # Does the row's state allow it? This decides only whether the button is shown: the service's UPDATE checks again.
    offered: Callable[[JobExecution], bool]
    run: Callable[[JobExecution, Any], JobExecution]
    done: Callable[[JobExecution], _StrPromise]
    # The entry in the row's history.
    log: _StrPromise


OPERATIONS = {
    operation.verb: operation
    for operation in (
        Operation(
            verb="cancel",
            log=_("Cancelled."),
            label=_("Cancel"),
            permission="cancel",
            offered=lambda row: row.status in LIVE and not row.is_cancelling,
            run=services.cancel,
            done=lambda row: (
                _("Cancellation requested: the handler has been told to stop.")
                if row.status == Status.RUNNING
                else _("Cancelled.")
            ),
        ),
        Operation(
            verb="retry",
            log=_("Retried."),
            label=_("Retry"),
            permission="retry",
            offered=lambda row: row.status in TRANSITIONS["retry"].sources,
            run=services.retry,
            done=lambda row: _("Queued again."),
        ),
        Operation(
            verb="start",
            log=_("Started before its time."),
            label=_("Start now"),
            permission="trigger",
            # A parked row would be set aside again at once.
            offered=lambda row: row.status == Status.SCHEDULED and not row.parked_reason,
            run=services.start_now,
            done=lambda row: _("Made due now."),
        ),
        Operation(
            verb="copy",
            log=_("Pushed a copy."),
            label=_("Run a copy"),
            permission="trigger",
            offered=lambda row: row.status in FINAL,
            run=services.copy,
            done=lambda row: _("Pushed a copy: this is the new execution."),
        ),
    )
}
