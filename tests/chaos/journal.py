"""What the actors asked for, in a file outside of the database: one JSON object a line, appended whole."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENVIRONMENT = "CHAOS_JOURNAL"


def write(**line: Any) -> None:
    """Append one line."""
    journal = os.open(os.environ[ENVIRONMENT], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(journal, json.dumps(line).encode() + b"\n")
    finally:
        os.close(journal)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """One push that returned."""

    row_id: str
    token: str
    job_name: str
    tag: str
    # False: its key found a live row, which is `row_id`.
    created: bool
    # Was its savepoint rolled back?
    undone: bool = False
    key: str = ""
    thing: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """All that was asked for."""

    pushes: tuple[Pushed, ...]
    # How each transaction ended, as far as its producer knows: committed, rolled back, unknown.
    fates: dict[str, str]
    # How often each row was asked to be cancelled and retried.
    cancels: dict[str, int]
    retries: dict[str, int]


def read(path: Path) -> Journal:
    """Return what the file says."""
    pushes, fates = [], {}
    asked: dict[str, dict[str, int]] = {"cancel": {}, "retry": {}}
    for line in path.read_text().splitlines():
        match json.loads(line):
            case {"event": "push", **fields}:
                pushes.append(Pushed(**fields))
            case {"event": "end", "token": token, "fate": fate}:
                fates[token] = fate
            case {"event": "ask", "verb": verb, "row_id": row_id}:
                asked[verb][row_id] = asked[verb].get(row_id, 0) + 1
    return Journal(pushes=tuple(pushes), fates=fates, cancels=asked["cancel"], retries=asked["retry"])
