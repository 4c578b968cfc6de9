"""Pause and resume: of a job, of a queue, by whom, and what it does to ticks that come meanwhile."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import User
from django.db import transaction

from django_jobs import DefinitionError, UnknownJob, clock, job, pauses, registry, services
from django_jobs.models import JobState, QueueState
from django_jobs.services import pauses as services_of_pauses
from tests.acc import jobs
from tests.factories import JobStateFactory
from tests.threads import race

pytestmark = pytest.mark.django_db


def test_a_pause_says_since_when_and_by_whom() -> None:
    user = User.objects.create_user("mia")
    before = clock.now("default")
    assert jobs.mark.pause(by=user) is True
    state = JobState.objects.get()
    assert (state.job_name, state.paused_by, state.paused_by_name) == ("acc.mark", str(user.pk), "mia")
    assert before <= state.paused_at <= clock.now("default")
    assert pauses.paused("default").jobs == {"acc.mark"}


def test_a_resume_leaves_nothing_of_the_pause() -> None:
    jobs.mark.pause(by="deploy")
    assert jobs.mark.resume(by="deploy") is True
    state = JobState.objects.get()
    assert (state.paused_at, state.paused_by, state.paused_by_name) == (None, "", "")
    assert pauses.paused("default").jobs == frozenset()


@pytest.mark.django_db(transaction=True)
def test_the_log_tells_who_ended_a_pause_once_that_is_committed(caplog: pytest.LogCaptureFixture) -> None:
    """Who did it is recorded, also when no row tells of it any more."""
    caplog.set_level("INFO", logger="django_jobs")
    jobs.mark.pause(by="ann")
    services.pause_queue("mail", by="ann")
    with contextlib.suppress(ZeroDivisionError), transaction.atomic():
        jobs.mark.resume(by="nobody")
        raise ZeroDivisionError
    jobs.mark.resume(by="ben")
    services.resume_queue("mail")
    jobs.mark.resume(by="ben")
    assert caplog.messages == ["acc.mark was resumed by ben", "the queue mail was resumed by somebody"]


def test_to_do_it_twice_changes_nothing_and_says_so() -> None:
    assert jobs.mark.resume() is False
    assert jobs.mark.pause(by="ann") is True
    first = JobState.objects.get()
    assert jobs.mark.pause(by="ben") is False
    again = JobState.objects.get()
    assert (again.paused_at, again.paused_by_name) == (first.paused_at, "ann")
    assert jobs.mark.resume() is True
    assert jobs.mark.resume() is False


def test_a_queue_is_paused_by_its_name_whether_or_not_anything_is_in_it() -> None:
    assert services.pause_queue("mail", by="ann") is True
    assert services.pause_queue("mail", by="ben") is False
    assert QueueState.objects.get().paused_by_name == "ann"
    assert pauses.paused("default").queues == {"mail"}
    assert services.resume_queue("mail") is True
    assert services.resume_queue("mail") is False
    assert pauses.paused("default").queues == frozenset()


@pytest.mark.parametrize("verb", [services.pause_job, services.resume_job])
def test_a_name_that_nobody_knows_is_refused_with_a_suggestion(verb: Any) -> None:
    with pytest.raises(UnknownJob, match=r"No job is called 'acc.marc'; did you mean 'acc.mark'\?"):
        verb("acc.marc")
    assert not JobState.objects.exists()


def test_a_job_of_other_code_is_paused_by_the_state_it_left() -> None:
    JobStateFactory(job_name="elsewhere.job")
    assert services.pause_job("elsewhere.job") is True
    assert services.resume_job("elsewhere.job") is True


@pytest.mark.parametrize("verb", [services.pause_queue, services.resume_queue])
def test_what_no_queue_can_be_called_is_refused(verb: Any) -> None:
    with pytest.raises(DefinitionError, match="queue='a b'"):
        verb("a b")


@pytest.mark.parametrize("verb", [jobs.mark.pause, jobs.mark.resume, lambda by: services.pause_queue("mail", by=by)])
def test_who_does_it_is_a_user_or_a_text(verb: Any) -> None:
    with pytest.raises(DefinitionError, match="by=3"):
        verb(by=3)
    assert not JobState.objects.exists()


def test_the_async_twins_do_the_same() -> None:
    assert async_to_sync(jobs.mark.apause)(by="ann") is True
    assert JobState.objects.get().paused_by_name == "ann"
    assert async_to_sync(jobs.mark.aresume)() is True
    assert async_to_sync(services.apause_queue)("mail") is True
    assert async_to_sync(services.aresume_queue)("mail") is True


def test_a_pause_outlives_a_rename_of_its_job_and_ends_under_the_new_name() -> None:
    JobStateFactory(job_name="acc.old_name", paused=True)
    with registry.isolated():

        @job(name="acc.new_name", aliases=["acc.old_name"])
        def renamed() -> None: ...

        assert pauses.paused("default").jobs == {"acc.new_name", "acc.old_name"}
        assert renamed.pause() is False
        # As when both names were paused before they became one job.
        JobStateFactory(job_name="acc.new_name", paused=True)
        assert services.resume_job("acc.old_name") is True
        assert pauses.paused("default").jobs == frozenset()


@pytest.mark.django_db(transaction=True)
def test_of_several_who_pause_at_once_one_did_it() -> None:
    assert sorted(race(*(lambda: jobs.mark.pause(by="ann") for _ in range(4)))) == [False, False, False, True]
    assert sorted(race(*(jobs.mark.resume for _ in range(4)))) == [False, False, False, True]


def test_who_pauses_a_moment_later_takes_nothing_over(monkeypatch: Any) -> None:
    now = clock.now

    def meanwhile(using: str) -> Any:
        monkeypatch.undo()
        assert jobs.mark.pause(by="ann") is True
        return now(using)

    JobStateFactory(job_name="acc.mark")
    monkeypatch.setattr(clock, "now", meanwhile)
    assert jobs.mark.pause(by="ben") is False
    assert JobState.objects.get().paused_by_name == "ann"


@pytest.mark.django_db(transaction=True)
def test_a_pause_that_is_rolled_back_never_was() -> None:
    with transaction.atomic():
        jobs.mark.pause()
        transaction.set_rollback(True)
    assert pauses.paused("default").jobs == frozenset()


def test_pushes_and_triggers_of_a_paused_job_are_accepted() -> None:
    with registry.isolated():

        @job(name="acc.hourly", cron="0 * * * *")
        def hourly() -> None: ...

        hourly.pause()
        jobs.mark.pause()
        assert hourly.trigger().status == "pending"
        assert jobs.mark.push().created is True


def test_a_resume_moves_the_cursor_past_ticks_that_nobody_left_out() -> None:
    """With no scheduler up meanwhile the last tick would fire late, as one that was missed."""
    now = clock.now("default")
    with registry.isolated():

        @job(name="acc.each", cron="* * * * *", misfire="all", overlap="allow")
        def each() -> None: ...

        cursor = now.replace(second=0, microsecond=0) - timedelta(minutes=3)
        JobStateFactory(job_name="acc.each", schedule=str(each.cron), last_tick_at=cursor, paused=True)
        each.resume()
        state = JobState.objects.get()
    # The last minute that had begun by then.
    assert now.replace(second=0, microsecond=0) <= state.last_tick_at <= clock.now("default")
    assert (state.last_skip_reason, state.last_skip_at) == ("paused", state.last_tick_at)
    assert state.skips in {3, 4}


def test_a_resume_moves_the_cursor_past_more_ticks_than_are_counted() -> None:
    now = clock.now("default")
    with registry.isolated():

        @job(name="acc.each", cron="* * * * * *")
        def each() -> None: ...

        JobStateFactory(
            job_name="acc.each", schedule=str(each.cron), last_tick_at=now - timedelta(hours=1), paused=True
        )
        each.resume()
    assert JobState.objects.get().last_tick_at >= now


def test_a_resume_between_two_ticks_leaves_the_cursor_alone() -> None:
    now = clock.now("default")
    far = (now + timedelta(days=180)).month
    with registry.isolated():

        @job(name="acc.yearly", cron=f"0 0 1 {far} *")
        def yearly() -> None: ...

        last = yearly.cron.previous_before(now)
        JobStateFactory(job_name="acc.yearly", schedule=str(yearly.cron), last_tick_at=last, paused=True)
        yearly.resume()
    assert JobState.objects.get().last_tick_at == last
    assert JobState.objects.get().skips == 0


@pytest.mark.parametrize("is_known", [True, False])
def test_the_cursor_of_a_schedule_that_is_not_ours_moves_to_now(is_known: bool) -> None:
    then = clock.now("default") - timedelta(days=3)
    JobStateFactory(job_name="elsewhere.job", schedule="0 * * * * UTC", last_tick_at=then, paused=True)
    with registry.isolated():
        if is_known:
            # By newer code, or older one.
            job(name="elsewhere.job", cron="* * * * *")(lambda: None)
        services.resume_job("elsewhere.job")
    state = JobState.objects.get()
    assert clock.now("default") - state.last_tick_at < timedelta(seconds=10)
    assert state.skips == 0


def test_the_cursor_of_a_schedule_that_is_not_ours_stays_where_a_tick_fired_by_a_clock_ahead() -> None:
    ahead = clock.now("default") + timedelta(minutes=1)
    JobStateFactory(job_name="elsewhere.job", schedule="0 * * * * UTC", last_tick_at=ahead, paused=True)
    services.resume_job("elsewhere.job")
    assert JobState.objects.get().last_tick_at == ahead


def test_a_scheduler_that_moves_the_cursor_meanwhile_is_not_overwritten(monkeypatch: Any) -> None:
    now = clock.now("default")
    with registry.isolated():

        @job(name="acc.each", cron="* * * * *")
        def each() -> None: ...

        cursor = now - timedelta(minutes=3)
        JobStateFactory(job_name="acc.each", schedule=str(each.cron), last_tick_at=cursor, paused=True)
        ahead = now + timedelta(hours=1)
        left_out = services_of_pauses._left_out

        def meanwhile(*args: Any) -> Any:
            monkeypatch.undo()
            changes = left_out(*args)
            JobState.objects.update(last_tick_at=ahead)
            return changes

        monkeypatch.setattr(services_of_pauses, "_left_out", meanwhile)
        assert each.resume() is True
    assert JobState.objects.get().last_tick_at == ahead
