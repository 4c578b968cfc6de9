"""How the children of `--processes` report their health to the supervisor: by the line that shows that they live."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from datetime import datetime

from django_jobs.loop import Loop
from django_jobs.runtime.health import Answer, Probes

EVERY = 2.0
# Seconds; even a child whose handlers use up its processor gets around to reporting within this time.
STALE_AFTER = 30.0
WORSE = ("ok", "degraded", "draining", "starting", "failing")


@contextlib.contextmanager
def reported(probes: Probes) -> Iterator[Callable[[], bytes]]:
    """Ask the probes every few seconds while the block runs; give it a function that returns the last report at once.

    Before the first report that is empty.
    """
    report = b""

    def tick(now: datetime | None = None) -> float:
        nonlocal report
        # All processes of a machine share its monotonic clock.
        answers = {"at": time.monotonic(), "alive": asdict(probes.alive()), "ready": asdict(probes.ready())}
        report = json.dumps(answers).encode()
        return EVERY

    loop = Loop(tick, name="report")
    loop.start()
    try:
        yield lambda: report
    finally:
        loop.stop()


def read(line: bytes) -> tuple[Answer, Answer] | None:
    """Return what a child has reported, whether it is alive and whether it is ready; None if it has not yet."""
    if not line:
        return None
    report = json.loads(line)
    age = time.monotonic() - report["at"]
    if age > STALE_AFTER:
        silent = Answer(status="failing", problems=[f"it has not reported for {age:.0f} s"])
        return silent, silent
    return Answer(**report["alive"]), Answer(**report["ready"])


class Reports:
    """Answers for a supervisor, from what its children report; a child without a process is being replaced."""

    def __init__(self, reports: Callable[[], Mapping[str, bytes | None]]) -> None:
        """Take a function that returns each child's name with its last report, None while it has no process."""
        self._reports = reports
        self._is_draining = False

    def drain(self) -> None:
        """Note that the supervisor stops."""
        self._is_draining = True

    def alive(self) -> Answer:
        """See Probes.alive()."""
        reports = {name: read(line) for name, line in self._reports().items() if line is not None}
        return _all_of({name: answers[0] for name, answers in reports.items() if answers is not None})

    def ready(self) -> Answer:
        """See Probes.ready()."""
        if self._is_draining:
            return Answer(status="draining", problems=["it is stopping and takes nothing new"])
        return _all_of({name: _readiness(line) for name, line in self._reports().items()})


def _readiness(line: bytes | None) -> Answer:
    if line is None:
        return Answer(status="failing", problems=["it ended and will be replaced soon"])
    answers = read(line)
    return Answer(status="starting", problems=["it has not reported yet"]) if answers is None else answers[1]


def _all_of(answers: Mapping[str, Answer]) -> Answer:
    """Return the worst status, and all problems, each with the name of its child."""
    problems = [f"{name}: {problem}" for name, answer in answers.items() for problem in answer.problems]
    statuses = [answer.status for answer in answers.values()]
    return Answer(status=max(statuses, key=WORSE.index, default="ok"), problems=problems)
