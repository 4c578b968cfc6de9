"""Run the suite once per engine, all at the same time, and say at the end what ran: `python -m tests.run --help`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engines import ENGINES, Missing, die_with_parent, running

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / ".test-logs"
# pytest's own number for "no test was collected", which is no fault where marks leave nothing.
NOTHING_COLLECTED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    engine: str
    seconds: float = 0.0
    code: int = 0
    missing: str = ""
    broken: str = ""
    report: dict[str, Any] | None = None
    log: Path | None = None

    def count(self, outcome: str) -> int:
        return int((self.report or {}).get(outcome, 0))

    @property
    def state(self) -> str:
        if self.missing:
            return "MISSING, did not run"
        if self.broken:
            return "RED, its server did not start"
        return "green" if self.is_green else f"RED (exit code {self.code})"

    @property
    def is_green(self) -> bool:
        # Without a report pytest never reached its end.
        if self.missing or self.broken:
            return not self.broken
        return self.code == NOTHING_COLLECTED or (self.code == 0 and self.report is not None)


def run_engine(engine: str, pytest_args: list[str], *, show: bool, full_size: bool) -> Result:
    """Run pytest on one engine; its output goes to a file, or to the terminal if it is the only one."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="jobs-") as scratch:
        # Servers that refuse to run as root are started as somebody else, who has to get to their folders in here.
        Path(scratch).chmod(0o711)
        report, log = Path(scratch, "report.json"), LOGS / f"{engine}.log"
        try:
            with running(engine) as url, log.open("wb") as output:
                environment = os.environ | {
                    "ENGINE": engine,
                    "DATABASE_URL": url,
                    "TEST_REPORT": str(report),
                    "TMPDIR": scratch,
                    "FULL_SIZE": "1" if full_size else "",
                }
                code = subprocess.run(
                    [sys.executable, "-m", "pytest", *pytest_args],
                    cwd=ROOT,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    check=False,
                    stdout=None if show else output,
                    stderr=None if show else subprocess.STDOUT,
                    preexec_fn=die_with_parent,
                ).returncode
        except Missing as reason:
            return Result(engine=engine, missing=str(reason))
        except Exception as error:
            return Result(engine=engine, broken=f"{type(error).__name__}: {error}")
        found = json.loads(report.read_text()) if report.exists() else None
    return Result(engine=engine, seconds=time.monotonic() - started, code=code, report=found, log=None if show else log)


def tell(results: list[Result], *, slow: bool) -> int:
    """Print what ran, what was missing and the totals; return the exit code."""
    print()
    for result in results:
        if result.missing:
            print(f"{result.engine}: {result.state}: {result.missing}")
            continue
        if result.broken:
            print(f"{result.engine}: {result.state}: {result.broken}")
            continue
        servers = ", ".join((result.report or {}).get("servers", ["no report: the run broke off"]))
        print(f"{result.engine}: {result.state} in {result.seconds:.0f} s on {servers}")
        if left_out := result.count("left_out"):
            print(f"{result.engine}: {left_out} cases that need no database ran on sqlite alone")
        for name in (result.report or {}).get("missing", ()):
            print(f"{result.engine}: MISSING, the cases for it did not run: {name} is not installed")
    passed = sum(result.count("passed") for result in results)
    # A run that broke off without a failed test still counts as one failure.
    failed = sum(max(result.count("failed"), 0 if result.is_green else 1) for result in results)
    if not passed and not failed and not slow:
        print("No test ran.")
        failed += 1
    skipped = sum(result.count("skipped") for result in results)
    print(f"{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""))
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.run", description=__doc__)
    parser.add_argument("--engine", action="append", choices=ENGINES, help="only this one (may be repeated)")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--slow", action="store_true", help="the cases marked slow, instead of all others")
    kind.add_argument("--scale", action="store_true", help="the cases marked scale at their full size, one at a time")
    parser.add_argument("pytest", nargs="*", metavar="PYTEST_ARGUMENT", help="after --: passed on to pytest")
    options = parser.parse_args()
    engines = options.engine or list(ENGINES)
    chosen = ["-m", "not slow"]
    if options.slow:
        # They mostly wait: four processes wait at once, and get few at a time, so that none has many left at the end.
        # One case waits for two minutes by itself, and for longer beside others that work.
        chosen = ["-m", "slow", "-n", "4", "--dist", "load", "--maxschedchunk", "2", "-o", "faulthandler_timeout=300"]
    elif options.scale:
        # They measure, so nothing else runs; they say what they found, and each takes minutes.
        chosen = ["-m", "scale", "-s", "--durations=0", "--durations-min=1", "-o", "faulthandler_timeout=1200"]
    show = len(engines) == 1

    def arguments(engine: str) -> list[str]:
        once = ["--database-only"] if "sqlite" in engines and engine != "sqlite" else []
        return [*chosen, *once, *options.pytest]

    LOGS.mkdir(exist_ok=True)
    if not show:
        logs = f"{LOGS.relative_to(ROOT)}/*.log"
        when = "one after the other" if options.scale else "at the same time, for some minutes"
        print(f"{', '.join(engines)} run {when}; follow them in {logs}", flush=True)
    results: dict[str, Result] = {}
    # They wait more than they compute, also on two cores.
    with ThreadPoolExecutor(max_workers=1 if options.scale else len(ENGINES)) as pool:
        runs = [
            pool.submit(run_engine, engine, arguments(engine), show=show, full_size=options.scale) for engine in engines
        ]
        for run in as_completed(runs):
            result = run.result()
            results[result.engine] = result
            if not show:
                print(f"=== {result.engine}: {result.state}, after {result.seconds:.0f} s ===", flush=True)
            if result.log is not None:
                text = result.log.read_text(errors="replace")
                lines = text.splitlines()
                print(text if not result.is_green else "\n".join(lines[-8:]), flush=True)
    return tell([results[engine] for engine in engines], slow=options.slow or options.scale)


if __name__ == "__main__":
    sys.exit(main())
