"""Act as a web process in direct mode: `python -m benchmarks.web` runs a job, then idles.

Started by idle.py. There is no actual server, whose own cost is not to be measured.
"""

import signal
import sys

import django

django.setup()

from benchmarks.jobs import noop  # noqa: E402


def main() -> None:
    """Push a job, which starts the runner, and wait for SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *args: sys.exit())
    noop.push(number=0)
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
