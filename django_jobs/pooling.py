"""Leave Django's pool of connections to handlers: called by threads of ours, which must not wait for one."""

from __future__ import annotations

from django.db import connections


def bypass_pool() -> None:
    """Give this thread connections of its own to databases that have a pool.

    A pool that handlers have used up would hold up heartbeats, and a worker whose heart does not beat is taken for
    dead.
    """
    for alias in pooled():
        own = connections[alias].copy()
        del own.settings_dict["OPTIONS"]["pool"]
        connections[alias] = own


def pooled() -> list[str]:
    """Return the databases that have a pool."""
    return [alias for alias in connections if connections.settings[alias].get("OPTIONS", {}).get("pool")]


def pool_size(alias: str) -> int | None:
    """Return how many connections the pool of a database gives out in one process; None is no pool, or no limit."""
    options = connections.settings[alias].get("OPTIONS", {}).get("pool")
    if not options:
        return None
    # What psycopg_pool does where nothing is said.
    given = options if isinstance(options, dict) else {}
    size = given.get("max_size") or given.get("min_size", 4)
    return size if isinstance(size, int) else None
