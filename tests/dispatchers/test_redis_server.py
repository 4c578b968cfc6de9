"""Which server the redis dispatcher uses, and what is said about it; no server is needed for that."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

import pytest
from django.core.checks import run_checks
from django.core.exceptions import ImproperlyConfigured
from redis.connection import SSLConnection
from redis.exceptions import ConnectionError as ServerGone
from redis.exceptions import RedisError, ResponseError
from redis.sentinel import MasterNotFoundError

from django_jobs.conf import get_settings
from django_jobs.dispatchers import Unavailable, get_dispatcher
from django_jobs.dispatchers.redis import RedisDispatcher
from django_jobs.dispatchers.redis.server import Server
from tests.redis_servers import use_cache

if TYPE_CHECKING:
    from pytest_django import Settings


def error_of(options: dict[str, Any]) -> str:
    with pytest.raises(ImproperlyConfigured) as caught:
        RedisDispatcher(options)
    return str(caught.value)


def test_an_unknown_option_is_refused_by_name() -> None:
    assert "no option 'URL'; expected CACHE" in error_of({"CACHE": "redis", "URL": "redis://"})


def test_an_unknown_cache_is_refused_by_name() -> None:
    assert "the cache 'nowhere', which cannot be used" in error_of({"CACHE": "nowhere"})


def test_a_cache_of_another_kind_is_refused_by_its_backend() -> None:
    assert "LocMemCache; expected django_redis.cache.RedisCache" in error_of({})


def test_a_cache_over_several_servers_is_refused(settings: Settings) -> None:
    use_cache(settings, "redis://a,redis://b", OPTIONS={"CLIENT_CLASS": "django_redis.client.ShardClient"})
    assert "spreads keys over several servers" in error_of({"CACHE": "redis"})


@pytest.mark.parametrize("location", ["127.0.0.1:6379", "redis://:sesa/me@127.0.0.1:6379", ["http://sesa/me"]])
def test_a_location_that_is_no_address_is_refused_without_being_shown(settings: Settings, location: Any) -> None:
    use_cache(settings, location)
    settings.DJANGO_JOBS = {"DISPATCHER": {"BACKEND": "redis", "OPTIONS": {"CACHE": "redis"}}}
    [message] = [message for message in run_checks() if message.id == "django_jobs.E003"]
    assert "the LOCATION of the cache 'redis'" in message.msg
    assert "redis://host:6379/0" in message.msg
    assert not any(part in message.msg for part in ("127.0.0.1", "sesa", "me@", "importing"))


def test_without_django_redis_the_mend_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import django_jobs.dispatchers.redis as package

    monkeypatch.setitem(sys.modules, "django_redis", None)
    with pytest.raises(ImproperlyConfigured, match=r'pip install "django-outbox-jobs\[redis\]"'):
        importlib.reload(package)


def test_what_it_refuses_is_an_error_of_the_system_checks_too(settings: Settings) -> None:
    settings.DJANGO_JOBS = {"DISPATCHER": {"BACKEND": "redis", "OPTIONS": {"CACHE": "nowhere"}}}
    [message] = [message for message in run_checks() if message.id == "django_jobs.E003"]
    assert "'nowhere'" in message.msg


def test_its_short_name_makes_it_and_jobs_are_in_queue_mode(settings: Settings) -> None:
    use_cache(settings, "redis://127.0.0.1:1/0")
    settings.DJANGO_JOBS = {"DISPATCHER": {"BACKEND": "redis", "OPTIONS": {"CACHE": "redis"}}}
    assert isinstance(get_dispatcher(), RedisDispatcher)
    assert get_settings().dispatcher.options == {"CACHE": "redis"}
    from tests.acc.jobs import mark

    assert mark.mode == "queue"


def test_timeouts_and_limits_are_ours_wherever_the_cache_has_its_own(settings: Settings) -> None:
    use_cache(
        settings,
        "redis://127.0.0.1:1/0?socket_timeout=60&max_connections=1&health_check_interval=9&decode_responses=True",
        OPTIONS={
            "SOCKET_CONNECT_TIMEOUT": 60,
            "CONNECTION_POOL_CLASS": "redis.BlockingConnectionPool",
            "CONNECTION_POOL_KWARGS": {"socket_connect_timeout": 60, "timeout": 60, "max_connections": 1},
        },
    )
    pool = Server("redis").client(connect=0.1, answer=0.2).connection_pool
    connection = pool.make_connection()
    assert (connection.socket_connect_timeout, connection.socket_timeout) == (0.1, 0.2)
    assert type(pool).__name__ == "ConnectionPool"
    assert pool.max_connections > 1000
    assert connection.retry._retries == 0
    assert not connection.encoder.decode_responses


def test_tls_login_and_client_certificate_are_the_ones_of_the_cache(settings: Settings) -> None:
    use_cache(
        settings,
        "rediss://anna:s3cret@example.org:6380/3?ssl_ca_certs=/etc/ca.pem",
        OPTIONS={"CONNECTION_POOL_KWARGS": {"ssl_certfile": "/etc/anna.pem"}},
    )
    server = Server("redis")
    connection = server.client(connect=1, answer=1).connection_pool.make_connection()
    assert isinstance(connection, SSLConnection)
    assert (connection.username, connection.password, connection.db) == ("anna", "s3cret", 3)
    assert (connection.ca_certs, connection.certfile) == ("/etc/ca.pem", "/etc/anna.pem")
    assert str(server) == "example.org:6380 database 3 (cache 'redis')"


def test_sentinels_are_asked_with_short_timeouts_and_without_patience(settings: Settings) -> None:
    use_cache(
        settings,
        "redis://primary/2",
        OPTIONS={
            "CLIENT_CLASS": "django_redis.client.SentinelClient",
            "CONNECTION_FACTORY": "django_redis.pool.SentinelConnectionFactory",
            "SENTINELS": [("127.0.0.1", 1)],
            "SENTINEL_KWARGS": {"password": "s3cret"},
            "PASSWORD": "s3cret-too",
        },
    )
    server = Server("redis")
    client = server.client(connect=0.1, answer=0.2)
    [sentinel] = client.connection_pool.sentinel_manager.sentinels
    connection = sentinel.connection_pool.make_connection()
    assert (connection.socket_connect_timeout, connection.password) == (0.1, "s3cret")
    assert connection.retry._retries == 0
    assert str(server) == "primary, found by sentinels, database 2 (cache 'redis')"
    with pytest.raises(Unavailable) as caught, server.faults():
        client.ping()
    assert str(caught.value) == "the server of the cache 'redis': No master found for 'primary'"


@pytest.mark.parametrize(
    "error",
    [
        ResponseError("unknown subcommand, with args: 'AUTH' 'p@ss word' 'p%40ss%20word'"),
        MasterNotFoundError("No master found for 'p@ss word' : <Redis(password=p@ss word)>"),
        OSError("redis://:p%40ss%20word@127.0.0.1:1/0 is not there"),
    ],
)
def test_no_text_of_an_error_holds_the_password_nor_leads_to_what_does(settings: Settings, error: Exception) -> None:
    use_cache(settings, "redis://:p%40ss%20word@127.0.0.1:1/0")
    server = Server("redis")
    with pytest.raises(Unavailable) as caught, server.faults():
        raise error
    assert "***" in str(caught.value)
    for secret in ("p@ss word", "p%40ss%20word"):
        assert secret not in f"{caught.value!r} {server}"
    # A report of the error shows the variables along its chain.
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_no_text_of_an_error_holds_an_address(settings: Settings) -> None:
    use_cache(settings, "redis://example.org:7000/0")
    server = Server("redis")
    for text in ("Error 111 connecting to {}. Refused.", "Error while reading from {} : (104, 'Reset')", "{} is odd"):
        with pytest.raises(Unavailable) as caught, server.faults():
            raise ServerGone(text.format("example.org:7000"))
        assert "7000" not in str(caught.value)
    with pytest.raises(Unavailable, match=r"connecting to it\. Refused"), server.faults():
        # One that a sentinel named.
        raise ServerGone("Error 111 connecting to 10.0.0.7:6379. Refused.")


def test_an_error_is_one_line_that_says_where(settings: Settings) -> None:
    use_cache(settings, "unix:///run/redis.sock?db=4")
    with pytest.raises(Unavailable) as caught, Server("redis").faults():
        raise RedisError("first\nsecond")
    assert str(caught.value) == "the server of the cache 'redis': first second"
    assert str(Server("redis")) == "/run/redis.sock database 4 (cache 'redis')"
