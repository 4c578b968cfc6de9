"""The server behind a cache alias of django-redis: clients of our own, names of keys, and readable errors."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlsplit

import redis
from django.core.cache import InvalidCacheBackendError, caches
from django.core.exceptions import ImproperlyConfigured
from django_redis.cache import RedisCache
from django_redis.client import ShardClient
from django_redis.pool import get_connection_factory
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError

from django_jobs.dispatchers.base import Unavailable
from django_jobs.dispatchers.redis.bounds import answer_within_bounds
from django_jobs.text import one_line

# Options that the alias sets for its own use: a cache may wait for long, and limits its connections.
OUR_OWN = ("socket_timeout", "socket_connect_timeout", "retry", "retry_on_error", "retry_on_timeout", "max_connections")
NO_LIMIT = 2**31
# Matches the server's address in messages, including one that a sentinel named.
ADDRESS = re.compile(r"\b(connecting to|reading from|writing to) \S+:\d+")


class Server:
    """One server, as the alias describes it: address, login, TLS, sentinels, database number and prefix of keys.

    Raises ImproperlyConfigured when there is no such alias, or it does not lead to exactly one server. Opens nothing.
    """

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._cache = _cache(alias)
        config = caches.settings[alias]
        location = config["LOCATION"]
        # The first takes the writes, the others are replicas.
        self._url: str = (location.split(",") if isinstance(location, str) else list(location))[0]
        self._options: dict[str, Any] = dict(config.get("OPTIONS") or {})
        try:
            self._kwargs = self._pool(connect=1, answer=1).connection_kwargs
        except ValueError:
            # The error may quote a part of the password.
            raise ImproperlyConfigured(
                f"DJANGO_JOBS: the LOCATION of the cache {alias!r}, which the redis dispatcher uses, is not the "
                "address of a Redis server; write redis://host:6379/0, rediss://… for TLS, or unix://…, with "
                "special characters of a password as %XX."
            ) from None

    def client(self, *, connect: float, answer: float) -> redis.Redis:
        """Return a client with a pool of its own; `connect` and `answer` are the seconds it waits for either.

        It tries everything once, and heeds answers_by().
        """
        pool = self._pool(connect=connect, answer=answer)
        pool.connection_kwargs["retry"] = Retry(NoBackoff(), 0)
        answer_within_bounds(pool)
        return redis.Redis(connection_pool=pool)

    def key(self, name: str) -> str:
        """Return the name of a key or channel of ours: with prefix and version, as the cache makes its keys.

        All share one hash tag: a command may name several keys only if they are in the same slot of a cluster.
        """
        return str(self._cache.make_key(f"{{django_jobs}}:{name}"))

    def __str__(self) -> str:
        found = self._kwargs
        place = f"{urlsplit(self._url).hostname}, found by sentinels," if "SENTINELS" in self._options else self._place
        return f"{place} database {found.get('db') or 0} (cache {self._alias!r})"

    @property
    def _place(self) -> str:
        found = self._kwargs
        return str(found["path"]) if "path" in found else f"{found.get('host', 'localhost')}:{found.get('port', 6379)}"

    @contextlib.contextmanager
    def faults(self) -> Iterator[None]:
        """Turn what the client raises into an Unavailable of one line, without password or address."""
        try:
            yield
        except (RedisError, OSError) as error:
            # from None: an error report would show local variables of the client, and its password among them.
            raise Unavailable(f"the server of the cache {self._alias!r}: {self._explain(error)}") from None

    def _explain(self, error: Exception) -> str:
        text = one_line(error)
        if isinstance(error, ResponseError) and "unknown command" in text.lower():
            return "it is too old and does not know BZMPOP; use Redis 7, Valkey, or newer"
        if isinstance(error, ResponseError) and "WRONGTYPE" in text:
            return "something else wrote to a key of django_jobs; let this user run TYPE and DEL, or delete the key"
        if isinstance(error, MasterNotFoundError):
            # The rest of the message lists the sentinels that were asked, and their answers.
            text = text.partition(" : ")[0]
        text = ADDRESS.sub(r"\1 it", text.replace(self._place, "it"))
        for secret in self._secrets():
            text = text.replace(secret, "***")
        return text

    def _secrets(self) -> set[str]:
        values = {value for name, value in self._kwargs.items() if "password" in name}
        values |= {self._options.get("PASSWORD"), (self._options.get("SENTINEL_KWARGS") or {}).get("password")}
        found = {str(value) for value in values if value}
        return found | {quote(value, safe="") for value in found}

    def _pool(self, *, connect: float, answer: float) -> redis.ConnectionPool:
        timeouts = {"socket_timeout": answer, "socket_connect_timeout": connect}
        given = self._options.get("CONNECTION_POOL_KWARGS") or {}
        # RESP2, since RESP3 costs one more command per connection and brings nothing here.
        kwargs = {"protocol": 2, **{name: value for name, value in given.items() if name not in OUR_OWN}, **timeouts}
        options = {**self._options, "CONNECTION_POOL_KWARGS": kwargs}
        # A pool class of the alias may wait for a free connection; the default opens one more.
        options.pop("CONNECTION_POOL_CLASS", None)
        for name in ("SOCKET_TIMEOUT", "SOCKET_CONNECT_TIMEOUT"):
            options.pop(name, None)
        if "SENTINELS" in options:
            given = options.get("SENTINEL_KWARGS") or {}
            options["SENTINEL_KWARGS"] = {**given, **timeouts, "retry": Retry(NoBackoff(), 0)}
        factory: Any = get_connection_factory(options=options)
        pool: redis.ConnectionPool = factory.get_connection_pool(factory.make_connection_params(self._url))
        # In redis-py the URL's query takes precedence over these; not here.
        for name in (*OUR_OWN, "timeout"):
            pool.connection_kwargs.pop(name, None)
        pool.connection_kwargs |= {**timeouts, "health_check_interval": 0, "decode_responses": False}
        pool.max_connections = NO_LIMIT
        return pool


def _cache(alias: str) -> RedisCache:
    try:
        cache = caches[alias]
    except InvalidCacheBackendError as error:
        raise ImproperlyConfigured(
            f"DJANGO_JOBS: the redis dispatcher is set to use the cache {alias!r}, which cannot be used ({error}); "
            "expected an entry of CACHES with the backend django_redis.cache.RedisCache."
        ) from error
    if not isinstance(cache, RedisCache):
        raise ImproperlyConfigured(
            f"DJANGO_JOBS: the redis dispatcher is set to use the cache {alias!r}, whose backend is "
            f"{type(cache).__module__}.{type(cache).__qualname__}; expected django_redis.cache.RedisCache."
        )
    if isinstance(cache.client, ShardClient):
        raise ImproperlyConfigured(
            f"DJANGO_JOBS: the redis dispatcher is set to use the cache {alias!r}, whose ShardClient spreads keys over "
            "several servers; expected a cache on one server."
        )
    return cache
