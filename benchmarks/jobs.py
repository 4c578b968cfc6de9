"""The jobs that the benchmarks run."""

import socket
import time

from django_jobs import JobContext, job

_sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)


def tell(port: int) -> None:
    """Send the current time, by the clock that all processes of a machine share."""
    _sender.sendto(repr(time.monotonic()).encode(), ("127.0.0.1", port))


@job(name="benchmark.noop")
def noop(number: int) -> None:
    """Do nothing, so that only our own overhead is measured."""


@job(name="benchmark.beacon")
def beacon(port: int) -> None:
    """Report when it began."""
    tell(port)


@job(name="benchmark.patient")
def patient(ctx: JobContext, port: int) -> None:
    """Report when it began, and when it was told to stop."""
    tell(port)
    ctx.signal.wait(60)
    tell(port)
