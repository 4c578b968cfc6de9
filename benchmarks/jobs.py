"""The job that the benchmarks drain."""

from django_jobs import job


@job(name="benchmark.noop")
def noop(number: int) -> None:
    """Do nothing, so that only the system is measured."""
