"""Cron: which ticks become rows, when, and that each does so once."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import DatabaseError, IntegrityError, InterfaceError, connections, transaction

from django_jobs import AlreadyRunning, clock, job, registry, transitions
from django_jobs.models import JobExecution, JobState
from django_jobs.runtime import scheduler as module
from django_jobs.runtime.scheduler import Scheduler
from django_jobs.signals import job_pushed
from tests.crons import define, end_all, skips, state, ticks
from tests.factories import JobExecutionFactory, JobStateFactory
from tests.runtime.support import heard, hinted
from tests.threads import race

pytestmark = pytest.mark.django_db
START = datetime(2027, 3, 1, 12, 0, 30, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


@pytest.fixture(autouse=True)
def _only_the_jobs_of_the_test() -> Iterator[None]:
    with registry.isolated(empty=True):
        yield


def test_the_first_sight_of_a_job_fires_nothing(monkeypatch: Any) -> None:
    define()
    assert Scheduler(using="default").tick(START) == module.MAX_DELAY
    assert ticks() == []
    assert state().last_tick_at == START
    assert state().schedule == "* * * * * UTC"


def test_each_tick_becomes_one_row() -> None:
    """One run per tick."""
    define(overlap="allow")
    scheduler = Scheduler(using="default")
    for second in range(0, 180, 7):
        scheduler.tick(START + timedelta(seconds=second))
    assert ticks() == [START.replace(minute=minute, second=0) for minute in (1, 2, 3)]


def test_the_delay_leads_to_the_next_tick() -> None:
    define(cron="* * * * * */20")
    scheduler = Scheduler(using="default")
    scheduler.tick(START)
    assert scheduler.tick(START + timedelta(seconds=7)) == 3.0
    assert scheduler.tick(START + timedelta(seconds=1)) == 9.0


@pytest.mark.parametrize(("looked_for", "left"), [(7, 3.0), (17, 0.0)])
def test_the_delay_counts_from_the_end_of_the_look(looked_for: int, left: float, monkeypatch: Any) -> None:
    define(cron="* * * * * */20")
    scheduler = Scheduler(using="default")
    scheduler.tick(START)
    moments = iter([START, START + timedelta(seconds=looked_for)])
    monkeypatch.setattr(clock, "now", lambda using: next(moments))
    assert scheduler.tick() == left


def test_a_tick_is_a_row_like_a_pushed_one() -> None:
    """The periodic path inserts rows by another code path, which ignores priority, attempts and queue.

    Sources: procrastinate-org/procrastinate#1216, riverqueue/river#675.
    """
    options: dict[str, Any] = {"priority": 50, "retry": 4, "queue": "reports", "timeout": 9}

    @job(name="acc.pushed", **options)
    def pushed() -> None: ...

    define(**options)
    scheduler = Scheduler(using="default")
    scheduler.tick(START)
    with heard(job_pushed) as signals:
        scheduler.tick(START + MINUTE)
    tick = JobExecution.objects.get(job_name="acc.cron")
    twin = pushed.using(by="system").push()
    own = {"id", "job_name", "active_key", "tick_at", "created_at", "updated_at", "hinted_at", "scheduled_at"}
    for field in JobExecution._meta.concrete_fields:
        if field.attname not in own:
            assert getattr(tick, field.attname) == getattr(twin, field.attname), field.attname
    assert (tick.triggered_by, tick.triggered_by_name) == ("system", "system")
    assert (tick.priority, tick.max_attempts, tick.queue) == (50, 5, "reports")
    assert tick.tick_at == START.replace(minute=1, second=0)
    assert [call["execution"].pk for call in signals] == [tick.pk]


@pytest.mark.django_db(transaction=True)
def test_a_tick_is_hinted(monkeypatch: Any) -> None:
    define(priority=7)
    scheduler = Scheduler(using="default")
    scheduler.tick(START)
    with hinted(monkeypatch) as hints:
        scheduler.tick(START + MINUTE)
    assert hints == [("default", [JobExecution.objects.get().pk], 7)]


@pytest.mark.django_db(transaction=True)
def test_many_schedulers_fire_each_tick_once() -> None:
    """Two schedulers handle the same tick, and "update or create" lets both enqueue.

    Sources: knifecake/steady-queue PR#54, rails/solid_queue#636.
    """
    define(overlap="allow")
    Scheduler(using="default").tick(START)
    processes = [Scheduler(using="default") for _ in range(4)]
    for minute in range(1, 4):
        race(*(lambda s=s, m=minute: s.tick(START + m * MINUTE) for s in processes))
    assert ticks() == [START.replace(minute=minute, second=0) for minute in (1, 2, 3)]


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("error", [DatabaseError("full"), IntegrityError("not about its key")])
def test_a_tick_whose_row_cannot_be_written_is_not_lost(error: Exception, monkeypatch: Any) -> None:
    """The cursor and the row move together or not at all."""
    define()
    scheduler = Scheduler(using="default")
    scheduler.tick(START)
    insert = transitions.insert

    def refuse(*args: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(transitions, "insert", refuse)
    due = START.replace(minute=1, second=1)
    assert scheduler.tick(due) <= 5.0
    assert state().last_tick_at == START
    monkeypatch.setattr(transitions, "insert", insert)
    scheduler.tick(due + timedelta(seconds=5))
    assert ticks() == [START.replace(minute=1, second=0)]


def test_one_raising_job_never_stops_the_others(monkeypatch: Any) -> None:
    """One failing or raising job never stops the others' ticks."""
    define("acc.a")
    define("acc.b")
    define("acc.c")
    scheduler = Scheduler(using="default")
    scheduler.tick(START)
    build = module.build

    def raising(job: Any, *args: Any, **options: Any) -> Any:
        if job.name == "acc.b":
            raise RuntimeError("boom")
        return build(job, *args, **options)

    monkeypatch.setattr(module, "build", raising)
    scheduler.tick(START + MINUTE)
    assert set(JobExecution.objects.values_list("job_name", flat=True)) == {"acc.a", "acc.c"}


def test_a_tick_is_skipped_while_an_execution_lives_and_leaves_a_trace() -> None:
    """No two runs of one job overlap."""
    define()
    scheduler = Scheduler(using="default")
    for minute in range(4):
        scheduler.tick(START + minute * MINUTE)
    assert ticks() == [START.replace(minute=1, second=0)]
    assert skips() == ("overlap", 2)
    assert state().last_skip_at == state().last_tick_at == START.replace(minute=3, second=0)
    end_all()
    scheduler.tick(START + 4 * MINUTE)
    assert ticks()[-1] == START.replace(minute=4, second=0)


def test_a_trigger_keeps_a_tick_from_overlapping() -> None:
    """Also manual trigger against tick."""
    cron = define()
    scheduler = Scheduler(using="default")
    scheduler.tick(START)
    cron.trigger(by="somebody")
    scheduler.tick(START + MINUTE)
    assert ticks() == [None]
    assert skips() == ("overlap", 1)


def test_a_run_under_an_old_name_keeps_ticks_and_triggers_from_overlapping() -> None:
    """No two runs of one job overlap, also when it was renamed while one of them lives."""
    scheduler = Scheduler(using="default")
    define("acc.before").trigger()
    registry.unregister("acc.before")
    renamed = define(aliases=["acc.before"])
    scheduler.tick(START)
    scheduler.tick(START + MINUTE)
    assert ticks() == []
    assert skips() == ("overlap", 1)
    with pytest.raises(AlreadyRunning):
        renamed.trigger()
    end_all()
    scheduler.tick(START + 2 * MINUTE)
    assert ticks() == [START.replace(minute=2, second=0)]


def test_overlap_allow_opts_out() -> None:
    """`lock=False` opts out."""
    define(overlap="allow")
    scheduler = Scheduler(using="default")
    for minute in range(4):
        scheduler.tick(START + minute * MINUTE)
    assert len(ticks()) == 3


def test_a_paused_job_skips_its_ticks_and_waits_for_the_next_one_after() -> None:
    define()
    scheduler = Scheduler(using="default")
    scheduler.tick(START)
    JobState.objects.update(paused_at=START)
    scheduler.tick(START + MINUTE)
    scheduler.tick(START + 2 * MINUTE)
    assert ticks() == []
    assert skips() == ("paused", 2)
    JobState.objects.update(paused_at=None)
    scheduler.tick(START + 2 * MINUTE + timedelta(seconds=20))
    assert ticks() == []
    scheduler.tick(START + 3 * MINUTE)
    assert ticks() == [START.replace(minute=3, second=0)]


def test_a_job_paused_before_it_was_ever_seen_begins_like_a_new_one() -> None:
    define()
    JobStateFactory(job_name="acc.cron")
    Scheduler(using="default").tick(START)
    assert (state().schedule, state().last_tick_at) == ("* * * * * UTC", START)


def test_after_downtime_the_newest_tick_fires_once() -> None:
    """After downtime every missed slot is run in a burst.

    Sources: django-q2/django-q2#266, akvo/akvo-rsr#5248, celery/django-celery-beat#459.
    """
    define(overlap="allow")
    Scheduler(using="default").tick(START)
    scheduler = Scheduler(using="default")
    scheduler.tick(START + 30 * MINUTE)
    scheduler.tick(START + 30 * MINUTE + timedelta(seconds=10))
    assert ticks() == [START.replace(minute=30, second=0)]
    assert skips() == ("misfire", 29)
    scheduler.tick(START + 31 * MINUTE)
    assert len(ticks()) == 2


def test_a_tick_past_its_grace_is_not_made_up_for() -> None:
    define(cron="0 * * * *")
    Scheduler(using="default").tick(START)
    late = START.replace(hour=13, minute=31)
    Scheduler(using="default").tick(late)
    assert ticks() == []
    assert skips() == ("misfire", 1)
    assert state().last_tick_at == START.replace(hour=13, minute=0, second=0)


@pytest.mark.parametrize(
    ("options", "late", "fires"),
    [
        ({"cron": "0 3 * * *"}, timedelta(minutes=59), True),
        ({"cron": "0 3 * * *"}, timedelta(minutes=61), False),
        ({"cron": "0 3 * * *", "misfire_grace": 7200}, timedelta(minutes=119), True),
        ({"cron": "0 3 * * *", "misfire_grace": 60}, timedelta(minutes=2), False),
        ({"cron": "* * * * * */4"}, timedelta(seconds=3), True),
        ({"cron": "0 3 * * *", "misfire": "skip"}, timedelta(seconds=4), True),
        ({"cron": "0 3 * * *", "misfire": "skip"}, timedelta(seconds=6), False),
        ({"cron": "0 3 * * *", "misfire": "all"}, timedelta(days=1, hours=5), True),
    ],
)
def test_the_grace_decides(options: dict[str, Any], late: timedelta, fires: bool) -> None:
    define(**options, overlap="allow")
    three = START.replace(day=2, hour=3, minute=0, second=0)
    Scheduler(using="default").tick(three - timedelta(seconds=1))
    Scheduler(using="default").tick(three + late)
    assert bool(ticks()) is fires


@pytest.mark.medium
def test_misfire_all_fires_every_missed_tick_up_to_a_hundred() -> None:
    define(misfire="all", overlap="allow")
    Scheduler(using="default").tick(START)
    Scheduler(using="default").tick(START + 5 * MINUTE)
    assert ticks() == [START.replace(minute=minute, second=0) for minute in range(1, 6)]
    Scheduler(using="default").tick(START + 155 * MINUTE)
    assert len(ticks()) == 105
    first, last = ticks()[5], ticks()[-1]
    assert (last - first, last) == (99 * MINUTE, START.replace(hour=14, minute=35, second=0))
    assert skips() == ("misfire", 50)


def test_a_tick_that_ran_does_not_fire_again_after_a_restart() -> None:
    """After a restart the "missed run" logic fires a slot again that already ran.

    Sources: NousResearch/hermes-agent PR#68211, openclaw/openclaw#42640.
    """
    define(misfire_grace=600)
    scheduler = Scheduler(using="default")
    scheduler.tick(START)
    scheduler.tick(START + MINUTE)
    end_all()
    Scheduler(using="default").tick(START + MINUTE + timedelta(seconds=10))
    assert len(ticks()) == 1
    JobExecution.objects.all().delete()
    Scheduler(using="default").tick(START + MINUTE + timedelta(seconds=15))
    assert ticks() == []


@pytest.mark.parametrize(
    ("changed", "options"),
    [
        ("the time zone setting", {"cron": "0 5 1 * *"}),
        ("an hour that is past", {"cron": "0 4 1 * *"}),
        ("a day that is past", {"cron": "0 5 10 * *"}),
    ],
)
def test_a_changed_schedule_does_not_fire_at_once(changed: str, options: dict[str, Any], settings: Any) -> None:
    """After a change of the time zone or the expression a monthly job fires at once.

    Source: celery/celery#3219.
    """
    define(cron="0 5 1 * *")
    first = datetime(2027, 3, 1, 4, 59, tzinfo=UTC)
    Scheduler(using="default").tick(first)
    Scheduler(using="default").tick(first + MINUTE)
    assert len(ticks()) == 1
    end_all()
    if changed == "the time zone setting":
        settings.TIME_ZONE = "America/New_York"
    define(**options)
    today = datetime(2027, 3, 17, 15, 0, tzinfo=UTC)
    scheduler = Scheduler(using="default")
    scheduler.tick(today)
    scheduler.tick(today + MINUTE)
    assert len(ticks()) == 1
    assert state().last_tick_at == today


def test_a_tick_does_not_fire_if_the_schedule_was_swapped_after_it_was_found_due() -> None:
    cron = define()
    Scheduler(using="default").tick(START)
    JobState.objects.update(schedule="*/2 * * * * UTC")
    assert not module.fire(cron, START + MINUTE, after=START, using="default")
    assert ticks() == []


def test_old_code_stops_firing_a_job_whose_schedule_newer_code_swapped() -> None:
    """Old code and new code side by side during a rolling deploy do not create doubles.

    Sources: rails/solid_queue#382, celery/django-celery#54, procrastinate-org/procrastinate#1331, jobrunr/jobrunr#490.
    """
    old_job = define(cron="* * * * *", overlap="allow")
    old = Scheduler(using="default")
    old.tick(START)
    new_job = define(cron="*/2 * * * *", overlap="allow")
    new = Scheduler(using="default")
    new.tick(START + timedelta(seconds=1))
    for minute in range(1, 5):
        registry.unregister("acc.cron")
        registry.register(old_job)
        old.tick(START + minute * MINUTE)
        registry.unregister("acc.cron")
        registry.register(new_job)
        new.tick(START + minute * MINUTE)
    assert ticks() == [START.replace(minute=minute, second=0) for minute in (2, 4)]
    assert state().schedule == "*/2 * * * * UTC"


def test_a_job_removed_from_the_code_fires_no_more() -> None:
    """A cron job removed in code goes on from the database."""
    define()
    scheduler = Scheduler(using="default")
    scheduler.tick(START)
    registry.unregister("acc.cron")
    scheduler.tick(START + MINUTE)
    Scheduler(using="default").tick(START + 2 * MINUTE)
    assert ticks() == []


def test_a_state_that_was_deleted_is_made_again() -> None:
    define()
    scheduler = Scheduler(using="default")
    scheduler.tick(START)
    JobState.objects.all().delete()
    assert scheduler.tick(START + MINUTE) <= 1.0
    scheduler.tick(START + MINUTE + timedelta(seconds=1))
    assert state().last_tick_at == START + MINUTE + timedelta(seconds=1)


def test_a_clock_set_back_fires_no_tick_twice() -> None:
    define(overlap="allow")
    scheduler = Scheduler(using="default")
    scheduler.tick(START)
    scheduler.tick(START + MINUTE)
    scheduler.tick(START)
    scheduler.tick(START + MINUTE)
    assert ticks() == [START.replace(minute=1, second=0)]


def test_a_cursor_written_under_a_clock_far_ahead_is_set_back() -> None:
    define()
    scheduler = Scheduler(using="default")
    scheduler.tick(START + timedelta(days=400))
    assert scheduler.tick(START) == 0.0
    scheduler.tick(START + MINUTE)
    assert ticks() == [START.replace(minute=1, second=0)]


def test_a_cursor_that_another_process_has_set_back_already_is_left_alone() -> None:
    far_ahead = define()
    scheduler = Scheduler(using="default")
    scheduler.tick(START + timedelta(days=400))
    stale = state()
    JobState.objects.update(last_tick_at=START + MINUTE)
    assert scheduler._look(far_ahead, far_ahead.cron, stale, START) == 0.0
    assert state().last_tick_at == START + MINUTE


@pytest.mark.django_db(transaction=True)
def test_a_connection_lost_in_the_midst_of_a_look_ends_it_and_the_next_one_fires_the_rest(monkeypatch: Any) -> None:
    names = ["acc.a", "acc.b", "acc.c"]
    for name in names:
        define(name)
    scheduler = Scheduler(using="default")
    scheduler.tick(START)
    insert, inserts = transitions.insert, iter([True, False])

    def lose_second(*args: Any, **options: Any) -> None:
        if not next(inserts, False):
            raise InterfaceError("connection already closed")
        insert(*args, **options)

    monkeypatch.setattr(transitions, "insert", lose_second)
    with pytest.raises(InterfaceError):
        scheduler.tick(START + MINUTE)
    assert JobExecution.objects.count() == 1
    monkeypatch.setattr(transitions, "insert", insert)
    scheduler.tick(START + MINUTE)
    assert [ticks(name) for name in names] == [[START.replace(minute=1, second=0)]] * 3


@pytest.mark.django_db(transaction=True)
def test_housekeeping_of_connections_does_not_disturb_the_tick() -> None:
    """Connection housekeeping closes the connection of the scheduler's transaction; the slot fires again.

    Source: django-q2/django-q2#293.
    """
    from django.db import close_old_connections

    define(cron="0 12 * * *")
    scheduler = Scheduler(using="default")
    age = connections["default"].settings_dict["CONN_MAX_AGE"]
    connections["default"].settings_dict["CONN_MAX_AGE"] = 0
    try:
        scheduler.tick(START.replace(minute=0, second=0) - timedelta(seconds=30))
        for second in range(0, 120, 10):
            close_old_connections()
            scheduler.tick(START.replace(minute=0, second=1) + timedelta(seconds=second))
    finally:
        connections["default"].settings_dict["CONN_MAX_AGE"] = age
    assert ticks() == [START.replace(minute=0, second=0)]
    assert scheduler.tick(START + timedelta(hours=2)) == module.MAX_DELAY


def test_a_look_at_jobs_that_are_not_due_is_one_query(django_assert_num_queries: Any) -> None:
    for index in range(20):
        define(f"acc.cron{index}", cron="0 3 1 1 *")
    scheduler = Scheduler(using="default")
    scheduler.tick(START)
    with django_assert_num_queries(1):
        scheduler.tick(START + MINUTE)


def test_it_works_inside_a_transaction_of_the_caller() -> None:
    define()
    with transaction.atomic():
        scheduler = Scheduler(using="default")
        scheduler.tick(START)
        JobExecutionFactory(job_name="acc.cron", active_key="overlap")
        scheduler.tick(START + MINUTE)
        assert skips() == ("overlap", 1)
