"""Dedup keys: one live row per job and key, whoever races for it, and the right one handed back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
from django.db import IntegrityError, OperationalError, connection, connections, transaction

from django_jobs import KeyTaken, clock, job, transitions
from django_jobs.models import JobExecution
from django_jobs.services import keys
from django_jobs.states import Status
from tests.acc import jobs
from tests.acc.models import Thing
from tests.dispatchers.recording import RecordingDispatcher
from tests.factories import JobExecutionFactory, WorkerFactory
from tests.threads import InThread, race


def push_key(key: str = "k", **options: Any) -> JobExecution:
    return jobs.mark.using(key=key, **options).push()


def end(row: JobExecution) -> None:
    """End a row as a cancel does, freeing its key."""
    transitions.cancel(JobExecution.objects.filter(pk=row.pk), now=clock.now("default"), by="", by_name="")


@pytest.mark.django_db
@pytest.mark.parametrize("state", ["pending", "scheduled", "parked", "running"])
def test_a_second_push_returns_the_live_row_whatever_it_does(state: str) -> None:
    """The key counts while the row is pending, scheduled, parked or running.

    Fault: it was only checked among waiting rows, so a running job ran again beside itself
    (procrastinate-org/procrastinate#1050, TkTech/chancy#51).
    """
    live = JobExecutionFactory(**{state: True}, key="k")
    found = [push_key(), push_key()]
    assert found == [live, live]
    assert [row.created for row in found] == [False, False]
    assert found[0].status == live.status
    assert found[0].payload == live.payload
    assert JobExecution.objects.count() == 1


@pytest.mark.django_db
def test_a_row_that_waits_for_its_retry_holds_its_key() -> None:
    worker = WorkerFactory()
    live = JobExecutionFactory(running=True, key="k", max_attempts=3, worker=worker)
    now = clock.now("default")
    transitions.finish([transitions.reschedule(live, at=now)], now=now, using="default")
    assert push_key() == live


@pytest.mark.django_db
@pytest.mark.parametrize("ending", ["ok", "failed", "cancelled", "deleted"])
def test_the_end_of_a_row_frees_its_key(ending: str) -> None:
    """A new push after any end makes a new row.

    Fault: a failed or killed job kept its key and later pushes were ignored (veeqo/activejob-uniqueness#17,
    cameronmaske/celery-once#110, zoolutions/sidekiq-unique-jobs#322).
    """
    if ending == "deleted":
        push_key()
        JobExecution.objects.all().delete()
    else:
        JobExecutionFactory(**{ending: True}, key="k")
    assert push_key().created is True


@pytest.mark.django_db
def test_a_crash_on_the_last_attempt_frees_the_key() -> None:
    JobExecutionFactory(running=True, key="k", worker=WorkerFactory(dead=True))
    transitions.bury(JobExecution.objects.all(), now=clock.now("default"), error="worker lost", entry={})
    assert push_key().created is True


@pytest.mark.django_db
def test_the_scope_of_a_key_is_its_job_and_tenant() -> None:
    """The same key of two tenants, of none and of another job are four rows; without a tenant it counts, too.

    Fault: keys were unique globally, and NULL tenants are distinct in an index (celery/django-celery-beat#423).
    """
    rows = [
        push_key(organization_id="a"),
        push_key(organization_id="b"),
        push_key(),
        jobs.slow.using(key="k").push(),
        # Neither the end of the one nor the start of the other makes the same text.
        push_key("bk", organization_id="a"),
        push_key("k", organization_id="ab"),
    ]
    assert [row.created for row in rows] == [True] * 6
    assert push_key().created is False
    assert push_key(organization_id="a") == rows[0]


@pytest.mark.django_db
@pytest.mark.usefixtures("own_jobs")
def test_a_row_under_an_old_name_of_its_job_holds_its_key() -> None:
    """At most one live row per job and key, also when the job was renamed while one of them lives."""

    @job(name="own.renamed", aliases=["own.before"])
    def renamed() -> None: ...

    over = renamed.using(key="k").push()
    end(over)
    live = JobExecutionFactory(job_name="own.before", key="k")
    found = renamed.using(key="k").push()
    assert (found, found.created) == (live, False)
    assert renamed.push_many([renamed.item(key="k")]) == [live]
    for again in (over.retry, over.copy):
        with pytest.raises(KeyTaken, match=str(live.pk)):
            again()
    end(live)
    made = renamed.using(key="k").push()
    assert (made.created, made.job_name) == (True, "own.renamed")
    live.refresh_from_db()
    with pytest.raises(KeyTaken, match=str(made.pk)):
        live.retry()


@pytest.mark.django_db
def test_keys_are_compared_exactly_and_long_ones_are_not_cut() -> None:
    """Case, accents, trailing spaces and the last of 255 characters count on every database.

    Fault: over-long or collated keys met by truncation (Koed00/django-q#489).
    """
    spellings = ["k", "K", "k ", "ḱ", "ｋ", "k" * 254 + "a", "k" * 254 + "b", "😀" * 255]
    assert [push_key(key).created for key in spellings] == [True] * len(spellings)
    assert set(JobExecution.objects.values_list("key", flat=True)) == set(spellings)
    assert push_key("😀" * 255).created is False


@pytest.mark.django_db(transaction=True)
def test_a_found_row_is_neither_hinted_nor_told(recorder: RecordingDispatcher) -> None:
    from django_jobs.signals import job_pushed

    told: list[JobExecution] = []

    def receive(execution: JobExecution, **kwargs: object) -> None:
        told.append(execution)

    job_pushed.connect(receive)
    try:
        row = push_key()
        push_key()
        with transaction.atomic():
            push_key()
    finally:
        job_pushed.disconnect(receive)
    assert told == [row]
    assert recorder.hints == [("default", [row.pk], 0)]


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("in_block", [False, True], ids=["autocommit", "atomic block"])
def test_pushes_that_race_for_a_key_make_one_row_and_all_get_its_id(
    in_block: bool, recorder: RecordingDispatcher
) -> None:
    def push() -> tuple[Any, bool | None]:
        if not in_block:
            row = push_key()
        else:
            with transaction.atomic():
                row = push_key()
                Thing.objects.create(name="the block is usable")
        return row.pk, row.created

    for _round in range(5):
        results = race(*[push] * 4)
        live = JobExecution.objects.get(status=Status.PENDING)
        assert {pk for pk, _created in results} == {live.pk}
        assert sorted(bool(created) for _pk, created in results) == [False, False, False, True]
        end(live)
    assert len(recorder.hints) == 5


def skip_the_first_look() -> Any:
    """Make the next push go straight to its INSERT, as if the winner came just after the look."""
    real, looks = keys.find_holder, []

    def find(*args: Any, **kwargs: Any) -> JobExecution | None:
        looks.append(args)
        return None if len(looks) == 1 else real(*args, **kwargs)

    return mock.patch.object(keys, "find_holder", find)


@pytest.mark.django_db
def test_a_refused_insert_leaves_the_callers_block_usable() -> None:
    live = push_key()
    with transaction.atomic():
        Thing.objects.create(name="before")
        with skip_the_first_look():
            row = push_key()
        Thing.objects.create(name="after")
    assert (row, row.created) == (live, False)
    assert Thing.objects.count() == 2


@pytest.mark.django_db(transaction=True)
def test_a_refused_insert_outside_of_a_block_finds_the_winner() -> None:
    live = push_key()
    with skip_the_first_look():
        row = push_key()
    assert (row, row.created) == (live, False)


@pytest.mark.postgres
@pytest.mark.mysql
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("commits", [True, False], ids=["commits", "rolls back"])
def test_a_push_waits_for_a_winner_that_is_not_committed(commits: bool) -> None:
    def second() -> JobExecution:
        with transaction.atomic():
            return push_key()

    try:
        with transaction.atomic():
            winner = push_key()
            waiting = InThread(second)
            time.sleep(0.3)
            assert not waiting.future.done()
            if not commits:
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    row = waiting.result()
    assert (row == winner, row.created) == ((True, False) if commits else (False, True))
    assert JobExecution.objects.get() == row


@pytest.mark.django_db
def test_a_winner_that_ended_meanwhile_makes_room() -> None:
    live = push_key()
    real, looks = keys.find_holder, []

    def find(*args: Any, **kwargs: Any) -> JobExecution | None:
        looks.append(kwargs)
        if len(looks) == 1:
            return None
        end(live)
        return real(*args, **kwargs)

    with mock.patch.object(keys, "find_holder", find):
        row = push_key()
    assert row != live
    assert row.created is True
    # The second look knows of the refusal.
    assert [look["conflict"] for look in looks] == [False, True]


@pytest.mark.django_db
def test_after_five_refusals_the_push_gives_up() -> None:
    push_key()
    with mock.patch.object(keys, "find_holder", return_value=None) as find, pytest.raises(KeyTaken, match="Push again"):
        push_key()
    assert find.call_count == keys.ROUNDS + 1
    assert JobExecution.objects.count() == 1


@pytest.mark.django_db(transaction=True)
def test_a_look_for_the_holder_that_collides_is_repeated() -> None:
    """At SERIALIZABLE also a read may be refused; outside of a transaction it is ours to repeat."""
    read, looks = keys._read, []

    def collide(*args: Any, **kwargs: Any) -> JobExecution | None:
        looks.append(args)
        if len(looks) == 1:
            error = OperationalError("could not serialize access due to read/write dependencies among transactions")
            error.sqlstate = "40001"  # type: ignore[attr-defined]
            raise error
        return read(*args, **kwargs)

    with mock.patch.object(keys, "_read", collide):
        assert push_key().created
    assert len(looks) == 2


@pytest.mark.django_db
def test_another_integrity_error_is_not_taken_for_a_key() -> None:
    with pytest.raises(IntegrityError), transaction.atomic():
        # The constraint's name in the payload must not deceive: PostgreSQL quotes the row in its message.
        JobExecutionFactory(rank=101, payload={"tag": "django_jobs_active_key"})
    taken = push_key().pk
    with pytest.raises(IntegrityError) as refused, transaction.atomic():
        JobExecutionFactory(id=taken, payload={"tag": "django_jobs_active_key"})
    assert not keys.is_key_conflict(refused.value)


@pytest.mark.django_db
def test_a_new_key_costs_one_look_and_a_known_one_no_insert() -> None:
    from django.test.utils import CaptureQueriesContext

    clock.now("default")
    with CaptureQueriesContext(connection) as new:
        push_key()
    # In the test's own block: the look, a savepoint around the INSERT, and its release.
    assert [query["sql"].split()[0] for query in new] == ["SELECT", "SAVEPOINT", "INSERT", "RELEASE"]
    with CaptureQueriesContext(connection) as known:
        push_key()
    assert {query["sql"].split()[0] for query in known} <= {"SELECT", "SHOW"}


@pytest.mark.postgres
@pytest.mark.mysql
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_a_winner_the_callers_snapshot_hides_is_returned(level: str) -> None:
    """Two pushes with one key under snapshot isolation give one row and no error to the caller.

    Fault: get_or_create races end in an error, as a transaction cannot see the winner (openedx/enterprise-catalog#245,
    mozilla/treeherder#2173).
    """
    with serving(level), transaction.atomic():
        # The first read makes the snapshot.
        assert not Thing.objects.exists()
        winner = InThread(push_key).result()
        row = push_key()
        assert (row.pk, row.created) == (winner.pk, False)
        Thing.objects.create(name="after")
    assert Thing.objects.exists()
    assert JobExecution.objects.get() == winner


@pytest.mark.postgres
@pytest.mark.mysql
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ"])
def test_a_row_that_only_the_callers_snapshot_still_shows_as_live_is_not_returned(level: str) -> None:
    old = push_key()
    with serving(level), transaction.atomic():
        assert JobExecution.objects.get().status == Status.PENDING
        InThread(lambda: end(old)).result()
        row = push_key()
        assert row.created is True
        assert row != old
    assert set(JobExecution.objects.values_list("pk", "status")) == {
        (old.pk, Status.CANCELLED),
        (row.pk, Status.PENDING),
    }


@pytest.mark.postgres
@pytest.mark.mysql
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_a_row_of_the_callers_own_transaction_is_found(level: str) -> None:
    with serving(level), transaction.atomic():
        first, second = push_key(), push_key()
        assert (second, second.created) == (first, False)
        Thing.objects.create(name="after")
    assert JobExecution.objects.get() == first


@contextmanager
def serving(level: str) -> Iterator[None]:
    """Make this the isolation level of this thread's connection; only on MySQL is Django told, as by its settings."""
    configured = connection.isolation_level
    with connection.cursor() as cursor:
        if connection.vendor == "mysql":
            cursor.execute(f"SET SESSION TRANSACTION ISOLATION LEVEL {level}")
            connection.isolation_level = level.lower()
        else:
            cursor.execute(f"SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL {level}")
    try:
        yield
    finally:
        connection.isolation_level = configured
        connection.close()


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_the_second_connection_takes_none_from_a_pool_and_is_closed() -> None:
    made: list[Any] = []
    copy = connection.copy

    def watched() -> Any:
        other = copy()
        other.settings_dict["OPTIONS"]["pool"] = True
        made.append(other)
        return other

    with serving("REPEATABLE READ"), mock.patch.object(connection, "copy", watched), transaction.atomic():
        assert not Thing.objects.exists()
        winner = InThread(push_key).result()
        assert push_key() == winner
    assert made
    assert all(other.connection is None and not other.pool for other in made)
    assert connections["default"] not in made


@pytest.mark.django_db(transaction=True)
def test_pushes_of_many_keys_in_different_orders_do_not_deadlock() -> None:
    names = [f"key-{n}" for n in range(8)]

    def push_all(order: list[str]) -> Callable[[], list[Any]]:
        return lambda: [row.pk for row in jobs.mark.push_many([jobs.mark.item(tag=name, key=name) for name in order])]

    for _round in range(3):
        forward, backward = race(push_all(names), push_all(names[::-1]))
        assert forward == backward[::-1]
        JobExecution.objects.all().delete()
