"""The other end of the floor of latency.py: `python -m benchmarks.echo redis|database URL PORT` reports each message.

It waits in the simplest way: BZMPOP or LISTEN on one connection, and nothing else.
"""

import sys

from benchmarks.jobs import tell

NAME = "benchmark_floor"


def main(mode: str, url: str, port: int) -> None:
    """Report when it is ready and whenever a message comes; runs until it is killed."""
    if mode == "redis":
        import redis

        client = redis.Redis.from_url(url, socket_timeout=None)
        client.delete(NAME)
        tell(port)
        while True:
            if client.execute_command("BZMPOP", 0, 1, NAME, "MIN", "COUNT", 10):  # type: ignore[no-untyped-call]
                tell(port)
    import psycopg

    connection = psycopg.connect(url, autocommit=True)
    connection.execute(f"LISTEN {NAME}")
    tell(port)
    for _ in connection.notifies():
        tell(port)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
