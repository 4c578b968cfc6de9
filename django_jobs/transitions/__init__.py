"""Every write of `status`: one verb per transition, each a guarded UPDATE; workers, services and the runtime call them.

No verb raises because another process was faster: the number of rows, or their ids, tells what happened. Assignments
read only columns that their statement has not assigned yet, and `status` is last: MariaDB evaluates SET from left to
right.
"""

from __future__ import annotations

from django_jobs.transitions.claims import claim, claim_within
from django_jobs.transitions.endings import Ending, abort, fail, release, reschedule, succeed, with_entry
from django_jobs.transitions.finishing import finish, still_running
from django_jobs.transitions.inserts import insert
from django_jobs.transitions.requests import cancel, mark_cancel, retry, start_now
from django_jobs.transitions.rescues import RESCUES_ALLOWED, bury, rescue
from django_jobs.transitions.staging import park, promote, unpark

__all__ = [
    "RESCUES_ALLOWED",
    "Ending",
    "abort",
    "bury",
    "cancel",
    "claim",
    "claim_within",
    "fail",
    "finish",
    "insert",
    "mark_cancel",
    "park",
    "promote",
    "release",
    "reschedule",
    "rescue",
    "retry",
    "start_now",
    "still_running",
    "succeed",
    "unpark",
    "with_entry",
]
