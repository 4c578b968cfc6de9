"""How the children of `--processes` report their health to the supervisor: a file each, written every few seconds."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from django_jobs.loop import Loop
from django_jobs.runtime.health import Answer, Probes

EVERY = 2.0
# Seconds; even a child whose handlers use up its processor gets around to reporting within this time.
STALE_AFTER = 30.0
WORSE = ("ok", "degraded", "draining", "starting", "failing")


@contextlib.contextmanager
def reported(probes: Probes, path: Path | None) -> Iterator[None]:
    """Write the answers of the probes into the file while the block runs; with None do nothing."""
    if path is None:
        yield
        return

    def tick(now: datetime | None = None) -> float:
        # All processes of a machine share its monotonic clock.
        report = {"at": time.monotonic(), "alive": asdict(probes.alive()), "ready": asdict(probes.ready())}
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(report))
        draft.replace(path)
        return EVERY

    loop = Loop(tick, name="report")
    loop.start()
    try:
        yield
    finally:
        loop.stop()


def read(path: Path) -> tuple[Answer, Answer] | None:
    """Return the last answers of a child, whether it is alive and whether it is ready; None before the first ones."""
    try:
        report = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    age = time.monotonic() - report["at"]
    if age > STALE_AFTER:
        silent = Answer(status="failing", problems=[f"it has not reported for {age:.0f} s"])
        return silent, silent
    return Answer(**report["alive"]), Answer(**report["ready"])


class Reports:
    """Answers for a supervisor, from what its children report; a child without a process is being replaced."""

    def __init__(self, places: Callable[[], Mapping[str, Path | None]]) -> None:
        """Take a function that returns each child's name with the file of its report, None while it has no process."""
        self._places = places
        self._is_draining = False

    def drain(self) -> None:
        """Note that the supervisor stops."""
        self._is_draining = True

    def alive(self) -> Answer:
        """See Probes.alive()."""
        reports = {name: read(path) for name, path in self._places().items() if path is not None}
        return _all_of({name: answers[0] for name, answers in reports.items() if answers is not None})

    def ready(self) -> Answer:
        """See Probes.ready()."""
        if self._is_draining:
            return Answer(status="draining", problems=["it is stopping and takes nothing new"])
        return _all_of({name: _readiness(path) for name, path in self._places().items()})


def _readiness(path: Path | None) -> Answer:
    if path is None:
        return Answer(status="failing", problems=["it ended and will be replaced soon"])
    answers = read(path)
    return Answer(status="starting", problems=["it has not reported yet"]) if answers is None else answers[1]


def _all_of(answers: Mapping[str, Answer]) -> Answer:
    """Return the worst status, and all problems, each with the name of its child."""
    problems = [f"{name}: {problem}" for name, answer in answers.items() for problem in answer.problems]
    statuses = [answer.status for answer in answers.values()]
    return Answer(status=max(statuses, key=WORSE.index, default="ok"), problems=problems)
