"""Which moves between statuses are legal: for the tests that judge what became of rows."""

from __future__ import annotations

from django_jobs.states import TRANSITIONS, Status


def is_legal(source: Status | None, target: Status) -> bool:
    """Say whether some verb moves a row from `source` to `target`; a source of None is a row that did not exist yet."""
    return any(
        target in move.targets and (source in move.sources if source is not None else not move.sources)
        for move in TRANSITIONS.values()
    )
