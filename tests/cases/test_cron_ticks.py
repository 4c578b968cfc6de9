"""Cron ticks on a clock that the tests set: none twice, none lost, none for nothing."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from django.db import connection, transaction

from django_jobs import AlreadyRunning, DefinitionError, clock, job, registry, transitions
from django_jobs.models import JobExecution, JobState
from django_jobs.runtime import scheduler as module
from django_jobs.runtime.scheduler import Scheduler
from django_jobs.runtime.stage import Stage
from django_jobs.schedules import Cron
from django_jobs.signals import job_pushed
from django_jobs.states import Status
from tests.admin.support import LIST, page
from tests.crons import define, end_all, put, skips, state, ticks
from tests.factories import JobExecutionFactory, WorkerFactory
from tests.threads import in_thread, race

pytestmark = pytest.mark.django_db
START = datetime(2027, 3, 1, 12, 0, 30, tzinfo=UTC)
SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)
JOBS = "/admin/django_jobs/jobstate/"


@pytest.fixture(autouse=True)
def _only_the_jobs_of_the_test() -> Iterator[None]:
    with registry.isolated(empty=True):
        yield


def minute(number: int) -> datetime:
    """The full minute `number` minutes after START's own."""
    return START.replace(second=0) + number * MINUTE


# Many processes


@pytest.mark.django_db(transaction=True)
def test_schedulers_that_meet_at_a_tick_leave_one_row_and_no_error_line(caplog: Any) -> None:
    """Two schedulers handle the same tick, and "update or create" lets both enqueue.

    Sources: knifecake/steady-queue PR#54, rails/solid_queue#636.
    """
    define(overlap="allow")
    define("acc.alone")
    processes = [Scheduler(using="default") for _ in range(4)]
    # Their first sight of the jobs meets, too.
    race(*(lambda s=s: s.tick(START) for s in processes))
    for number in range(1, 4):
        race(*(lambda s=s, n=number: s.tick(START + n * MINUTE) for s in processes))
    assert ticks() == [minute(1), minute(2), minute(3)]
    assert ticks("acc.alone") == [minute(1)]
    assert skips("acc.alone") == ("overlap", 2)
    assert [record for record in caplog.records if record.levelname in {"ERROR", "CRITICAL"}] == []


@pytest.mark.django_db(transaction=True)
def test_a_scheduler_that_slept_between_its_look_and_its_deed_fires_nothing_twice(monkeypatch: Any) -> None:
    """The advance of the next time is not stored when a frozen process wakes, and its slot fires again.

    Sources: NousResearch/hermes-agent PR#68211, openclaw/openclaw#42640.
    """
    define(overlap="allow")
    sleeper, awake = Scheduler(using="default"), Scheduler(using="default")
    sleeper.tick(START)
    awake.tick(START)
    asleep, wake, fire = threading.Event(), threading.Event(), module.fire

    def late(*args: Any, **options: Any) -> Any:
        asleep.set()
        assert wake.wait(20)
        return fire(*args, **options)

    monkeypatch.setattr(module, "fire", late)
    thread = threading.Thread(target=lambda: in_thread(lambda: sleeper.tick(START + MINUTE)))
    thread.start()
    assert asleep.wait(20)
    monkeypatch.setattr(module, "fire", fire)
    for number in range(1, 4):
        awake.tick(START + number * MINUTE)
    wake.set()
    thread.join(20)
    assert ticks() == [minute(1), minute(2), minute(3)]
    assert state().last_tick_at == minute(3)


def test_a_tick_that_another_process_fires_meanwhile_is_not_counted_as_missed(monkeypatch: Any) -> None:
    """What was missed is judged by a last run that is out of date (openclaw/openclaw#42640)."""
    define(overlap="allow")
    late, prompt = Scheduler(using="default"), Scheduler(using="default")
    late.tick(START)
    prompt.tick(START)
    fire = module.fire

    def meanwhile(*args: Any, **options: Any) -> Any:
        monkeypatch.undo()
        prompt.tick(minute(1))
        return fire(*args, **options)

    monkeypatch.setattr(module, "fire", meanwhile)
    assert late.tick(minute(2)) <= 1.0
    late.tick(minute(2) + SECOND)
    assert ticks() == [minute(1), minute(2)]
    assert skips() == ("", 0)


@pytest.mark.postgres
@pytest.mark.mysql
@pytest.mark.django_db(transaction=True)
def test_a_cursor_that_a_dead_host_still_holds_keeps_no_other_job_from_its_ticks() -> None:
    """One stuck entry holds up the loop, and with it every other schedule (dagster-io/dagster PR#26238).

    A host that is cut off or frozen within its transaction holds the lock until the server gives its session up.
    """
    for name in ("acc.a", "acc.b", "acc.c"):
        define(name, overlap="allow")
    schedulers = [Scheduler(using="default") for _ in range(2)]
    for scheduler in schedulers:
        scheduler.tick(START)
    with transaction.atomic():
        JobState.objects.select_for_update().get(job_name="acc.b")
        began = clock.now("default")
        for scheduler in schedulers:
            # It is looked at again soon: the holder may have died.
            assert in_thread(lambda s=scheduler: s.tick(START + MINUTE)) <= 1.0
        # A process that starts meanwhile.
        in_thread(lambda: Scheduler(using="default").tick(START + 2 * MINUTE))
        assert clock.now("default") - began < timedelta(seconds=5)
        transaction.set_rollback(True)
    assert (ticks("acc.a"), ticks("acc.b")) == ([minute(1), minute(2)], [])
    schedulers[0].tick(START + 2 * MINUTE)
    assert ticks("acc.b") == [minute(2)]


# A deploy


def test_a_tick_of_the_old_code_in_the_midst_of_the_swap_does_not_undo_it(monkeypatch: Any) -> None:
    """Old code and new code side by side during a rolling deploy: the new schedule has to come in.

    Sources: rails/solid_queue#382, procrastinate-org/procrastinate#1331.
    """
    old_job, new_job = define(overlap="allow"), define(cron="*/2 * * * *", overlap="allow")
    old, new = Scheduler(using="default"), Scheduler(using="default")
    put(old_job)
    old.tick(START)
    put(new_job)
    in_bulk = JobState.objects.using("default").__class__.in_bulk

    def meanwhile(self: Any, *args: Any) -> Any:
        found = in_bulk(self, *args)
        monkeypatch.undo()
        put(old_job)
        # A little ahead of the other process.
        old.tick(minute(2))
        put(new_job)
        return found

    monkeypatch.setattr(JobState.objects.using("default").__class__, "in_bulk", meanwhile)
    new.tick(minute(2) - timedelta(milliseconds=5))
    assert state().schedule == "*/2 * * * * UTC"
    new.tick(minute(2) + SECOND)
    assert ticks() == [minute(2)]
    new.tick(minute(3))
    new.tick(minute(4))
    assert ticks() == [minute(2), minute(4)]


def test_a_schedule_that_yet_newer_code_brings_in_the_midst_of_a_swap_stays(monkeypatch: Any) -> None:
    put(define())
    Scheduler(using="default").tick(START)
    put(define(cron="*/2 * * * *"))
    in_bulk = JobState.objects.using("default").__class__.in_bulk

    def meanwhile(self: Any, *args: Any) -> Any:
        found = in_bulk(self, *args)
        monkeypatch.undo()
        JobState.objects.update(schedule="*/3 * * * * UTC")
        return found

    monkeypatch.setattr(JobState.objects.using("default").__class__, "in_bulk", meanwhile)
    Scheduler(using="default").tick(minute(1))
    assert state().schedule == "*/3 * * * * UTC"


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.medium
def test_during_a_deploy_no_tick_is_doubled_nothing_flips_and_old_code_falls_silent(seed: int) -> None:
    """Old code and new code side by side during a rolling deploy create doubles.

    Sources: rails/solid_queue#382, celery/django-celery#54, procrastinate-org/procrastinate#1331, jobrunr/jobrunr#490.
    """
    chance = random.Random(seed)
    old_job, new_job = define(overlap="allow"), define(cron="*/3 * * * *", timezone="Asia/Kolkata", overlap="allow")
    processes: list[tuple[Any, Scheduler]] = [(old_job, Scheduler(using="default")) for _ in range(2)]
    seen: list[str] = []
    for number in range(40):
        if number in {10, 12}:
            processes.append((new_job, Scheduler(using="default")))
        if number in {20, 25}:
            # An old process ends.
            processes.pop(0)
        for code, scheduler in chance.sample(processes, k=chance.randint(1, len(processes))):
            put(code)
            scheduler.tick(START + number * MINUTE / 2 + timedelta(seconds=chance.random()))
            if not seen or seen[-1] != state().schedule:
                seen.append(state().schedule)
    found = ticks()
    assert len(found) == len(set(found))
    assert seen == ["* * * * * UTC", "*/3 * * * * Asia/Kolkata"]
    last_old = max(tick for tick in found if tick.minute % 3)
    assert last_old <= START + 8 * MINUTE
    assert all(tick.minute % 3 == 0 for tick in found if tick > last_old)
    # Every tick that nobody fired was missed while nobody looked, and is accounted for.
    new_ticks = [minute(number) for number in range(7, 20) if minute(number).minute % 3 == 0]
    assert new_ticks[-1] - found[-1] <= 3 * MINUTE


def test_a_job_that_is_renamed_while_old_code_runs_is_fired_under_one_name() -> None:
    """A cron job renamed in code goes on from the database, next to its new self.

    Sources: rails/solid_queue#382, celery/django-celery#54, procrastinate-org/procrastinate#1331, jobrunr/jobrunr#490.
    """
    old_job = define("acc.old", overlap="allow")
    put()
    new_job = define("acc.new", aliases=["acc.old"], overlap="allow")
    old, new = Scheduler(using="default"), Scheduler(using="default")
    put(old_job)
    old.tick(START)
    old.tick(minute(1))
    put(new_job)
    # Its clock is a little behind.
    new.tick(minute(1) - timedelta(milliseconds=5))
    for number in range(2, 5):
        for code, scheduler in ((old_job, old), (new_job, new)):
            put(code)
            scheduler.tick(minute(number))
    assert ticks("acc.old") == [minute(1)]
    assert ticks("acc.new") == [minute(2), minute(3), minute(4)]


@pytest.mark.medium
def test_what_a_removed_job_left_is_parked_with_its_reason_and_can_be_removed(client: Any, admin_user: Any) -> None:
    """The queued row of a cron job that was removed in code fails for ever.

    Sources: rails/solid_queue#382, celery/django-celery#54, procrastinate-org/procrastinate#1331, jobrunr/jobrunr#490.
    """
    now = clock.now("default")
    define()
    scheduler = Scheduler(using="default")
    scheduler.tick(START)
    scheduler.tick(START + MINUTE)
    row = JobExecution.objects.get()
    registry.unregister("acc.cron")
    # Two processes of the new code serve its queue, and nobody has known the name for long.
    WorkerFactory(now=now, names=["acc.mark"])
    JobExecution.objects.update(scheduled_at=now - timedelta(minutes=5))
    later = now + timedelta(seconds=5)
    Stage(using="default").tick(later)
    scheduler.tick(START + 2 * MINUTE)
    row.refresh_from_db()
    assert (row.status, row.parked_reason) == (Status.SCHEDULED, "unknown")
    assert JobExecution.objects.count() == 1
    client.force_login(admin_user)
    for url in (LIST, f"{LIST}?status=parked", JOBS, page(row)):
        assert client.get(url).status_code == 200
    client.post(page(row, "cancel"))
    row.refresh_from_db()
    assert row.status == Status.CANCELLED
    client.post(page(row, "delete"), {"post": "yes"})
    assert not JobExecution.objects.exists()


@pytest.mark.parametrize("expression", ["0 5 10 * *", "0 0 */2 * 1", "0 16 1,2,3 * FRI"])
def test_the_page_of_jobs_shows_when_a_changed_schedule_comes_next(
    expression: str, client: Any, admin_user: Any
) -> None:
    """The stored last run is compared under a new rule; a day of month beside a day of week runs more than was meant.

    Sources: celery/celery#3219, pallets-eco/croniter#41.
    """
    define(cron="0 5 1 * *")
    Scheduler(using="default").tick()
    changed = define(cron=expression, timezone="America/New_York")
    client.force_login(admin_user)
    before = clock.now("default")
    [shown] = client.get(JOBS).context["overview"].lines
    assert changed.cron.next_after(before) <= shown.facts.next_run <= changed.cron.next_after(clock.now("default"))
    Scheduler(using="default").tick()
    assert ticks() == []


# Definitions


def test_a_second_schedule_of_one_function_is_refused_or_another_job() -> None:
    """Two schedules of one function share a generated name, and the second silently replaces the first.

    Sources: celery/celery#8142, celery/celery#2834.
    """

    def handler() -> None: ...

    job(cron="* * * * *")(handler)
    with pytest.raises(DefinitionError, match=r"Two jobs are called .*another name="):
        job(cron="*/2 * * * *")(handler)
    put()
    job(name="acc.first", cron="* * * * *")(handler)
    job(name="acc.second", cron="*/2 * * * *")(handler)
    scheduler = Scheduler(using="default")
    scheduler.tick(START)
    scheduler.tick(minute(2))
    assert (ticks("acc.first"), ticks("acc.second")) == ([minute(2)], [minute(2)])


@pytest.mark.parametrize("expression", ["0 0 31 2 *", "0 0 31 4 *", "0 0 1 1 * 0 2027", "H H * * *", "@reboot"])
def test_a_job_that_would_never_come_is_refused_by_name_and_the_others_run(expression: str) -> None:
    """31 February passes validation, then the scheduler raises or spins and takes all other jobs with it.

    Sources: pallets-eco/croniter#141, dagster-io/dagster PR#26238.
    """
    define("acc.good")
    with pytest.raises(DefinitionError) as caught:
        define("acc.never", cron=expression)
    assert "acc.never" in str(caught.value)
    assert expression in str(caught.value)
    scheduler = Scheduler(using="default")
    scheduler.tick(START)
    scheduler.tick(START + MINUTE)
    assert ticks("acc.good") == [minute(1)]


def test_a_schedule_that_raises_stops_no_other_and_is_tried_again(monkeypatch: Any) -> None:
    """One failing or raising job never stops the others' ticks; an end of the calendar took the scheduler along.

    Source: pallets-eco/croniter#141.
    """
    for name, expression in (("acc.a", "* * * * *"), ("acc.b", "30 4 * * *"), ("acc.c", "* * * * *")):
        define(name, cron=expression)
    scheduler = Scheduler(using="default")
    scheduler.tick(START)
    next_after = Cron.next_after

    def broken(self: Cron, instant: datetime) -> datetime:
        if self.expression == "30 4 * * *":
            raise OverflowError("date value out of range")
        return next_after(self, instant)

    with monkeypatch.context() as patch:
        patch.setattr(Cron, "next_after", broken)
        assert scheduler.tick(START + MINUTE) == module.AGAIN_AFTER_FAILURE
    assert (len(ticks("acc.a")), len(ticks("acc.c"))) == (1, 1)
    tomorrow = datetime(2027, 3, 2, 4, 30, tzinfo=UTC)
    scheduler.tick(tomorrow)
    assert ticks("acc.b") == [tomorrow]


@pytest.mark.django_db(transaction=True)
def test_a_receiver_that_breaks_its_transaction_costs_no_tick() -> None:
    """The path of periodic jobs lets user code into its own transaction and loses the slot (riverqueue/river#675)."""
    define()
    scheduler = Scheduler(using="default")
    scheduler.tick(START)
    heard: list[Any] = []

    def receive(execution: JobExecution, **kwargs: Any) -> None:
        heard.append(execution.pk)
        with connection.cursor() as cursor:
            cursor.execute("SELECT nothing FROM nowhere")

    job_pushed.connect(receive)
    try:
        scheduler.tick(START + MINUTE)
        scheduler.tick(START + MINUTE + SECOND)
    finally:
        job_pushed.disconnect(receive)
    assert ticks() == [minute(1)]
    assert heard == [JobExecution.objects.get().pk]


# The clock moves


@pytest.mark.parametrize(
    ("expression", "zone", "day", "expected"),
    [
        ("30 2 * * *", "America/New_York", "2027-03-13", ["13T02:30", "14T03:00", "15T02:30", "16T02:30"]),
        ("30 2 * * *", "Europe/Berlin", "2027-03-27", ["27T02:30", "28T03:00", "29T02:30", "30T02:30"]),
        ("30 1 * * *", "America/New_York", "2027-11-06", ["06T01:30", "07T01:30", "08T01:30", "09T01:30"]),
        ("0 20 * * *", "Europe/Paris", "2027-10-30", ["30T20:00", "31T20:00", "01T20:00", "02T20:00"]),
        ("0 0 * * *", "Africa/Cairo", "2027-04-29", ["29T00:00", "30T01:00", "01T00:00", "02T00:00"]),
    ],
)
@pytest.mark.medium
def test_a_daily_job_makes_one_row_each_day_across_a_change(
    expression: str, zone: str, day: str, expected: list[str]
) -> None:
    """A daily job inside the skipped hour does not run that day, or runs twice, or stays an hour off from then on.

    Sources: kelektiv/node-cron#563, robfig/cron PR#541, pallets-eco/croniter#25, Koed00/django-q#630.
    """
    define(cron=expression, timezone=zone, overlap="allow")
    scheduler, tz = Scheduler(using="default"), ZoneInfo(zone)
    now = datetime.fromisoformat(day).replace(tzinfo=tz).astimezone(UTC) - MINUTE
    end = now + timedelta(days=3, hours=22)
    while now < end:
        scheduler.tick(now)
        now += 30 * MINUTE
    assert [tick.astimezone(tz).isoformat()[8:16] for tick in ticks()] == expected
    assert state().skips == 0


@pytest.mark.parametrize(("day", "hours"), [("2027-03-14", 23), ("2027-11-07", 25), ("2027-08-12", 24)])
@pytest.mark.medium
def test_an_hourly_job_makes_a_row_in_each_real_hour_of_a_day(day: str, hours: int) -> None:
    """Asked in the second pass of an hour, the next run was in the past (dragonmantank/cron-expression#196)."""
    define(cron="0 * * * *", timezone="America/New_York", overlap="allow")
    scheduler, tz = Scheduler(using="default"), ZoneInfo("America/New_York")
    now = datetime.fromisoformat(day).replace(tzinfo=tz).astimezone(UTC) - MINUTE
    for quarter in range(hours * 4):
        scheduler.tick(now + quarter * 15 * MINUTE)
    assert len(ticks()) == len(set(ticks())) == hours
    assert state().skips == 0


# Downtime


@pytest.mark.parametrize(
    ("misfire", "overlap", "fired", "trace"),
    [
        ("latest", "allow", 1, ("misfire", 100)),
        ("skip", "allow", 0, ("misfire", 100)),
        ("all", "allow", 100, ("misfire", 100)),
        ("all", "skip", 1, ("overlap", 199)),
    ],
)
@pytest.mark.medium
def test_what_a_downtime_of_five_hours_brings_is_bounded_and_traced(
    misfire: str, overlap: str, fired: int, trace: tuple[str, int]
) -> None:
    """After downtime every missed slot runs in a burst.

    Sources: django-q2/django-q2#266, akvo/akvo-rsr#5248, celery/django-celery-beat#459.
    """
    define(misfire=misfire, overlap=overlap)
    Scheduler(using="default").tick(START)
    # 20 s late: within half the gap, and past the few seconds that "skip" allows.
    now = minute(300) + 20 * SECOND
    at_last = Scheduler(using="default")
    at_last.tick(now)
    assert len(ticks()) == fired
    assert skips() == trace
    # And then the normal rhythm.
    end_all()
    before = len(ticks())
    at_last.tick(now + 20 * SECOND)
    assert len(ticks()) == before
    at_last.tick(minute(301) + SECOND)
    assert ticks()[-1] == minute(301)
    assert len(ticks()) == before + 1


# Overlap


@pytest.mark.django_db(transaction=True)
def test_a_tick_and_triggers_at_one_moment_make_one_row_and_leave_a_trace() -> None:
    """Two runs of one cron job overlap when a person starts it at the moment of its tick.

    Source: rails/solid_queue#636.
    """
    cron = define()
    scheduler = Scheduler(using="default")
    scheduler.tick(START)

    def trigger() -> tuple[bool, Any]:
        try:
            return True, cron.trigger(by="a person").pk
        except AlreadyRunning as error:
            return False, error.execution.pk

    ticked = 0
    for number in range(1, 6):
        _, *answers = race(lambda n=number: scheduler.tick(START + n * MINUTE), trigger, trigger)
        row = JobExecution.objects.live().get()
        ticked += row.tick_at is not None
        assert [pk for is_new, pk in answers if is_new] == ([] if row.tick_at else [row.pk])
        assert {pk for is_new, pk in answers} == {row.pk}
        assert (state().last_tick_at, state().skips) == (minute(number), number - ticked)
        end_all()


def test_a_failed_tick_is_not_retried_beside_the_next_one() -> None:
    """A retry by hand is a third way to two runs at once (rails/solid_queue#636)."""
    define(retry=1)
    scheduler = Scheduler(using="default")
    scheduler.tick(START)
    scheduler.tick(START + MINUTE)
    failed = JobExecution.objects.get()
    JobExecution.objects.update(status=Status.ERROR, active_key=None, completed_at=clock.now("default"), attempt=1)
    failed.refresh_from_db()
    scheduler.tick(START + 2 * MINUTE)
    with pytest.raises(AlreadyRunning) as caught:
        failed.retry(by="a person")
    assert caught.value.execution.tick_at == minute(2)
    end_all()
    failed.retry(by="a person")
    scheduler.tick(START + 3 * MINUTE)
    assert ticks() == [minute(1), minute(2)]
    assert skips() == ("overlap", 1)


def test_the_run_of_a_dead_worker_holds_its_job_back_until_it_is_buried_and_no_longer() -> None:
    """The lock of a holder that died stays, and when it comes back it frees the lock of another run.

    Source: rails/solid_queue#636.
    """
    define()
    scheduler, now = Scheduler(using="default"), clock.now("default")
    scheduler.tick(START)
    dead = WorkerFactory(now=now, dead=True)
    JobExecutionFactory(running=True, job_name="acc.cron", active_key="overlap", worker=dead, now=now)
    ran = JobExecution.objects.running().get()
    scheduler.tick(START + MINUTE)
    assert skips() == ("overlap", 1)
    transitions.bury(JobExecution.objects.running(), now=now, error="gone", entry={})
    scheduler.tick(START + 2 * MINUTE)
    [alive] = JobExecution.objects.live()
    assert alive.tick_at == minute(2)
    # The dead one comes back and reports.
    assert transitions.finish([transitions.succeed(ran)], now=now, using="default") == {}
    scheduler.tick(START + 3 * MINUTE)
    assert skips() == ("overlap", 2)
    assert JobExecution.objects.live().get() == alive


def test_a_job_that_is_paused_skips_its_ticks_and_the_others_do_not() -> None:
    """A pause holds up other schedules, or everything it held back comes at once (django-q2/django-q2#266)."""
    define("acc.a", misfire="all", overlap="allow")
    define("acc.b", misfire="all", overlap="allow")
    schedulers = [Scheduler(using="default") for _ in range(2)]
    for scheduler in schedulers:
        scheduler.tick(START)
    JobState.objects.filter(job_name="acc.a").update(paused_at=START)
    for number in range(1, 4):
        for scheduler in schedulers:
            scheduler.tick(START + number * MINUTE)
    assert (ticks("acc.a"), len(ticks("acc.b"))) == ([], 3)
    assert skips("acc.a") == ("paused", 3)
    assert state("acc.a").last_skip_at == minute(3)
    JobState.objects.update(paused_at=None)
    schedulers[0].tick(START + 4 * MINUTE)
    assert ticks("acc.a") == [minute(4)]
