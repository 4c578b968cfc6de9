"""`manage.py jobs`: what it shows, what it does, and how it says that something was not done."""

from __future__ import annotations

import io
import json
import re
import sys
from argparse import SUPPRESS
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError, OutputWrapper
from django.db import OperationalError

from django_jobs import clock, registry
from django_jobs.cli import many, tail
from django_jobs.cli.choosing import Filters, moment
from django_jobs.cli.errors import UsageError
from django_jobs.cli.terminal import Terminal
from django_jobs.definition import job
from django_jobs.dispatchers import get_dispatcher
from django_jobs.dispatchers.direct import DirectDispatcher
from django_jobs.fields import uuid7
from django_jobs.management.commands import jobs as command
from django_jobs.models import JobExecution, JobState, QueueState
from django_jobs.reading import listing
from django_jobs.services import bulk
from django_jobs.states import Status
from tests.factories import JobExecutionFactory, JobStateFactory, QueueStateFactory, WorkerFactory
from tests.support import ROOT

pytestmark = pytest.mark.django_db


class Screen(io.StringIO):
    """A terminal that remembers."""

    def isatty(self) -> bool:
        return True


def jobs(*args: Any) -> str:
    """What the command writes."""
    out = io.StringIO()
    call_command("jobs", *map(str, args), stdout=out, stderr=io.StringIO())
    return out.getvalue()


def read(*args: Any) -> Any:
    """What it writes for a machine: one JSON document."""
    return json.loads(jobs(*args, "--json"))


def refused(code: int, *args: Any) -> str:
    """What it says when it ends with this exit code: one line."""
    with pytest.raises(CommandError) as caught:
        jobs(*args)
    text = str(caught.value)
    assert (caught.value.returncode, "\n" in text) == (code, False), text
    return text


def status(row: JobExecution) -> str:
    row.refresh_from_db()
    return row.status


@pytest.fixture
def own_jobs() -> Iterator[None]:
    with registry.isolated():

        @job(name="shop.receipt", queue="mail", aliases=["shop.mail"])
        def receipt(order_id: int, at: timedelta = timedelta(0)) -> None: ...

        @job(name="shop.nightly", cron="0 3 * * *", timezone="Europe/Paris")
        def nightly() -> None: ...

        @job(name="shop.secret", sensitive=True)
        def secret(token: str) -> None: ...

        yield


def test_executions_are_listed_newest_first_and_no_more_than_asked_for() -> None:
    rows = [JobExecutionFactory(key=f"k{n}", queue="mail") for n in range(3)]
    lines = jobs("list", "--limit", 2).splitlines()
    assert lines[0].split() == ["ID", "STATUS", "JOB", "ATTEMPT", "AGE", "QUEUE", "KEY"]
    assert [line.split()[0] for line in lines[1:3]] == [str(rows[2].pk), str(rows[1].pk)]
    assert lines[3:] == ["… and more: --limit 2 ends here."]
    found = read("list", "--limit", 2)
    assert [each["key"] for each in found["executions"]] == ["k2", "k1"]
    assert (found["has_more"], found["is_cut"]) == (True, False)
    assert "from 1 to 1000000" in refused(2, "list", "--limit", 0)


def test_a_list_is_narrowed_by_every_filter(own_jobs: None) -> None:
    now = clock.now("default")
    old = JobExecutionFactory(job_name="shop.mail", failed=True, now=now - timedelta(hours=3))
    new = JobExecutionFactory(job_name="shop.receipt", ok=True, queue="mail", key="k", organization_id="o")
    parked = JobExecutionFactory(parked=True)

    def ids(*args: str) -> set[str]:
        return {each["id"] for each in read("list", *args)["executions"]}

    assert ids("--job", "shop.receipt") == ids("--job=shop.mail") == {str(old.pk), str(new.pk)}
    assert ids("--queue", "mail") == ids("--organization=o") == {str(new.pk)}
    assert ids("--status", "error") == {str(old.pk)}
    assert ids("--status", "parked") == {str(parked.pk)}
    assert ids("--key", "k") == set()
    assert ids("--key", "k", "--organization", "o") == {str(new.pk)}
    assert ids("--since", "2h") == {str(new.pk), str(parked.pk)}
    assert jobs("list", "--status", "cancelled") == "No execution matches.\n"


def test_the_first_day_there_was_narrows_nothing() -> None:
    row = JobExecutionFactory()
    assert str(row.pk) in jobs("list", "--since", "0001-01-01")


def test_a_filter_without_an_index_looks_at_the_newest_rows_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "WINDOW", 2)
    old = JobExecutionFactory(queue="mail")
    for _ in range(2):
        JobExecutionFactory()
    assert str(old.pk) not in jobs("list", "--queue", "mail")
    assert read("list", "--queue", "mail") == {"executions": [], "has_more": False, "is_cut": True}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("list", "--job", "acc.mrk"), "did you mean 'acc.mark'?"),
        (("list", "--job", "old.gon"), "did you mean 'old.gone'?"),
        (("list", "--since", "soon"), "2026-03-01T12:00"),
        (("list", "--since", "3 fortnights"), "expected seconds"),
        (("list", "--since", "2026-02-30"), "expected a length of time"),
        (("list", "--since", "99999999d"), "outside the years"),
        (("list", "--jobs", "--queue", "mail"), "no filter of executions"),
        (("show", "7"), "'7' is not the id of an execution"),
        (("show", "018f0000-0000-7000-8000-000000000000"), "There is no execution 018f0000"),
        (("push", "acc.mrk"), "did you mean 'acc.mark'?"),
        (("push", "acc.mark", "--payload", "{"), "cannot be read as JSON"),
        (("push", "acc.mark", "--payload", "[" * 100_000), "cannot be read as JSON"),
        (("push", "acc.mark", "--payload", "[1]"), "expected an object"),
        (("push", "acc.mark", "--payload", '{"no": 1}'), "payload.no: the handler has no such parameter"),
        (("push", "acc.mark", "--priority", "urgent"), "priority='urgent'"),
        (("push", "acc.mark", "--delay", "later"), "--delay is 'later'"),
        (("push", "shop.nightly"), "manage.py jobs trigger shop.nightly"),
        (("trigger", "acc.mark"), "manage.py jobs push acc.mark"),
        (("cancel",), "either ids or filters"),
        (("cancel", "7", "--job", "acc.mark"), "either ids or filters"),
        (("retry", "7"), "'7' is not the id of an execution"),
        (("retry", "--job", "acc.mark"), "Add --yes"),
        (("pause",), "--queue"),
        (("pause", "acc.mrk"), "did you mean 'acc.mark'?"),
        (("resume", "--queue", "no queue"), "queue='no queue'"),
        (("purge",), "--unregistered"),
        (("tail", "--limit", "-1"), "from 0 to 1000000"),
        (("tail", "--limit", "1" + 30 * "0"), "from 0 to 1000000"),
        (("list", "--limit", "1" + 30 * "0"), "from 1 to 1000000"),
        (("list", "--since", "9999-12-31T23:59:59-12:00"), "outside the years"),
        (("list", "--since", "0001-01-01T00:00+14:00"), "outside the years"),
        # What Python makes of bytes on a command line that are no UTF-8.
        (("list", "--key", "\udcff"), "contains NUL or bytes"),
        (("list", "--key", "k", "--organization", "\udcff"), "contains NUL or bytes"),
        (("list", "--queue", "\udcff"), "contains NUL or bytes"),
        (("list", "--organization", "\udcff"), "contains NUL or bytes"),
        (("list", "--job", "\udcff"), "No job is called"),
        (("pause", "\udcff"), "No job is called"),
        (("resume", "\udcff"), "No job is called"),
        (("push", "acc.mark", "--priority=--3"), "priority='--3'"),
        (("push", "acc.mark", "--priority", "9" * 5000), "priority='999"),
    ],
)
def test_a_mistake_is_one_line_with_the_mend_and_exit_code_2(own_jobs: None, args: tuple[str, ...], said: str) -> None:
    JobExecutionFactory(job_name="old.gone", failed=True)
    JobExecutionFactory(failed=True)
    assert said in refused(2, *args)


def test_the_beginning_of_one_id_shows_that_execution() -> None:
    row = JobExecutionFactory()
    assert read("show", str(row.pk)[:13])["id"] == str(row.pk)
    assert str(row.pk) in jobs("show", row.pk.hex[:8].upper())
    assert "none begins with it" in refused(2, "show", "ffffff")
    # Too short to mean one.
    assert "at least its first 6 digits" in refused(2, "show", str(row.pk)[:5])


def test_the_beginning_of_several_ids_names_the_newest_of_them() -> None:
    rows = [JobExecutionFactory(id=f"018f0000-0000-7000-8000-00000000000{n}") for n in range(7)]
    said = refused(2, "show", "018f0000-0000")
    assert said.startswith("'018f0000-0000' is the beginning of several ids")
    assert [str(row) in said for row in rows] == [False] * 2 + [True] * 5
    assert said.endswith(", …")


@pytest.mark.parametrize("verb", ["cancel", "retry"])
def test_what_is_moved_is_named_by_its_whole_id(verb: str) -> None:
    row = JobExecutionFactory(failed=verb == "retry")
    before = row.status
    assert f"is not a whole id; these begin with it: {row}" in refused(2, verb, str(row.pk)[:13])
    assert status(row) == before


def test_everything_about_an_execution_is_shown() -> None:
    row = JobExecutionFactory(
        failed=True, payload={"tag": "x"}, key="order-1", logs=[{"level": "INFO", "message": "half\x1b[2J\nway"}]
    )
    text = jobs("show", row.pk)
    for part in (str(row.pk), "error", "ValueError: boom", "order-1", '"tag": "x"', "Traceback", "host.test pid"):
        assert part in text
    # What a terminal would obey is none of it.
    assert "\x1b" not in text
    found = read("show", row.pk)
    assert (found["payload"], found["errors"], found["logs"]) == (row.payload, row.errors, row.logs)
    assert found["worker"].startswith("host.test pid ")


def test_what_a_sensitive_job_works_with_is_hidden(own_jobs: None) -> None:
    given = {"payload": {"token": "hunter2"}, "result": "hunter2", "logs": [{"message": "hunter2"}]}
    row = JobExecutionFactory(job_name="shop.secret", failed=True, error="hunter2", errors=[], **given)
    shown = [jobs("show", row.pk), jobs("show", row.pk, "--json"), jobs("tail"), jobs("tail", "--json")]
    assert "hidden" in shown[0]
    assert json.loads(shown[1])["is_masked"] is True
    assert all('"token"' not in text and '"hunter2"]' not in text for text in shown)
    assert "hunter2" not in shown[2] + shown[3]


def test_jobs_are_listed_with_mode_next_run_pause_and_counts(own_jobs: None) -> None:
    JobStateFactory(job_name="shop.receipt", paused=True)
    JobExecutionFactory(job_name="shop.receipt", ok=True)
    JobExecutionFactory(job_name="old.gone", parked=True, parked_reason="unknown")
    text = jobs("list", "--jobs")
    (line,) = [line for line in text.splitlines() if line.startswith("shop.nightly")]
    assert "cron 0 3 * * * Europe/Paris" in line
    (line,) = [line for line in text.splitlines() if line.startswith("shop.receipt")]
    assert "1 ok" in line
    assert "by a person" in line
    assert "No worker knows a job called 'old.gone': 1 parked." in text
    before = clock.now("default").isoformat()
    found = read("list", "--jobs")
    by_name = {each["name"]: each for each in found["jobs"]}
    assert by_name["shop.nightly"]["cron"] == "0 3 * * *"
    assert by_name["shop.nightly"]["next_run_at"] > before
    assert by_name["shop.receipt"]["paused_by"] == "a person"
    assert by_name["shop.receipt"]["executions"] == {"ok": {"count": 1, "has_more": False}}
    assert found["unregistered"] == {"old.gone": {"count": 1, "has_more": False}}


def test_queues_are_listed_with_what_waits_and_their_pause(own_jobs: None) -> None:
    QueueStateFactory(queue="mail", paused=True)
    JobExecutionFactory(queue="bulk")
    found = {each["name"]: each for each in read("list", "--queues")["queues"]}
    assert found["bulk"]["pending"]["count"] == 1
    assert found["mail"]["paused_by"] == "a person"
    assert "mail" in jobs("list", "--queues")


def test_a_push_checks_its_payload_as_stored_json_and_says_who(own_jobs: None) -> None:
    options = ("--key", "order-7", "--delay", "5min", "--queue", "bulk", "--priority", "high", "--by", "ops")
    found = read("push", "shop.receipt", "--payload", '{"order_id": 7, "at": "PT5S"}', *options)
    row = JobExecution.objects.get(pk=found["id"])
    assert row.payload == {"order_id": 7, "at": "PT5S"}
    assert (row.key, row.queue, row.priority, row.triggered_by_name) == ("order-7", "bulk", 50, "ops")
    assert row.status == Status.SCHEDULED
    assert abs(row.scheduled_at - row.created_at - timedelta(minutes=5)) < timedelta(seconds=1)
    said = refused(1, "push", "shop.receipt", "--payload", '{"order_id": 7}', "--key", "order-7")
    assert f"{row} has the key 'order-7' and is scheduled" in said


def test_a_payload_can_come_from_the_input(own_jobs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"token": "not in the list of processes"}'))
    assert "was pushed" in jobs("push", "shop.secret", "--payload", "-")
    row = JobExecution.objects.get()
    assert row.payload == {"token": "not in the list of processes"}
    assert row.triggered_by_name.startswith("command line (")


def test_a_cron_job_is_triggered_once_while_it_lives(own_jobs: None) -> None:
    row = JobExecution.objects.get(pk=read("trigger", "shop.nightly", "--by", "ops")["id"])
    assert (row.status, row.triggered_by_name) == (Status.PENDING, "ops")
    assert str(row) in refused(1, "trigger", "shop.nightly")


def test_executions_are_cancelled_by_id_and_those_that_were_not_are_named() -> None:
    waiting, running, done = JobExecutionFactory(), JobExecutionFactory(running=True), JobExecutionFactory(ok=True)
    err, ids = io.StringIO(), [waiting.pk, running.pk, done.pk, uuid7()]
    with pytest.raises(CommandError, match=r"2 cancelled .*, 2 skipped") as caught:
        call_command("jobs", "cancel", *map(str, ids), "--by", "ops", stderr=err)
    assert caught.value.returncode == 1
    assert f"{done} cannot be cancelled: it is already ok." in err.getvalue()
    assert f"There is no execution {ids[3]}" in err.getvalue()
    assert (status(waiting), waiting.cancelled_by_name) == (Status.CANCELLED, "ops")
    assert status(running) == Status.RUNNING
    assert running.is_cancelling


def test_executions_are_retried_by_filter_page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "PAGE", 2)
    rows = [JobExecutionFactory(failed=True) for _ in range(5)]
    others = [JobExecutionFactory(cancelled=True), JobExecutionFactory(failed=True, queue="mail")]
    JobExecutionFactory(failed=True, key="k")
    JobExecutionFactory(key="k")
    found = read("retry", "--job", "acc.mark", "--queue", "default", "--yes", "--by", "ops")
    assert (found["done"], found["skipped"]) == (5, 1)
    assert "its key 'k' is held by" in next(iter(found["reasons"]))
    assert {status(row) for row in rows} == {Status.PENDING}
    assert {row.retried_by_name for row in rows} == {"ops"}
    assert [status(row) for row in others] == [Status.CANCELLED, Status.ERROR]
    assert "0 queued again, 1 skipped" in refused(1, "retry", "--status=error", "--queue", "default", "--yes")


def test_on_a_terminal_it_asks_before_it_does_something_to_many(monkeypatch: pytest.MonkeyPatch) -> None:
    row = JobExecutionFactory()
    screen = Screen("no\n")
    monkeypatch.setattr(sys, "stdin", screen)
    assert "Nothing was done." in refused(1, "cancel", "--job", "acc.mark")
    assert status(row) == Status.PENDING
    monkeypatch.setattr(sys, "stdin", Screen("y\n"))
    assert "1 cancelled" in jobs("cancel", "--job", "acc.mark")
    assert status(row) == Status.CANCELLED


@pytest.mark.django_db(transaction=True)
def test_nothing_runs_in_the_process_of_the_command_in_direct_mode(settings: Any) -> None:
    # Another case may have left a direct one that runs: asked for by other settings, it is closed.
    get_dispatcher()
    settings.DJANGO_JOBS = {**settings.DJANGO_JOBS, "DISPATCHER": "direct"}
    dispatcher = get_dispatcher()
    assert isinstance(dispatcher, DirectDispatcher)
    row = JobExecutionFactory(failed=True)
    jobs("retry", row.pk)
    jobs("push", "acc.mark")
    assert dispatcher._here()._runner is None
    assert set(JobExecution.objects.values_list("status", flat=True)) == {Status.PENDING}


def test_jobs_and_queues_are_paused_and_resumed(own_jobs: None) -> None:
    assert jobs("pause", "shop.receipt", "--by", "ops") == "shop.receipt is paused.\n"
    assert JobState.objects.get().paused_by_name == "ops"
    assert "was already paused" in refused(1, "pause", "shop.receipt")
    assert read("resume", "shop.receipt")["changed"] is True
    assert "was not paused" in refused(1, "resume", "shop.receipt")
    assert jobs("pause", "--queue", "mail") == "The queue mail is paused.\n"
    assert QueueState.objects.get().paused_at is not None
    assert jobs("resume", "--queue", "mail") == "The queue mail was resumed.\n"
    # Whoever pushes may choose any queue, but this is more likely a slip.
    text = jobs("pause", "--queue", "mial")
    assert text.startswith("The queue mial is paused; no job here declares it (declared: ")
    assert "mail" in text


def test_a_push_to_what_is_paused_says_that_it_waits(own_jobs: None) -> None:
    payload = ("--payload", '{"order_id": 7}')
    jobs("pause", "shop.nightly")
    jobs("pause", "--queue", "mail")
    assert "; the job is paused and waits for a resume.\n" in jobs("trigger", "shop.nightly")
    assert "; its queue is paused and waits for a resume.\n" in jobs("push", "shop.receipt", *payload)
    assert "paused" not in jobs("push", "shop.receipt", *payload, "--queue", "default")


def test_what_is_left_of_unknown_jobs_is_purged_with_counts() -> None:
    for kind in ("ok", "parked", "pending"):
        JobExecutionFactory(job_name="old.gone", **{kind: True})
    kept = JobExecutionFactory(ok=True)
    WorkerFactory()
    assert "Add --yes" in refused(2, "purge", "--unregistered")
    text = jobs("purge", "--unregistered", "--yes")
    assert ["old.gone", "1", "1", "1"] in [line.split() for line in text.splitlines()]
    assert "2 deleted, 1 that are waiting or running were left alone" in text
    assert JobExecution.objects.filter(pk=kept.pk).exists()
    assert "Nothing was purged, 1 that are waiting or running" in refused(1, "purge", "--unregistered", "--yes")


def test_nothing_to_purge_is_no_failure() -> None:
    JobExecutionFactory(ok=True)
    assert jobs("purge", "--unregistered", "--yes") == "Nothing to purge.\n"
    assert read("purge", "--unregistered")["deleted"] == 0


def test_the_last_ends_are_shown_oldest_first() -> None:
    now = clock.now("default")
    rows = [JobExecutionFactory(failed=n == 2, ok=n != 2, now=now - timedelta(minutes=9 - n)) for n in range(4)]
    lines = jobs("tail", "--limit", 3).splitlines()
    assert [str(row.pk) in line for row, line in zip(rows[1:], lines, strict=True)] == [True] * 3
    assert "ValueError: boom" in lines[1]
    found = [json.loads(line) for line in jobs("tail", "--job", "acc.mark", "--json").splitlines()]
    assert [each["id"] for each in found] == [str(row.pk) for row in rows]


@pytest.mark.medium
def test_each_end_is_told_once_also_when_it_is_committed_late_or_there_are_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tail, "PAGE", 2)
    ends = tail.Ends(None, using="default")
    assert ends.last(10) == []
    now = clock.now("default") + timedelta(seconds=1)
    same = [JobExecutionFactory(ok=True, now=now) for _ in range(5)]
    assert {row.pk for row in ends.new()} == {row.pk for row in same}
    late = JobExecutionFactory(failed=True, now=now - timedelta(milliseconds=500))
    assert [row.pk for row in ends.new()] == [late.pk]
    assert ends.new() == []
    # One that is retried and ends again.
    JobExecution.objects.filter(pk=late.pk).update(completed_at=now + timedelta(milliseconds=1))
    assert [row.pk for row in ends.new()] == [late.pk]


def test_ctrl_c_ends_a_tail_well() -> None:
    out, rounds = io.StringIO(), []

    def wait(_seconds: float) -> None:
        rounds.append(JobExecutionFactory(ok=True, now=clock.now("default") + timedelta(milliseconds=1)))
        if len(rounds) == 3:
            raise KeyboardInterrupt

    tail.tail(
        Terminal(OutputWrapper(out), OutputWrapper(io.StringIO()), ask=sys.stdin),
        "acc.mark",
        limit=0,
        follow=True,
        wait=wait,
    )
    assert [str(row.pk) in line for row, line in zip(rounds, out.getvalue().splitlines(), strict=False)] == [True] * 2


def test_a_table_fits_into_the_terminal_and_wide_letters_stay_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    screen = Screen()

    terminal = Terminal(OutputWrapper(screen), OutputWrapper(screen), ask=sys.stdin)
    terminal.table(("A", "B", "C"), [("字字", "", "x" * 40), ("ab", "", "y\n\x07")])
    assert screen.getvalue().splitlines() == ["A     C", f"字字  {'x' * 13}…", "ab    y \N{REPLACEMENT CHARACTER}"]


def test_progress_is_shown_on_a_terminal_only_and_taken_away() -> None:
    for screen, shown in ((Screen(), "\r1 done\r      \r"), (io.StringIO(), "")):
        terminal = Terminal(OutputWrapper(io.StringIO()), OutputWrapper(screen), ask=sys.stdin)
        terminal.progress("1 done")
        terminal.end_progress()
        assert screen.getvalue() == shown


def test_what_was_done_until_ctrl_c_stays_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [JobExecutionFactory() for _ in range(2)]

    def pages(*args: Any) -> Iterator[list[JobExecution]]:
        yield [rows[0]]
        raise KeyboardInterrupt

    monkeypatch.setattr(many, "pages", pages)
    screen = Screen()
    with pytest.raises(SystemExit) as end:
        call_command("jobs", "cancel", "--job", "acc.mark", "--yes", stdout=io.StringIO(), stderr=screen)
    assert (end.value.code, list(map(status, rows))) == (130, [Status.CANCELLED, Status.PENDING])
    assert screen.getvalue() == "\r1 cancelled, 0 skipped\n"


def test_a_database_that_fails_is_exit_code_3(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OperationalError("server closed the connection\nunexpectedly")

    monkeypatch.setattr("django_jobs.cli.listing.newest", fail)
    assert "failed: server closed the connection unexpectedly" in refused(3, "list")


def test_a_date_without_a_zone_is_in_the_projects() -> None:
    now = clock.now("default")
    assert moment("2026-03-01", now=now).isoformat() == "2026-03-01T00:00:00+00:00"
    assert moment("2026-03-01T12:00+02:00", now=now).isoformat() == "2026-03-01T12:00:00+02:00"
    assert moment("90", now=now) == now - timedelta(seconds=90)
    with pytest.raises(UsageError):
        moment("", now=now)
    assert Filters().is_empty


def test_the_page_about_it_tells_its_exit_codes_and_commands() -> None:
    page = (ROOT / "docs/reference/jobs.md").read_text()
    told = re.findall(r"^- (\d+):", command.__doc__ or "", re.MULTILINE)
    assert re.findall(r"^\| `(\d+)` \|", page, re.MULTILINE) == told
    parser = command.Command().create_parser("manage.py", "jobs")
    (choices,) = [action.choices for action in parser._actions if action.dest == "command"]
    assert set(re.findall(r"^\| `([a-z]+)", page, re.MULTILINE)) == set(choices)
    for made in choices.values():
        shown = [each for each in made._actions if each.help != SUPPRESS and each.option_strings]
        assert {max(each.option_strings, key=len) for each in shown} - {"--help"} <= set(re.findall(r"--[a-z]+", page))
