"""Leave Django's connection pool to handlers: our own threads must not wait for a connection."""

from __future__ import annotations

from django.db import connections


def bypass_pool() -> None:
    """Give this thread connections of its own to databases that have a pool.

    A pool that handlers have exhausted would delay heartbeats, and a worker without heartbeats is taken for dead.
    """
    for alias in pooled():
        own = connections[alias].copy()
        del own.settings_dict["OPTIONS"]["pool"]
        connections[alias] = own


def pooled() -> list[str]:
    """Return the databases that have a pool."""
    return [alias for alias in connections if connections.settings[alias].get("OPTIONS", {}).get("pool")]


def pool_size(alias: str) -> int | None:
    """Return the most connections that a database's pool opens in one process; None for no pool or no limit."""
    options = connections.settings[alias].get("OPTIONS", {}).get("pool")
    if not options:
        return None
    # The defaults of psycopg_pool.
    given = options if isinstance(options, dict) else {}
    size = given.get("max_size") or given.get("min_size", 4)
    return size if isinstance(size, int) else None
