"""The payload of a job: the handler's signature as a schema, from arguments to strict JSON text and back."""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NotRequired

from django.db.models import Manager, Model, QuerySet
from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails
from typing_extensions import TypedDict

from django_jobs.conf import get_settings
from django_jobs.context import JobContext
from django_jobs.exceptions import DefinitionError, InvalidPayload
from django_jobs.fidelity import as_stored, difference, flaw, is_lossless, unserializable
from django_jobs.options import PUSH

# ASCII: the text survives any connection and character set, and its length is its size in bytes.
encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
# Text that needs a close look: an escaped NUL or surrogate, or a number that may exceed 64 bits.
SUSPECT = re.compile(r"\\u0000|\\ud[89a-f]|\d{19}")
EXPONENT = re.compile(r"\de\+?\d")
CONFIG = ConfigDict(
    extra="forbid",
    allow_inf_nan=False,
    # Otherwise NaN under Any would silently become null; as a constant it is found and refused.
    ser_json_inf_nan="constants",
)


class Schema:
    """The parameters of one handler, without its context.

    A wrong signature is refused when the schema is made. Forward references leave it unresolved; resolve() is called
    again when all apps are imported, and at the first use.
    """

    __slots__ = (
        "_defaults",
        "_func",
        "_lossless",
        "_positional",
        "_required",
        "_serialize",
        "_validate",
        "_validate_json",
        "is_resolved",
        "job_name",
        "parameters",
        "takes_context",
    )

    def __init__(self, job_name: str, func: Callable[..., Any], localns: Mapping[str, Any] | None = None) -> None:
        self.job_name = job_name
        self.parameters: tuple[str, ...] = ()
        self.takes_context = False
        self.is_resolved = False
        self._func = func
        for parameter in inspect.signature(func).parameters.values():
            self._check_kind(parameter)
        try:
            self._build(localns)
        except NameError:
            # A forward reference.
            return

    @property
    def required(self) -> frozenset[str]:
        """The parameters without a default."""
        self.resolve()
        return self._required

    def resolve(self) -> None:
        """Resolve forward references; raise DefinitionError when a name is still unknown."""
        if self.is_resolved:
            return
        try:
            self._build(None)
        except NameError as error:
            raise DefinitionError(
                f"{self.job_name}: an annotation cannot be resolved ({error}). Import its names at the top of the "
                f"module, outside TYPE_CHECKING: the signature is the schema of the payload."
            ) from error

    def dump(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Validate and coerce the arguments of a call; return them as JSON text, or raise InvalidPayload."""
        if not self.is_resolved:
            self.resolve()
        if args:
            kwargs = self._bind(args, kwargs)
        text = self._dump({**self._defaults, **kwargs})
        if len(text) > (limit := get_settings().payload_max_bytes):
            raise InvalidPayload(
                f"{self.job_name}: the payload is {len(text)} bytes of JSON; PAYLOAD_MAX_BYTES allows {limit}. "
                f"Store the data elsewhere and pass its key."
            )
        return text

    def rebuild(self, text: str) -> dict[str, Any]:
        """Return the handler's keyword arguments from stored JSON text, or raise InvalidPayload.

        A parameter that is missing in the text is left to the handler's default; one that the handler does not have is
        an error, so that nothing is silently dropped.
        """
        if not self.is_resolved:
            self.resolve()
        try:
            values: dict[str, Any] = self._validate_json(text)
        except ValidationError as error:
            raise self._refused(error) from None
        if not values.keys() >= self._required:
            raise self._missing(values)
        return values

    def _dump(self, given: Mapping[str, Any]) -> str:
        # Errors of pydantic are not chained, as their text quotes the input, which may be secret.
        try:
            values = self._validate(given)
        except ValidationError as error:
            raise self._refused(error) from None
        if not values.keys() >= self._required:
            raise self._missing(values)
        try:
            tree, text = self._encoded(values)
        except (ValueError, TypeError, AttributeError, RecursionError):
            raise InvalidPayload(f"{self.job_name}: {self._why(values)}.") from None
        if not self._lossless or SUSPECT.search(text):
            self._check(values, tree, text)
        return text

    def _encoded(self, values: dict[str, Any]) -> tuple[Any, str]:
        tree = self._serialize(values, mode="json", by_alias=True, round_trip=True, warnings=False)
        return tree, encode(tree)

    def _check(self, values: dict[str, Any], tree: Any, text: str) -> None:
        found = flaw(tree, "payload")
        if found is None and not self._lossless:
            try:
                back = self._validate_json(encode(as_stored(tree)) if EXPONENT.search(text) else text)
            except ValidationError as error:
                raise self._refused(error, " when it is read back from storage") from None
            found = difference(values, back, "payload")
        if found is not None:
            raise InvalidPayload(f"{self.job_name}: {found}.")

    def _bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        if len(args) > len(self._positional):
            raise InvalidPayload(
                f"{self.job_name}: {len(args)} positional arguments; it takes at most {len(self._positional)}"
                f"{self._takes()}."
            )
        bound = dict(zip(self._positional, args, strict=False))
        if twice := [name for name in bound if name in kwargs]:
            raise InvalidPayload(f"{self.job_name}: payload.{twice[0]} is given twice, by position and by name.")
        return bound | dict(kwargs)

    def _takes(self) -> str:
        return f" ({', '.join(self.parameters)})" if self.parameters else ": it takes no arguments"

    def _missing(self, values: Mapping[str, Any]) -> InvalidPayload:
        names = ", ".join(f"payload.{name}" for name in self.parameters if name in self._required - values.keys())
        return InvalidPayload(f"{self.job_name}: {names} is missing; the handler has no default for it.")

    def _refused(self, error: ValidationError, where: str = "") -> InvalidPayload:
        details = error.errors(include_url=False, include_context=False)
        lines = [self._line(detail) + where for detail in details[:5]]
        if len(details) > 5:
            lines.append(f"and {len(details) - 5} more")
        return InvalidPayload(f"{self.job_name}: {'; '.join(lines)}.")

    def _line(self, detail: ErrorDetails) -> str:
        path = "payload" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in detail["loc"])
        if detail["type"] == "extra_forbidden" and len(detail["loc"]) == 1:
            using = "; pass the options of a push to using(…)" if detail["loc"][0] in PUSH else ""
            return f"{path}: the handler has no such parameter{self._takes()}{using}"
        # Only the type, since the value may be secret.
        kind = type(detail["input"])
        key = "; pass its key and fetch it in the handler" if issubclass(kind, Model | QuerySet) else ""
        return f"{path}: {detail['msg']} (got {kind.__name__}{key})"

    def _why(self, values: dict[str, Any]) -> str:
        for name, value in values.items():
            try:
                self._encoded({name: value})
            except (ValueError, TypeError, AttributeError):
                return unserializable(value, f"payload.{name}")
            except RecursionError:
                return f"payload.{name}: is nested too deeply"
        return "the payload has no JSON form"

    def _check_kind(self, parameter: inspect.Parameter) -> None:
        kinds = {
            parameter.VAR_POSITIONAL: "*{}; name the parameters, or take a list",
            parameter.VAR_KEYWORD: "**{}; name the parameters, or take a dict",
            parameter.POSITIONAL_ONLY: "the positional-only parameter {}; arguments are stored by name, remove the `/`",
        }
        if parameter.kind in kinds:
            what = kinds[parameter.kind].format(parameter.name)
            raise DefinitionError(f"{self.job_name}: its handler takes {what}.")

    def _build(self, localns: Mapping[str, Any] | None) -> None:
        parameters = list(inspect.signature(self._func).parameters.values())
        hints = _hints(self._func, parameters, localns)
        if parameters:
            first = hints.get(parameters[0].name, Any)
            if first is JobContext and parameters[0].kind is not inspect.Parameter.KEYWORD_ONLY:
                self.takes_context = True
                del parameters[0]
            elif first is Any and parameters[0].name in {"self", "cls"}:
                raise DefinitionError(
                    f"{self.job_name}: a method cannot be a handler, as a row has no object to call it on. Decorate a "
                    f"function, and pass the key of the object."
                )
            elif first is Any:
                raise DefinitionError(
                    f"{self.job_name}: the first parameter, {parameters[0].name}, has no annotation, or Any. "
                    f"Annotate it: JobContext for the context, or the type of the pushed value."
                )
        for parameter in parameters:
            self._check_hint(parameter.name, hints.get(parameter.name, Any))
        wanted = {parameter.name: hints.get(parameter.name, Any) for parameter in parameters}
        adapter = self._adapter(wanted)
        self.parameters = tuple(wanted)
        self._positional = tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY)
        self._required = frozenset(p.name for p in parameters if p.default is p.empty)
        self._validate = adapter.validator.validate_python
        self._validate_json = adapter.validator.validate_json
        self._serialize = adapter.serializer.to_python
        self._lossless = all(map(is_lossless, wanted.values()))
        self._defaults = self._kept_defaults(parameters)
        self.is_resolved = True

    def _adapter(self, wanted: dict[str, Any]) -> TypeAdapter[Any]:
        # No key is required for pydantic: our message for a missing one is better, and defaults are tried one by one.
        fields: Any = {name: NotRequired[hint] for name, hint in wanted.items()}
        shape = TypedDict(self.job_name, fields)  # type: ignore[misc]  # made at run time
        shape.__pydantic_config__ = CONFIG  # type: ignore[attr-defined]
        try:
            return TypeAdapter(shape)
        except NameError:
            raise
        except (PydanticUserError, TypeError, ValueError) as error:
            reason = str(error).split("\n")[0]
            raise DefinitionError(
                f"{self.job_name}: its signature cannot be a schema ({reason}) Use types that pydantic knows."
            ) from error

    def _check_hint(self, name: str, hint: Any) -> None:
        for part in _parts(hint):
            if part is JobContext:
                raise DefinitionError(
                    f"{self.job_name}: {name} takes a JobContext, but only the first positional parameter can be one, "
                    f"annotated as exactly JobContext. Move it there."
                )
            if isinstance(part, type) and issubclass(part, Model | QuerySet | Manager):
                raise DefinitionError(
                    f"{self.job_name}: {name} has the type {part.__name__}, but a payload cannot hold rows. Pass "
                    f"its key ({name}_id: int) and fetch it in the handler."
                )

    def _kept_defaults(self, parameters: Sequence[inspect.Parameter]) -> dict[str, Any]:
        """Return the defaults that a payload can hold: they are stored with it, so that a waiting row keeps them."""
        kept = {}
        for parameter in parameters:
            name, default = parameter.name, parameter.default
            if default is parameter.empty:
                continue
            try:
                values = self._validate({name: default})
                self._check(values, *self._encoded(values))
            except (ValueError, TypeError, AttributeError, RecursionError):
                # A sentinel, or not of the annotated type: Python fills it in when the handler is called.
                continue
            if difference(default, values[name], name) is None:
                kept[name] = default
        return kept


def _hints(
    func: Callable[..., Any], parameters: Sequence[inspect.Parameter], localns: Mapping[str, Any] | None
) -> dict[str, Any]:
    plain = types.SimpleNamespace(
        __annotations__={p.name: p.annotation for p in parameters if p.annotation is not p.empty}
    )
    # The name JobContext is always known, even if it is imported for type checking only.
    names = {"JobContext": JobContext, **getattr(inspect.unwrap(func), "__globals__", {})}
    return typing.get_type_hints(plain, names, dict(localns or {}), include_extras=True)


def _parts(hint: Any) -> list[Any]:
    return [hint, *(part for arg in typing.get_args(hint) for part in _parts(arg))]
