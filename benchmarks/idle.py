"""Measure what an idle process costs: statements per second, and processor time.

    python -m benchmarks.idle redis                          # an embedded PostgreSQL and Valkey
    python -m benchmarks.idle database --engine mysql --seconds 60
    python -m benchmarks.idle direct --engine sqlite

With redis and database that is a runjobs process with all roles, with direct a web process that has run a job.
Statements are those that Django sends, without BEGIN, COMMIT and those of a listening connection.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.world import ENGINES, MODES, python, runjobs, world

# Seconds for the process to settle: first looks, sweep and trim.
SETTLE = 5.0


def cpu_seconds(pid: int) -> float:
    """Return the processor time of the process, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def idle(mode: str, **environment: str) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    """Run the process that is measured."""
    return python("benchmarks.web", **environment) if mode == "direct" else runjobs(**environment)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=(*MODES, "direct"))
    parser.add_argument("--engine", choices=ENGINES, default="postgres")
    parser.add_argument("--seconds", type=float, default=60)
    options = parser.parse_args()
    with (
        tempfile.NamedTemporaryFile() as counter,
        world(options.engine, options.mode) as servers,
        idle(options.mode, STATEMENTS=counter.name) as process,
    ):
        time.sleep(SETTLE)
        began, spent, sent = time.monotonic(), cpu_seconds(process.pid), Path(counter.name).stat().st_size
        time.sleep(options.seconds)
        elapsed = time.monotonic() - began
        cpu = (cpu_seconds(process.pid) - spent) / elapsed
        statements = (Path(counter.name).stat().st_size - sent) / elapsed
    sys.stdout.write(
        f"{servers}; idle for {elapsed:.0f} s, dispatcher {options.mode}: "
        f"{statements:.2f} statements/s, {cpu:.2%} of one core\n"
    )


if __name__ == "__main__":
    main()
