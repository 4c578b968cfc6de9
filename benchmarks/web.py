"""Be a web process in direct mode as far as django_jobs sees it: `python -m benchmarks.web` runs a job, then idles.

Started by idle.py. It is no server: what that costs while no request comes is not what is measured.
"""

import signal
import sys

import django

django.setup()

from benchmarks.jobs import noop  # noqa: E402


def main() -> None:
    """Push a job, which starts what runs it, and wait for SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *args: sys.exit())
    noop.push(number=0)
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
