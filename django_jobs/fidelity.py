"""Whether a value survives storage as JSON on every database; payloads.py checks this before it accepts a push."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import math
import types
import typing
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

# Levels of nested lists and objects; MariaDB takes one more level for invalid JSON.
MAX_DEPTH = 31
# MySQL turns JSON numbers beyond these into floats.
SMALLEST, LARGEST = -(2**63), 2**64 - 1
# Returns the plain value of a subclass, such as an enum.
_UNDERLYING: dict[type, Callable[[Any], Any]] = {str: str.__str__, int: int.__int__, float: float.__float__}
# Types whose JSON form is exact in both directions, whatever the value.
EXACT = {str, int, bool, float, types.NoneType, uuid.UUID, decimal.Decimal, datetime.date}


def is_lossless(annotation: Any) -> bool:
    """Return whether every value that this annotation accepts is rebuilt equal and of the same type.

    Not so datetimes, times and durations: a zone without a fixed offset, or seconds in an offset, are lost.
    """
    if isinstance(annotation, type) and annotation in EXACT:
        return True
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in {list, set, frozenset}:
        return is_lossless(args[0])
    if origin is tuple:
        return len(args) == 2 and args[1] is ... and is_lossless(args[0])
    if origin is dict:
        return args[0] is str and is_lossless(args[1])
    if origin in {typing.Union, types.UnionType}:
        some = [arg for arg in args if arg is not types.NoneType]
        return len(some) == 1 and is_lossless(some[0])
    return origin is typing.Literal and all(type(arg) is str for arg in args)


def plain(value: Any, path: str, depth: int = 0) -> Any:
    """Return a value in plain JSON types; raise ValueError, "path: reason", if it has a part without a JSON form.

    Tuples and other sequences become lists, bytes become text, and members of text and number enums their values.
    """
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            # Not kind(value): str() of an enum member may be its name.
            return value if type(value) is kind else _UNDERLYING[kind](value)
    if depth >= MAX_DEPTH:
        raise ValueError(f"{path}: is nested deeper than {MAX_DEPTH} levels, or holds itself")
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise ValueError(f"{path}: contains bytes that are not UTF-8 text") from None
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"{path}: has the key {key!a}, {_kind(key)}; JSON keys are text")
        return {plain(key, path): plain(item, f"{path}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [plain(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
    raise ValueError(f"{path}: {_kind(value)} has no JSON form")


def flaw(tree: Any, path: str, depth: int = 0) -> str | None:
    """Return what some database cannot store of a JSON tree, as "path: reason"; None if there is nothing."""
    if isinstance(tree, str):
        if "\x00" in tree:
            return f"{path}: contains a NUL character, which PostgreSQL cannot store"
        if not tree.isascii() and any("\ud800" <= character <= "\udfff" for character in tree):
            return f"{path}: contains a lone surrogate, which is not text"
        return None
    if isinstance(tree, int):
        return None if SMALLEST <= tree <= LARGEST else f"{path}: is beyond 64 bits, which MySQL rounds; send text"
    if isinstance(tree, float):
        return None if math.isfinite(tree) else f"{path}: {tree} is not JSON"
    if depth >= MAX_DEPTH and isinstance(tree, dict | list):
        return f"{path}: is nested deeper than {MAX_DEPTH} levels"
    found: str | None = None
    if isinstance(tree, dict):
        for key, value in tree.items():
            found = flaw(key, f"{path}.{key!a}") or flaw(value, f"{path}.{key}", depth + 1)
            if found:
                break
    elif isinstance(tree, list):
        found = next(filter(None, (flaw(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(tree))), None)
    return found


def as_stored(tree: Any) -> Any:
    """Return the JSON tree as PostgreSQL returns it: jsonb turns a float with an exponent into a whole number."""
    if isinstance(tree, dict):
        return {key: as_stored(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [as_stored(value) for value in tree]
    return int(tree) if isinstance(tree, float) and "e+" in repr(tree) else tree


def difference(sent: Any, back: Any, path: str) -> str | None:
    """Return where two values differ, types included, as "path: reason"; None if they are the same."""
    if isinstance(sent, float) and not math.isfinite(sent):
        return f"{path}: {sent} is not JSON"
    if type(sent) is not type(back):
        return f"{path}: {_kind(sent)} comes back as {_kind(back)}"
    if isinstance(sent, dict):
        return _of_pairs(sent, back, path)
    if isinstance(sent, list | tuple):
        if len(sent) != len(back):
            return f"{path}: comes back with another length"
        pairs = enumerate(zip(sent, back, strict=True))
        return next(filter(None, (difference(a, b, f"{path}[{i}]") for i, (a, b) in pairs)), None)
    if isinstance(sent, set | frozenset):
        same = {(type(item), item) for item in sent} == {(type(item), item) for item in back}
        return None if same else f"{path}: the members of the set come back changed"
    if isinstance(sent, BaseModel):
        return _of_pairs(
            {**sent.__dict__, **(sent.__pydantic_extra__ or {})},
            {**back.__dict__, **(back.__pydantic_extra__ or {})},
            path,
        )
    if dataclasses.is_dataclass(sent):
        names = [field.name for field in dataclasses.fields(sent)]
        return next(filter(None, (difference(getattr(sent, n), getattr(back, n), f"{path}.{n}") for n in names)), None)
    if isinstance(sent, datetime.datetime | datetime.time):
        # Not `==`, which is False within a repeated hour if the two zones are different objects.
        same = (sent.utcoffset(), sent.replace(tzinfo=None, fold=0)) == (
            back.utcoffset(),
            back.replace(tzinfo=None, fold=0),
        ) and (sent.tzinfo is None) is (back.tzinfo is None)
        return None if same else f"{path}: {_kind(sent)} loses its time zone"
    return None if _equal(sent, back) else f"{path}: {_kind(sent)} comes back with another value"


def unserializable(value: Any, path: str) -> str:
    """Return the path of the first part of a value that has no JSON form, with its type, as "path: reason"."""
    for _ in range(MAX_DEPTH):
        found = next((part for part in _parts(value, path) if not _has_json_form(part[1])), None)
        if found is None:
            return f"{path}: {_kind(value)} has no JSON form"
        path, value = found
    return f"{path}: is nested deeper than {MAX_DEPTH} levels, or holds itself"


def _parts(value: Any, path: str) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(f"{path}.{key}", item) for key, item in value.items()]
    if isinstance(value, list | tuple | set | frozenset):
        return [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    if isinstance(value, BaseModel) or (dataclasses.is_dataclass(value) and hasattr(value, "__dict__")):
        return [(f"{path}.{key}", item) for key, item in vars(value).items()]
    return []


def _has_json_form(value: Any) -> bool:
    try:
        to_jsonable_python(value)
    except Exception:  # noqa: BLE001 - whatever it is, this part has none
        return False
    return True


def _of_pairs(sent: dict[Any, Any], back: dict[Any, Any], path: str) -> str | None:
    for key, value in sent.items():
        if key not in back:
            return f"{path}.{key}: the key {key!a} does not come back"
        if found := difference(value, back[key], f"{path}.{key}"):
            return found
    for key, other in zip(sorted(sent, key=repr), sorted(back, key=repr), strict=False):
        if type(key) is not type(other):
            return f"{path}.{key}: its key comes back as {_kind(other)}"
    return None if len(sent) == len(back) else f"{path}: comes back with more keys"


def _equal(sent: Any, back: Any) -> bool:
    try:
        return bool(sent == back)
    except Exception:  # noqa: BLE001 - a class whose == raises cannot be checked, so it is refused
        return False


def _kind(value: Any) -> str:
    return type(value).__name__
