"""While workers and producers are killed and frozen and servers are restarted, every promise holds."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from django.conf import settings

from tests.engines import ENGINES, die_with_parent
from tests.support import ROOT

pytestmark = [pytest.mark.slow(90), pytest.mark.subprocess, *(getattr(pytest.mark, engine) for engine in ENGINES)]

# A run is followed by what it takes to end everything and to drain. With it a run must not outlast the time limit of a
# test: `make chaos` is for longer ones.
AFTERWARDS = 105.0


# By engine: dispatcher, children of each worker (0: is one itself). What becomes of Redis and of children has little to
# do with the engine, so these runs have them on one; `make chaos` has them on all.
RUNS: dict[str, tuple[tuple[str, int], ...]] = {
    "postgres": (("database", 0), ("redis", 2)),
    "mysql": (("database", 0),),
    "sqlite": (("database", 0),),
}


@pytest.mark.parametrize(("dispatcher", "processes"), RUNS[settings.ENGINE])
def test_every_promise_holds_while_processes_and_servers_are_killed(
    tmp_path: Path, dispatcher: str, processes: int
) -> None:
    """SEED repeats the plan of another run; without one CI has a plan of its own and everybody else a new one."""
    seed = os.environ.get("SEED") or ("1" if os.environ.get("CI") else str(random.randrange(10_000)))
    seconds = float(os.environ.get("SECONDS") or 60)
    # In a process of its own: it has a database of its own and, for PostgreSQL, a server.
    run = subprocess.run(
        [
            *(sys.executable, "-m", "tests.chaos", f"--engine={settings.ENGINE}"),
            *(f"--dispatcher={dispatcher}", f"--processes={processes}"),
            *(f"--seed={seed}", f"--seconds={seconds}", f"--home={tmp_path}"),
        ],
        cwd=ROOT,
        # The user that a server runs as cannot enter the folder of these tests.
        env={name: value for name, value in os.environ.items() if name != "TMPDIR"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds + AFTERWARDS,
        check=False,
        preexec_fn=die_with_parent,
    )
    print(run.stdout)
    assert run.returncode == 0, run.stdout
