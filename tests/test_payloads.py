from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import json
import math
import sys
import uuid
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal
from zoneinfo import ZoneInfo

import pytest
from django.contrib.auth.models import User
from django.utils import translation
from django.utils.translation import gettext_lazy
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, SecretStr, model_serializer

from django_jobs import DefinitionError, InvalidPayload, JobContext, job, registry
from django_jobs.models import JobExecution
from django_jobs.payloads import Schema

PARIS = ZoneInfo("Europe/Paris")


class Color(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Point:
    x: int
    when: dt.datetime | None = None


class Size(enum.StrEnum):
    L = "L"


class Open(BaseModel, extra="allow"):
    """Takes anything."""


class Stamped(Open):
    @model_serializer
    def stamp(self) -> dict[str, Any]:
        return {"stamped": True}


class Line(BaseModel):
    start: Point
    label: str = Field(default="", alias="lineLabel")


def schema(func: Callable[..., Any]) -> Schema:
    return Schema("shop.sample", func)


def taking(annotation: Any) -> Schema:
    """The schema of a handler with a context and one parameter, `value`."""

    def handler(ctx: JobContext, value: Any) -> None: ...

    handler.__annotations__["value"] = annotation
    return schema(handler)


def through(annotation: Any, value: Any) -> Any:
    checked = taking(annotation)
    return checked.rebuild(checked.dump((), {"value": value}))["value"]


def receipt(ctx: JobContext, order_id: int, locale: str = "en") -> None: ...


def test_the_payload_is_what_was_validated_with_the_defaults() -> None:
    assert json.loads(schema(receipt).dump((), {"order_id": "42"})) == {"order_id": 42, "locale": "en"}


def test_the_handler_gets_the_arguments_back() -> None:
    checked = schema(receipt)
    assert checked.rebuild(checked.dump((7, "de"), {})) == {"order_id": 7, "locale": "de"}


def test_a_leading_context_is_no_part_of_the_payload() -> None:
    checked = schema(receipt)
    assert checked.takes_context
    assert checked.parameters == ("order_id", "locale")


def test_a_handler_without_parameters_has_the_empty_payload() -> None:
    def nothing() -> None: ...

    def context_only(ctx: JobContext) -> None: ...

    for func in (nothing, context_only):
        checked = schema(func)
        assert checked.parameters == ()
        assert checked.dump((), {}) == "{}"
        assert checked.rebuild("{}") == {}


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, "shop.sample: payload.order_id is missing"),
        ((), {"order_id": "x"}, r"payload.order_id: Input should be a valid integer.* \(got str\)"),
        ((), {"order_id": 1, "colour": 2}, r"payload.colour: the handler has no such parameter \(order_id, locale\)"),
        (
            (),
            {"order_id": 1, "key": "k"},
            r"no such parameter \(order_id, locale\); pass the options of a push to using",
        ),
        ((1, "de", 3), {}, r"3 positional arguments; it takes at most 2 \(order_id, locale\)"),
        ((1,), {"order_id": 1}, "payload.order_id is given twice"),
        ((1, 2, 3), {"order_id": 1}, "3 positional arguments"),
        ((), {"order_id": None}, "payload.order_id: Input should be a valid integer"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(args: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(InvalidPayload, match=message):
        schema(receipt).dump(args, kwargs)


def test_an_argument_for_a_handler_that_takes_none_is_refused() -> None:
    with pytest.raises(InvalidPayload, match="it takes no arguments"):
        schema(lambda: None).dump((), {"x": 1})


def test_an_error_does_not_show_the_value() -> None:
    with pytest.raises(InvalidPayload) as caught:
        schema(receipt).dump((), {"order_id": "hunter2"})
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_user_arguments_named_like_internals_arrive_unchanged() -> None:
    """An argument with the name of an internal one was dropped or overwritten (coleifer/huey 3.0.2)."""

    def echo(
        task: int, job: int, self: int, key: int, delay: int, priority: int, payload: int, context: int, args: int,
        kwargs: int, id: int, logger: int,  # noqa: A002 _private: int, func: int, values: int, model_config: int,
    ) -> None: ...  # fmt: skip

    names = [name for name in echo.__annotations__ if name != "return"]
    given = {name: number for number, name in enumerate(names)}
    checked = schema(echo)
    assert checked.rebuild(checked.dump((), given)) == given


# Naive, and in Paris it exists twice.
WHEN = dt.datetime(2027, 10, 31, 2, 30, 0, 123456)  # noqa: DTZ001


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (dt.datetime, WHEN),
        (dt.datetime, WHEN.replace(tzinfo=dt.UTC)),
        (dt.datetime, WHEN.replace(tzinfo=PARIS)),
        (dt.datetime, WHEN.replace(tzinfo=PARIS, fold=1)),
        (dt.date, dt.date(2027, 1, 1)),
        (dt.time, dt.time(1, 2, 3, 4)),
        (dt.time, dt.time(1, 2, tzinfo=dt.UTC)),
        (dt.timedelta, dt.timedelta(days=-3, microseconds=7)),
        (dt.timedelta, dt.timedelta.max),
        (Decimal, Decimal("0.10")),
        (Decimal, Decimal("1E+500")),
        (uuid.UUID, uuid.UUID(int=7)),
        (bytes, b"abc"),
        (Color, Color.RED),
        (Point, Point(1, WHEN)),
        (Line, Line(start=Point(1), lineLabel="x")),
        (Path, Path("/srv/x")),
        (set[int], {1, 2}),
        (frozenset[str], frozenset({"a"})),
        (tuple[int, str], (1, "a")),
        (tuple[int, ...], (1, 2)),
        (dict[int, str], {1: "a"}),
        (dict[str, list[Decimal]], {"a": [Decimal("1.0")]}),
        (int | None, None),
        (str | int, "5"),
        (str | int, 5),
        (float, 1e22),
        (float, 5e-324),
        (float, sys.float_info.max),
        (Literal["a", 1], 1),
        (Annotated[int, Field(gt=0)], 3),
        (str, "💥 é e\u0301 \\u0000 \u2028"),
        (Any, {"a": [1, 2.5, None, True, "x", {}]}),
        (dict, {}),
        (int, 2**63),
        (int, -(2**63)),
        (bool, True),
    ],
)
def test_a_value_comes_back_equal_and_of_the_same_type(annotation: Any, value: Any) -> None:
    """Dates, Decimals, UUIDs raised deep in the worker or came back as strings (django-background-tasks#193)."""
    back = through(annotation, value)
    assert type(back) is type(value)
    if isinstance(value, dt.datetime | dt.time):
        assert back.isoformat() == value.isoformat()
    else:
        assert back == value


@pytest.mark.parametrize(
    ("annotation", "value", "message"),
    [
        (Any, {1, 2}, "payload.value: set comes back as list"),
        (Any, {"a": (1,)}, "payload.value.a: tuple comes back as list"),
        (Any, {"a": {"b": [0, 1, WHEN]}}, r"payload\.value\.a\.b\[2\]: datetime comes back as str"),
        (Any, [Decimal("1.0")], r"payload\.value\[0\]: Decimal comes back as str"),
        (Any, {1: "a"}, "payload.value.1: the key 1 does not come back"),
        (Any, {1: "a", "1": "b"}, "payload.value"),
        (Any, Color.RED, "payload.value: Color comes back as str"),
        (Any, Point(1), "payload.value: Point comes back as dict"),
        (Any, {"a": [object()]}, r"payload\.value\.a\[0\]: object has no JSON form"),
        (Any, {"a": gettext_lazy("yes")}, r"payload\.value\.a: __proxy__ has no JSON form"),
        (Any, [b"\xff"], r"payload\.value\[0\]: bytes has no JSON form"),
        (bytes, b"\xff", "payload.value: bytes has no JSON form"),
        (Any, {"a": [1e300]}, r"payload\.value\.a\[0\]: float comes back as int"),
        (Any, User(username="ada"), "payload.value: User has no JSON form"),
        (str, gettext_lazy("yes"), "payload.value: Input should be a valid string"),
        (int, User(username="ada"), r"got User; pass its key"),
        (dt.time, dt.time(1, 2, tzinfo=PARIS), "payload.value: time loses its time zone"),
        (SecretStr, SecretStr("x"), "payload.value: SecretStr comes back with another value"),
        (list[int] | tuple[int, ...], (1, 2), "payload.value: tuple comes back as list"),
        (dict[Any, int], {Size.L: 1}, "payload.value.L: its key comes back as str"),
        (set[Any], {Size.L}, "payload.value: the members of the set come back changed"),
        (Open, Open(when=WHEN), "payload.value.when: datetime comes back as str"),
        (Stamped, Stamped(), "payload.value: comes back with more keys"),
    ],
)
def test_what_does_not_survive_is_refused_by_its_path(annotation: Any, value: Any, message: str) -> None:
    """Half of such values failed only in production (knifecake/steady-queue#30, RealOrangeOne/django-tasks#134)."""
    with translation.override("de"), pytest.raises(InvalidPayload, match=message):
        through(annotation, value)


@pytest.mark.django_db
def test_a_queryset_is_refused_and_not_evaluated(django_assert_num_queries: Any) -> None:
    with django_assert_num_queries(0), pytest.raises(InvalidPayload, match="QuerySet"):
        through(Any, {"users": User.objects.all()})


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, Decimal("NaN"), Decimal("Infinity")])
@pytest.mark.parametrize(
    ("annotation", "wrap"),
    [
        (Any, lambda number: number),
        (dict, lambda number: {"x": [1, number]}),
        (float, lambda number: number),
        (float | None, lambda number: number),
        (list[float], lambda number: [number]),
        (Decimal, lambda number: number),
    ],
)
def test_numbers_that_json_does_not_know_are_refused(annotation: Any, wrap: Any, number: Any) -> None:
    """NaN was written as a bare token that only some engines refuse (encode/django-rest-framework#5235)."""
    with pytest.raises(InvalidPayload, match=r"payload\.value"):
        through(annotation, wrap(number))


@pytest.mark.parametrize(
    ("annotation", "value", "reason"),
    [
        (dict, {"a": "x\x00y"}, "NUL"),
        (dict, {"x\x00": 1}, "NUL"),
        (dict[str, int], {"x\x00": 1}, "NUL"),
        (dict, {"a": ["\x00"]}, "NUL"),
        (str, "\x00", "NUL"),
        (str, "a\ud800", "surrogate"),
        (list[str], ["ok", "\udfff"], r"payload\.value\[1\]: contains a lone surrogate"),
        (int, 2**64, "beyond 64 bits"),
        (list[int], [1, -(2**63) - 1], r"payload\.value\[1\]: is beyond 64 bits"),
        (Any, {"a": 10**30}, "beyond 64 bits"),
    ],
)
def test_what_some_engine_cannot_store_is_refused_everywhere(annotation: Any, value: Any, reason: str) -> None:
    r"""A \u0000 passed Python and SQLite and was refused by jsonb (kestra-io/kestra#10326, Zipstack/unstract#2289)."""
    with pytest.raises(InvalidPayload, match=reason):
        through(annotation, value)


@pytest.mark.parametrize("value", ["12345678901234567890", "\\u0000", "\\ud800", "😀"])
def test_text_that_only_looks_suspect_is_accepted(value: str) -> None:
    assert through(str, value) == value


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.medium
def test_deep_nesting_is_refused_and_never_a_recursion_error() -> None:
    # The object that holds the arguments is one level more.
    assert through(Any, nested(30)) == nested(30)
    for levels in (31, 500, 100_000):
        with pytest.raises(InvalidPayload, match="payload"):
            through(Any, nested(levels))


def test_a_value_that_holds_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(InvalidPayload, match=r"payload\.value"):
        through(Any, loop)


def test_a_payload_that_is_too_large_is_refused_with_both_sizes(settings: Any) -> None:
    settings.DJANGO_JOBS = {"PAYLOAD_MAX_BYTES": 100}
    with pytest.raises(InvalidPayload, match="112 bytes of JSON; PAYLOAD_MAX_BYTES allows 100"):
        through(str, "x" * 100)


def test_the_text_is_ascii_whatever_it_holds() -> None:
    """A 4-byte character stopped all progress on a utf8mb3 table (meeb/tubesync#263)."""
    assert taking(str).dump((), {"value": "💥é"}).isascii()


def test_a_row_of_older_code_without_a_new_parameter_gets_its_default() -> None:
    assert schema(receipt).rebuild('{"order_id": 1}') == {"order_id": 1}


def test_a_row_of_older_code_with_a_removed_parameter_is_an_error() -> None:
    with pytest.raises(InvalidPayload, match=r"payload\.gone: the handler has no such parameter"):
        schema(receipt).rebuild('{"order_id": 1, "gone": 2}')


@pytest.mark.parametrize("text", ["{}", "[]", "null", "", "{", '{"order_id": "x"}', '{"order_id": NaN}'])
def test_a_damaged_row_is_an_invalid_payload(text: str) -> None:
    with pytest.raises(InvalidPayload, match=r"shop\.sample"):
        schema(receipt).rebuild(text)


def test_a_default_is_frozen_in_the_payload_unless_it_cannot_be_stored() -> None:
    sentinel: Any = object()

    def handler(a: int = 1, b: Any = sentinel, c: int = None, d: float = 1, e: list[int] = []) -> None:  # type: ignore  # noqa: B006, RUF013
        ...

    assert json.loads(schema(handler).dump((), {})) == {"a": 1, "e": []}


def test_parameters_after_the_first_may_go_without_annotation() -> None:
    def handler(a: int, b, *, c="x"):  # type: ignore[no-untyped-def]
        ...

    checked = schema(handler)
    assert checked.rebuild(checked.dump((1, [2]), {})) == {"a": 1, "b": [2], "c": "x"}
    with pytest.raises(InvalidPayload, match="it takes at most 2"):
        checked.dump((1, 2, 3), {})


@pytest.mark.parametrize(
    ("func", "message"),
    [
        (lambda x: None, "the first parameter, x, has no annotation"),
        (lambda *args: None, r"\*args; name the parameters"),
        (lambda **kwargs: None, r"\*\*kwargs; name the parameters"),
        (lambda x, /: None, "positional-only parameter x"),
    ],
)
def test_a_signature_without_a_schema_is_refused(func: Any, message: str) -> None:
    with pytest.raises(DefinitionError, match=f"shop.sample: .*{message}"):
        schema(func)


class Unknown:
    pass


@pytest.mark.parametrize(
    ("annotation", "message"),
    [
        (Any, "has no annotation, or Any"),
        (User, r"value has the type User, .* Pass its key \(value_id: int\)"),
        (list[User], "value has the type User"),
        (User | None, "value has the type User"),
        (Unknown, "its signature cannot be a schema"),
        (JobContext | None, "takes a JobContext"),
        (list[JobContext], "takes a JobContext"),
    ],
)
def test_an_annotation_that_cannot_be_a_payload_is_refused(annotation: Any, message: str) -> None:
    def handler(value: Any) -> None: ...

    handler.__annotations__["value"] = annotation
    with pytest.raises(DefinitionError, match=message):
        schema(handler)


def test_a_context_that_is_not_first_is_refused() -> None:
    def second(x: int, ctx: JobContext) -> None: ...

    def by_name(*, ctx: JobContext) -> None: ...

    for func in (second, by_name):
        with pytest.raises(DefinitionError, match="ctx takes a JobContext"):
            schema(func)


def test_a_forward_reference_waits_until_it_is_known() -> None:
    def handler(ctx: JobContext, value: Later) -> None: ...  # noqa: F821

    checked = schema(handler)
    assert not checked.is_resolved
    with pytest.raises(DefinitionError, match=r"'Later' is not defined.*TYPE_CHECKING"):
        checked.resolve()
    handler.__globals__["Later"] = Point
    try:
        checked.resolve()
        assert checked.takes_context
        assert checked.rebuild(checked.dump((Point(1),), {})) == {"value": Point(1)}
    finally:
        del handler.__globals__["Later"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(-1e15, 1e15) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


@pytest.mark.medium
@given(value=json_values)
def test_json_under_any_comes_back_the_same_or_is_refused(value: Any) -> None:
    try:
        back = through(Any, value)
    except InvalidPayload as error:
        assert "NUL" in str(error) or "surrogate" in str(error)  # noqa: PT017
    else:
        assert repr(back) == repr(value)


@given(
    a=st.integers(-(2**63), 2**64 - 1),
    b=st.floats(allow_nan=False, allow_infinity=False),
    c=st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"))),
    d=st.none() | st.uuids(),
    e=st.decimals(allow_nan=False, allow_infinity=False),
    f=st.dates(),
)
@pytest.mark.medium
def test_types_that_skip_the_comparison_are_lossless(a: int, b: float, c: Any, d: Any, e: Decimal, f: dt.date) -> None:
    def handler(
        a: int, b: float, c: list[str], d: uuid.UUID | None, e: Decimal, f: dt.date, g: dict[str, set[int]]
    ) -> None: ...

    checked = schema(handler)
    assert checked._lossless
    given = {"a": a, "b": b, "c": c, "d": d, "e": e, "f": f, "g": {"x": {a}}}
    text = checked.dump((), given)
    assert repr(checked.rebuild(text)) == repr(given)
    # As jsonb writes numbers: without exponents.
    plain = (
        json.dumps(json.loads(text), default=str) if "e" not in repr(b) else text.replace(repr(b), f"{Decimal(b):f}")
    )
    assert checked.rebuild(plain)["b"] == b


@pytest.mark.django_db
def test_a_payload_comes_back_from_the_table_as_it_was_pushed() -> None:
    """What one engine stores another refused or rewrote (kestra-io/kestra#10326, encode/django-rest-framework#5235)."""

    def handler(
        ctx: JobContext,
        whole: int,
        real: float,
        text: str,
        when: dt.datetime,
        amount: Decimal,
        anything: Any,
        line: Line,
    ) -> None: ...

    samples: list[dict[str, Any]] = [
        {
            "whole": 2**64 - 1,
            "real": 1e308,
            "text": "💥 \\u0000 é",
            "amount": Decimal("0.10"),
            "anything": {"a": [1.0], "b": 1},
        },
        {
            "whole": -(2**63),
            "real": 5e-324,
            "text": "",
            "amount": Decimal("1E+40"),
            "anything": [1e15, 1e-7, "1e300", None],
        },
        {"whole": 0, "real": -1e22, "text": "\u2028'\"\\", "amount": Decimal(0), "anything": 0.1 + 0.2},
    ]
    rest = {"when": WHEN.replace(tzinfo=dt.UTC), "line": Line(start=Point(1, WHEN), lineLabel="x")}
    with registry.isolated():
        made = job(name="shop.sample")(handler)
        for sample in samples:
            pushed = made.push(**sample, **rest)
            row = JobExecution.objects.get(pk=pushed.pk)
            assert repr(made.schema.rebuild(row.payload_json)) == repr(
                made.schema.rebuild(made.schema.dump((), sample | rest))
            )
            assert made.schema.rebuild(row.payload_json) == sample | rest
