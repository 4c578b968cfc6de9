"""The redis dispatcher on servers that are set up otherwise: sockets, few rights, TLS, sentinels, a cluster of one."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from django_jobs.dispatchers import Unavailable
from django_jobs.dispatchers.redis import RedisDispatcher
from django_jobs.fields import uuid7
from tests.dispatchers.test_redis_faults import Project
from tests.redis_servers import RedisServer, running_redis, use_cache
from tests.support import free_port, wait_for

if TYPE_CHECKING:
    from pytest_django import Settings

pytestmark = pytest.mark.subprocess

# What the docs say a user needs to be allowed.
COMMANDS = (
    "ping",
    "zadd",
    "zremrangebyrank",
    "expire",
    "zrange",
    "bzmpop",
    "publish",
    "subscribe",
    "type",
    "del",
)


@contextlib.contextmanager
def listening() -> Iterator[Project]:
    project = Project()
    project.listen()
    try:
        wait_for(project.hears, 20, "hints arrive")
        yield project
    finally:
        project.dispatcher.close()


def test_a_user_with_the_rights_that_the_docs_name_has_all_it_needs_through_a_socket(
    own_valkey: RedisServer, settings: Settings, tmp_path: Path
) -> None:
    path = tmp_path / "socket"
    own_valkey.restart("--unixsocket", str(path))
    with own_valkey.client() as client:
        rights = ["~*{django_jobs}:*", "&*{django_jobs}:*", *(f"+{command}" for command in COMMANDS)]
        client.execute_command("ACL", "SETUSER", "anna", "on", ">s3cret", *rights)
    use_cache(settings, f"unix://anna:s3cret@{path}?db=0")
    with listening():
        pass
    with own_valkey.client() as client:
        refused: Any = client.execute_command("ACL", "LOG")
    # The client introduces itself, which it may not, and goes on.
    assert {entry["object"] for entry in refused} <= {"client|setinfo", "client|setname"}


def test_a_user_who_may_not_put_right_what_somebody_else_wrote_is_told(
    own_valkey: RedisServer, settings: Settings
) -> None:
    with own_valkey.client() as client:
        rights = ["~*", "&*", *(f"+{command}" for command in COMMANDS if command not in {"type", "del"})]
        client.execute_command("ACL", "SETUSER", "anna", "on", ">s3cret", *rights)
        client.set(":1:{django_jobs}:queue:mail", "not ours")
    use_cache(settings, own_valkey.url.replace("redis://", "redis://anna:s3cret@"))
    project = Project()
    with pytest.raises(Unavailable, match="let this user run TYPE and DEL"):
        project.dispatcher.hint("mail", [uuid7()])
    project.dispatcher.close()


@pytest.mark.parametrize(("forbidden", "place"), [("zrange", 0), ("subscribe", 1)])
def test_a_user_who_may_not_listen_is_told_and_the_worker_tries_ever_less_often(
    own_valkey: RedisServer, settings: Settings, forbidden: str, place: int
) -> None:
    with own_valkey.client() as client:
        rights = ["~*", "&*", *(f"+{command}" for command in COMMANDS if command != forbidden)]
        client.execute_command("ACL", "SETUSER", "anna", "on", ">s3cret", *rights)
    use_cache(settings, own_valkey.url.replace("redis://", "redis://anna:s3cret@"))
    project = Project()
    project.worker = project.dispatcher.subscribe(None, project.wakes.set, project.looks.set)
    wait_for(lambda: f"'{forbidden}' command" in (project.worker.problem() or ""), 20, "it is told")
    failures = project.worker._sessions[place]._loop
    wait_for(lambda: failures._failures > 2, 10, "it tries again")
    project.dispatcher.close()


@pytest.mark.slow
def test_a_cluster_of_one_server_finds_all_names_in_one_slot(own_valkey: RedisServer) -> None:
    own_valkey.restart("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
    with own_valkey.client() as client:
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        wait_for(lambda: client.execute_command("CLUSTER INFO")["cluster_state"] == "ok", 10, "it is ready")
    project = Project()
    # Several keys in one command.
    project.worker = project.dispatcher.subscribe(
        ["mail", "sms", "default"], project.wakes.set, project.looks.set, lambda: 10
    )
    wait_for(project.hears, 20, "hints arrive")
    project.dispatcher.close()


@pytest.mark.slow
def test_sentinels_lead_to_the_new_primary_after_a_failover(own_valkey: RedisServer, settings: Settings) -> None:
    with running_redis("valkey") as replica, running_redis("valkey") as sentinel:
        replica.restart("--replicaof", "127.0.0.1", str(own_valkey.port))
        sentinel.become_sentinel("shop", own_valkey.port)
        use_cache(
            settings,
            "redis://shop/0",
            OPTIONS={
                "CLIENT_CLASS": "django_redis.client.SentinelClient",
                "CONNECTION_FACTORY": "django_redis.pool.SentinelConnectionFactory",
                "SENTINELS": [("127.0.0.1", sentinel.port)],
            },
        )
        with listening() as project, sentinel.client() as client:
            wait_for(lambda: client.execute_command("SENTINEL REPLICAS", "shop"), 20, "the replica is known")
            own_valkey.kill()
            wait_for(project.worker.problem, 10, "the loss is seen")
            assert project.push() < 1
            wait_for(lambda: primary(client) == replica.port, 30, "the replica is the primary")
            wait_for(project.hears, 20, "hints arrive again")


def primary(client: Any) -> int:
    return int(client.execute_command("SENTINEL GET-MASTER-ADDR-BY-NAME", "shop")[1])


@pytest.mark.skipif(
    not (shutil.which("redis-server") and shutil.which("openssl")),
    reason="needs redis-server, which speaks TLS, and openssl for a certificate",
)
def test_tls_with_a_certificate_that_only_the_cache_knows(settings: Settings, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "1"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    with running_redis("redis") as server:
        secure = free_port()
        server.restart(
            *("--tls-port", str(secure), "--tls-cert-file", str(certificate), "--tls-key-file", str(key)),
            *("--tls-auth-clients", "no"),
        )
        use_cache(settings, f"rediss://127.0.0.1:{secure}/0?ssl_ca_certs={certificate}")
        with listening():
            pass
        use_cache(settings, f"rediss://127.0.0.1:{secure}/0")
        stranger = RedisDispatcher({"CACHE": "redis"})
        with pytest.raises(Unavailable, match="certificate"):
            stranger.cancel_hint([uuid7()])
        stranger.close()
