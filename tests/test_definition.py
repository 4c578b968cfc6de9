from __future__ import annotations

import asyncio
import datetime as dt
import functools
import inspect
import pickle
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from django.contrib.auth.models import AnonymousUser, User
from django.template import Context, Engine

import django_jobs
from django_jobs import (
    DefinitionError,
    InvalidPayload,
    Job,
    JobContext,
    Keep,
    Retry,
    Status,
    current_context,
    job,
    registry,
    services,
)
from django_jobs.definition import Item
from django_jobs.options import PushOptions, attribution
from django_jobs.schedules import Cron

NOW = dt.datetime(2027, 6, 1, 12, tzinfo=UTC)
EARLIEST, LATEST = dt.datetime.min, dt.datetime.max  # noqa: DTZ901


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with registry.isolated(empty=True):
        yield


def receipt(ctx: JobContext, order_id: int, locale: str = "en") -> tuple[JobContext, int, str]:
    """Email the receipt of one paid order.

    More about it.
    """
    return ctx, order_id, locale


def nothing() -> None: ...


async def later(ctx: JobContext, x: int) -> tuple[JobContext, int, Any]:
    return ctx, x, current_context()


def make(**options: Any) -> Job[...]:
    return job(**{"name": "shop.nothing", **options})(nothing)


@pytest.fixture
def send() -> Job[...]:
    return job(name="shop.send_receipt")(receipt)


def test_a_bare_decorator_registers_with_every_default() -> None:
    made = job(receipt)
    assert registry.get(made.name) is made
    assert (made.kind, made.queue, made.priority, made.overlap, made.misfire) == (
        "push",
        "default",
        0,
        "skip",
        "latest",
    )
    assert (made.retry, made.timeout, made.record, made.concurrency, made.cron) == (None,) * 5
    assert (made.interrupt, made.atomic, made.sensitive, made.is_async, made.takes_context) == (
        True, False, False, False, True,
    )  # fmt: skip


def test_a_job_wears_the_name_and_documentation_of_its_handler(send: Job[...]) -> None:
    assert (send.__name__, send.__module__, send.__doc__) == ("receipt", __name__, receipt.__doc__)  # type: ignore[attr-defined]
    assert inspect.unwrap(send) is receipt
    assert inspect.signature(send) == inspect.signature(receipt)
    assert repr(send) == "<Job shop.send_receipt>"


def test_the_description_is_the_first_line_of_the_docstring_or_what_is_given(send: Job[...]) -> None:
    assert send.description == "Email the receipt of one paid order."
    assert make(description="Nothing at all").description == "Nothing at all"


def test_jobs_are_equal_by_name_and_hashable(send: Job[...]) -> None:
    copy = send.using(priority="high")
    assert copy == send
    assert len({copy, send}) == 1
    assert copy.base is send.base is send
    assert send != "shop.send_receipt"


def test_a_job_is_frozen(send: Job[...]) -> None:
    with pytest.raises(AttributeError):
        send.priority = 5  # type: ignore[misc]


def test_a_job_is_not_pickled(send: Job[...]) -> None:
    with pytest.raises(TypeError, match="cannot be pickled; send its name"):
        pickle.dumps(send)


def test_a_direct_call_runs_the_handler_with_a_context(send: Job[...]) -> None:
    ctx, order_id, locale = send(7, locale="de")
    assert (order_id, locale) == (7, "de")
    assert (ctx.job_name, ctx.attempt, ctx.execution_id) == ("shop.send_receipt", 1, None)
    assert ctx.payload == {"order_id": 7, "locale": "de"}
    assert current_context() is None


def test_a_direct_call_takes_the_context_it_is_given(send: Job[...]) -> None:
    own = JobContext.detached("mine", {})
    assert send(own, order_id=7)[0] is own


def test_a_template_that_shows_a_job_runs_and_pushes_nothing() -> None:
    """Templates call what can be called: a job in a context is shown, not run."""
    ran: list[int] = []

    @job(name="shop.shown")
    def shown() -> None:
        ran.append(1)

    template = Engine().from_string("{{ job.name }}|{{ job }}|{{ job.push }}|{{ job.apush }}|{{ job.trigger }}")
    assert template.render(Context({"job": shown})) == "shop.shown|&lt;Job shop.shown&gt;|||"
    assert ran == []


def test_a_direct_call_of_an_async_handler_is_awaited() -> None:
    made = job(name="shop.later")(later)
    assert made.is_async
    ctx, x, seen = asyncio.run(made(x=5))
    assert (ctx.job_name, x, seen) == ("shop.later", 5, ctx)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lock": False}, r'lock= is not an option; write overlap="skip"'),
        ({"prioritty": 1}, r"prioritty= is not an option of @job; did you mean priority=\?"),
        ({"zzz": 1}, "zzz= is not an option of @job; expected any of name"),
        ({"priority": 101}, "priority=101; expected a whole number from -100 to 100"),
        ({"priority": True}, "priority=True"),
        ({"priority": "urgent"}, "priority='urgent'; .*low, normal, high, critical"),
        ({"priority": 1.0}, "priority=1.0"),
        ({"retry": "3"}, "retries is '3'"),
        ({"retry": -1}, "retries is -1"),
        ({"retry": True}, "retries is True"),
        ({"timeout": "60"}, "timeout is '60'"),
        ({"timeout": -1}, "timeout is -1"),
        ({"timeout": float("nan")}, "timeout is nan"),
        ({"concurrency": 0}, "concurrency is 0"),
        ({"concurrency": "2"}, "concurrency is '2'"),
        ({"record": "errors"}, "record='errors'; expected 'all' or 'error' or 'none'"),
        ({"keep": {"ok": 1}}, "keep=.*expected Keep"),
        ({"interrupt": None}, "interrupt=None; expected True or False"),
        ({"atomic": 1}, "atomic=1"),
        ({"sensitive": "yes"}, "sensitive='yes'"),
        ({"use": "shop.middleware"}, "use='shop.middleware'; expected a list"),
        ({"use": [5]}, "use="),
        ({"queue": ""}, "queue=''"),
        ({"queue": "a b"}, "queue='a b'"),
        ({"queue": "x" * 101}, r"queue=.*\(103 characters\)"),
        ({"aliases": "old"}, "aliases='old'; expected a list"),
        ({"aliases": ["no good"]}, "alias='no good'"),
        ({"description": 5}, "description=5"),
        ({"description": "\ud800"}, "description='.ud800'; expected text without NUL characters and lone surrogates"),
        ({"cron": "0 0 31 2 *"}, r"cron='0 0 31 2 \*' never occurs"),
        ({"cron": "0 0 * * *", "timezone": "Mars"}, "timezone='Mars' is not known"),
        ({"cron": "0 0 * * *", "misfire": "never"}, "misfire='never'"),
        ({"cron": "0 0 * * *", "misfire_grace": -1}, "misfire_grace is -1"),
        ({"cron": "0 0 * * *", "overlap": True}, "overlap=True; expected 'skip' or 'allow'"),
        ({"timezone": "UTC"}, "timezone= is for cron jobs"),
        ({"overlap": "allow"}, "overlap= is for cron jobs"),
    ],
)
def test_a_wrong_option_is_refused_naming_job_value_and_mend(options: dict[str, Any], message: str) -> None:
    """Out-of-range and mistyped options were accepted in silence (Koed00/django-q#509, taichino/croniter#122)."""
    with pytest.raises(DefinitionError, match=f"^shop.nothing: {message}") as caught:
        make(**options)
    assert isinstance(caught.value, ValueError)
    assert registry.all_jobs() == []


@pytest.mark.parametrize("name", ["", "x" * 201, "a b", "é.x", ".x", "a\n", 5, "x\x00"])
def test_a_name_that_some_column_or_collation_would_change_is_refused(name: Any) -> None:
    """Over-long names passed on SQLite and failed elsewhere (Koed00/django-q#489)."""
    with pytest.raises(DefinitionError, match="name="):
        job(name=name)(nothing)


def test_a_name_of_200_characters_is_accepted() -> None:
    assert make(name="x" * 200).name == "x" * 200


class Callable:
    def method(self, x: int) -> None: ...

    def __call__(self, x: int) -> None: ...


def generator() -> Iterator[int]:
    yield 1


async def agenerator() -> Any:
    yield 1


@pytest.mark.parametrize(
    ("func", "message"),
    [
        ("name", "decorates a plain function"),
        (Callable, "decorates a plain function"),
        (Callable(), "decorates a plain function"),
        (functools.partial(nothing), "decorates a plain function"),
        (len, "decorates a plain function"),
        (Callable.method, "a method cannot be a handler"),
        (generator, "a generator cannot be a handler"),
        (agenerator, "a generator cannot be a handler"),
    ],
)
def test_what_is_no_plain_function_is_refused(func: Any, message: str) -> None:
    with pytest.raises(DefinitionError, match=message):
        job(name="shop.x")(func)


def test_a_lambda_needs_a_name() -> None:
    with pytest.raises(DefinitionError, match="a lambda has no name for its rows"):
        job(lambda: None)
    assert job(name="shop.small")(lambda: None).name == "shop.small"


def test_a_job_is_not_decorated_twice(send: Job[...]) -> None:
    with pytest.raises(DefinitionError, match="already a job"):
        job(send)


def test_a_wrapped_function_keeps_the_signature_of_what_it_wraps() -> None:
    @functools.wraps(receipt)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return receipt(*args, **kwargs)

    made = job(name="shop.wrapped")(wrapper)
    assert made.takes_context
    assert made.schema.parameters == ("order_id", "locale")


def test_annotations_may_name_classes_of_the_function_around() -> None:
    @dataclass
    class Point:
        x: int

    @job(name="shop.local")
    def local(point: Point) -> None: ...

    assert local.schema.rebuild(local.schema.dump((Point(1),), {})) == {"point": Point(1)}


def test_a_context_that_is_imported_for_type_checking_only_is_known() -> None:
    scope: dict[str, Any] = {"__name__": "shop.jobs", "job": job}
    exec("from __future__ import annotations\n@job\ndef work(ctx: JobContext, x: int) -> None: ...", scope)
    assert scope["work"].takes_context


def test_a_cron_job_with_parameters_is_told_to_split() -> None:
    with pytest.raises(DefinitionError, match=r"shop\.both is a cron job, but its handler needs order_id\..*split it"):
        job(name="shop.both", cron="0 3 * * *")(receipt)


def test_a_cron_job_may_take_a_context() -> None:
    def purge(ctx: JobContext) -> None: ...

    made = job(
        name="shop.purge", cron=" 0 3 * * * ", timezone="Europe/Paris", overlap="allow", misfire_grace=timedelta(1)
    )(purge)
    assert made.cron == Cron("0 3 * * *", "Europe/Paris")
    assert (made.kind, made.overlap, made.misfire_grace) == ("cron", "allow", 86400)


def test_a_cron_job_is_triggered_and_a_pushed_one_pushed(send: Job[...]) -> None:
    cron = make(cron="0 3 * * *")
    for call in (cron.push, lambda: cron.push_many([{}]), cron.item):
        with pytest.raises(DefinitionError, match=r"shop\.nothing is a cron job.*trigger\(\)"):
            call()
    with pytest.raises(DefinitionError, match="trigger"):
        send.trigger()


def test_atomic_is_refused_for_async_handlers() -> None:
    with pytest.raises(DefinitionError, match=r"shop\.later: atomic=True needs a plain function"):
        job(name="shop.later", atomic=True)(later)


@pytest.mark.parametrize(
    ("word", "number"), [("low", -50), ("normal", 0), ("high", 50), ("critical", 100), (-100, -100), (7, 7)]
)
def test_priorities_are_words_or_numbers_of_one_scale(word: Any, number: int) -> None:
    made = make(priority=word)
    assert made.priority == number
    assert made.using(priority=word).options.priority == number


def test_retries_are_inherited_unless_given(settings: Any) -> None:
    plain, none, five = make(), make(name="b", retry=0), make(name="c", retry=5)
    assert (plain.retries, plain.has_retry, plain.max_attempts, plain.effective_retry) == (0, False, 1, None)
    settings.DJANGO_JOBS = {"DEFAULT_RETRY": 2}
    assert (plain.retries, plain.has_retry, plain.max_attempts) == (2, True, 3)
    assert (none.retries, none.has_retry, none.max_attempts) == (0, False, 1)
    assert five.effective_retry == Retry(5)


def test_the_timeout_is_inherited_and_zero_is_no_limit(settings: Any) -> None:
    plain, none, short = make(), make(name="b", timeout=0), make(name="c", timeout=timedelta(milliseconds=250))
    assert plain.effective_timeout is None
    settings.DJANGO_JOBS = {"TIMEOUT": 60}
    assert (plain.effective_timeout, none.effective_timeout, short.effective_timeout) == (60, None, 0.25)


def test_keep_inherits_field_by_field(settings: Any) -> None:
    settings.DJANGO_JOBS = {"KEEP": {"ok": 7, "error": None, "max_age": timedelta(days=1)}}
    made = make(keep=Keep(error=3, cancelled=None))
    assert made.effective_max_age == 86400
    assert [made.retention(status) for status in (Status.OK, "error", Status.CANCELLED)] == [7, 3, None]


@pytest.mark.parametrize(
    ("options", "setting", "kept"),
    [
        ({}, "all", (10, 1000, 1000)),
        ({}, "error", (0, 1000, 1000)),
        ({}, "none", (0, 0, 0)),
        ({"record": "error"}, "all", (0, 1000, 1000)),
        ({"record": "all"}, "none", (10, 1000, 1000)),
        ({"record": "none", "keep": Keep(ok=5)}, "all", (0, 0, 0)),
        ({"cron": "0 0 * * *"}, "error", (1, 1000, 1000)),
        ({"cron": "0 0 * * *", "record": "error"}, "error", (0, 1000, 1000)),
        ({"cron": "0 0 * * *"}, "none", (0, 0, 0)),
        ({"cron": "0 0 * * *", "keep": Keep(ok=0)}, "error", (0, 1000, 1000)),
    ],
)
def test_record_and_keep_fold_into_one_number_for_each_status(
    options: dict[str, Any], setting: str, kept: tuple[int, ...], settings: Any
) -> None:
    settings.DJANGO_JOBS = {"RECORD": setting}
    made = make(**options)
    assert tuple(made.retention(status) for status in (Status.OK, Status.ERROR, Status.CANCELLED)) == kept


@pytest.mark.parametrize(
    "wrong", [{"ok": -1}, {"ok": 10**30}, {"error": True}, {"cancelled": "5"}, {"max_age": -1}, {"max_age": "1d"}]
)
def test_a_wrong_keep_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(DefinitionError, match=f"Keep.{next(iter(wrong))}="):
        Keep(**wrong)


def outer(call: Any) -> Any:
    return lambda *args, **kwargs: ["outer", *call(*args, **kwargs)]


def inner(call: Any) -> Any:
    return lambda *args, **kwargs: ["inner", *call(*args, **kwargs)]


def test_middleware_of_the_settings_comes_before_that_of_the_job(settings: Any) -> None:
    made = make(use=[inner])
    assert made.middleware == (inner,)
    settings.DJANGO_JOBS = {"MIDDLEWARE": [f"{__name__}.outer"]}
    assert made.middleware == (outer, inner)
    assert made.middleware is made.middleware


def test_using_returns_a_copy_and_adds_up(send: Job[...]) -> None:
    first = send.using(key="k", delay=timedelta(minutes=1), queue="mail")
    second = first.using(priority="high", delay=None)
    assert send.options == PushOptions()
    assert first.options == PushOptions(key="k", delay=60, queue="mail")
    assert second.options == PushOptions(key="k", queue="mail", priority=50)


@pytest.mark.parametrize(
    ("delay", "seconds"), [(5, 5), (1.5, 1.5), (timedelta(hours=1), 3600), (0, 0), (-1, 0), (timedelta(-1), 0)]
)
def test_a_delay_is_seconds_or_a_timedelta_and_negative_is_at_once(send: Job[...], delay: Any, seconds: float) -> None:
    options = send.using(delay=delay).options
    assert options.delay == seconds
    assert options.due(NOW) == (NOW + timedelta(seconds=seconds) if seconds else None)


@pytest.mark.parametrize(
    "delay",
    ["5", True, dt.date(2027, 1, 1), NOW, timedelta.max, float("nan"), float("inf"), float("-inf"), 10**400, b"5"],
)
def test_a_delay_of_another_type_or_size_is_refused(send: Job[...], delay: Any) -> None:
    """The run-later option was taken for an argument, or overflowed (RealOrangeOne/django-tasks#118)."""
    with pytest.raises(DefinitionError, match=r"^shop\.send_receipt: delay"):
        send.using(delay=delay)


@pytest.mark.parametrize("use_tz", [True, False])
def test_a_naive_datetime_is_read_in_the_current_time_zone(send: Job[...], use_tz: bool, settings: Any) -> None:
    settings.USE_TZ = use_tz
    settings.TIME_ZONE = "Europe/Paris"
    options = send.using(scheduled_at=dt.datetime(2027, 7, 1, 12)).options  # noqa: DTZ001
    assert options.scheduled_at == dt.datetime(2027, 7, 1, 10, tzinfo=UTC)


def test_an_aware_datetime_is_stored_in_utc_and_wins_over_delay(send: Job[...]) -> None:
    when = dt.datetime(2027, 7, 1, 12, tzinfo=ZoneInfo("Asia/Kolkata"))
    options = send.using(delay=5, scheduled_at=when).options
    assert options.scheduled_at is not None
    assert options.scheduled_at.tzinfo is UTC
    assert options.due(NOW) == when


@pytest.mark.parametrize("when", [NOW, NOW - timedelta(1), EARLIEST, EARLIEST.replace(tzinfo=ZoneInfo("Asia/Tokyo"))])
def test_a_past_instant_is_due_at_once(send: Job[...], when: dt.datetime) -> None:
    assert send.using(scheduled_at=when).options.due(NOW) is None


@pytest.mark.parametrize(
    "when",
    [
        dt.date(2027, 1, 1),
        "2027-01-01",
        5,
        LATEST,
        LATEST.replace(tzinfo=ZoneInfo("America/New_York")),
    ],
)
def test_an_instant_of_another_type_or_beyond_the_calendar_is_refused(send: Job[...], when: Any) -> None:
    """A date, a text or the year 9999 overflowed on some database (RealOrangeOne/django-tasks#118)."""
    with pytest.raises(DefinitionError, match="scheduled_at="):
        send.using(scheduled_at=when)


@pytest.mark.parametrize("key", ["k", "x" * 255, "💥" * 255, " ", "é"])
def test_a_key_is_any_text_up_to_255_characters(send: Job[...], key: str) -> None:
    assert send.using(key=key).options.key == key


@pytest.mark.parametrize("key", ["", "x" * 256, "x" * 1000, "💥" * 300, "a\x00", "a\ud800", 5, b"k"])
def test_a_key_that_some_engine_would_cut_or_refuse_is_refused(send: Job[...], key: Any) -> None:
    """Over-long keys passed on SQLite and raised on other databases (Koed00/django-q#489, #719)."""
    with pytest.raises(DefinitionError, match=r"shop\.send_receipt: key="):
        send.using(key=key)


@pytest.mark.parametrize(
    ("tenant", "stored"),
    [("acme", "acme"), (5, "5"), (uuid.UUID(int=1), str(uuid.UUID(int=1))), ("", None), (None, None)],
)
def test_a_tenant_is_stored_as_text(send: Job[...], tenant: Any, stored: str | None) -> None:
    assert send.using(organization_id=tenant).options.organization_id == stored


@pytest.mark.parametrize("tenant", ["x" * 65, True, 1.5, "a\x00", 10**70])
def test_a_tenant_that_does_not_fit_is_refused(send: Job[...], tenant: Any) -> None:
    with pytest.raises(DefinitionError, match="organization_id="):
        send.using(organization_id=tenant)


@pytest.mark.parametrize(
    ("by", "stored"),
    [
        (User(pk=7, username="ada"), ("7", "ada")),
        (User(pk=7, username="u" * 300), ("7", "u" * 255)),
        (AnonymousUser(), ("", "")),
        ("nightly import", ("nightly import", "nightly import")),
        (None, ("", "")),
    ],
)
def test_who_pushes_is_stored_by_key_and_name(send: Job[...], by: Any, stored: tuple[str, str]) -> None:
    assert attribution(send.using(by=by).options.by) == stored


@pytest.mark.parametrize("by", [5, "x" * 256, "a\x00", object()])
def test_who_pushes_is_a_user_or_a_short_text(send: Job[...], by: Any) -> None:
    with pytest.raises(DefinitionError, match="by="):
        send.using(by=by)


@pytest.mark.parametrize("wrong", [{"priority": "urgent"}, {"queue": "no good"}, {"priority": True}])
def test_options_of_a_push_are_checked_like_those_of_the_job(send: Job[...], wrong: dict[str, Any]) -> None:
    with pytest.raises(DefinitionError, match=next(iter(wrong))):
        send.using(**wrong)


def test_an_item_takes_arguments_and_options_together(send: Job[...]) -> None:
    item = send.using(priority="low").item(order_id=2, key="order-2")
    assert item == Item(
        job=send, options=PushOptions(priority=-50, key="order-2"), payload_json='{"order_id":2,"locale":"en"}'
    )
    assert item.job is send


def test_in_an_item_a_parameter_named_like_an_option_belongs_to_the_handler() -> None:
    def keyed(key: int, delay: int) -> None: ...

    made = job(name="shop.keyed")(keyed)
    item = made.using(key="k").item(key=1, delay=2)
    assert (item.payload_json, item.options) == ('{"key":1,"delay":2}', PushOptions(key="k"))


def test_arguments_named_like_options_reach_the_payload_of_a_push(monkeypatch: pytest.MonkeyPatch) -> None:
    """An argument with the name of an internal one was dropped or overwritten (coleifer/huey 3.0.2)."""

    def echo(self: int, key: int, args: int, kwargs: int, options: int) -> None: ...

    made = job(name="shop.echo")(echo)
    monkeypatch.setattr(services, "push", lambda *args: args)
    given = {"self": 1, "key": 2, "args": 3, "kwargs": 4, "options": 5}
    pushed: Any = made.push(**given)
    assert pushed == (made, PushOptions(), '{"self":1,"key":2,"args":3,"kwargs":4,"options":5}')


def test_many_pushes_are_checked_before_the_first_is_written(send: Job[...], monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Any] = []
    monkeypatch.setattr(services, "push_many", written.append)
    with pytest.raises(InvalidPayload, match=r"item 1: shop\.send_receipt: payload\.order_id"):
        send.push_many([{"order_id": 1}, {"order_id": "x"}])
    assert written == []
    send.using(queue="mail").push_many([{"order_id": 1}, send.item(order_id=2)])
    assert [(item.payload_json[:14], item.options.queue) for item in written[0]] == [
        ('{"order_id":1,', "mail"),
        ('{"order_id":2,', None),
    ]


def test_an_item_of_another_job_is_refused(send: Job[...]) -> None:
    with pytest.raises(DefinitionError, match=r"item 0 is for shop\.nothing"):
        send.push_many([make().item()])
    with pytest.raises(InvalidPayload, match="item 0 is int"):
        send.push_many([5])  # type: ignore[list-item]


def test_everything_public_is_exported() -> None:
    assert sorted(django_jobs.__all__) == django_jobs.__all__
    for name in django_jobs.__all__:
        assert getattr(django_jobs, name) is not None


@pytest.mark.subprocess
def test_the_package_can_be_imported_and_used_without_settings() -> None:
    """Access to settings or database at import broke migrate and documentation builds (inventree/InvenTree#10806)."""
    code = """
import sys
from django_jobs import JobContext, Retry, job

@job(cron="0 3 * * *", retry=Retry(2))
def work(ctx: JobContext) -> None: ...

assert work.name == "__main__.work"
assert "django_jobs.models" not in sys.modules
"""
    subprocess.run(
        [sys.executable, "-W", "error", "-c", code], check=True, timeout=60, env={"PYTHONPATH": ":".join(sys.path)}
    )
