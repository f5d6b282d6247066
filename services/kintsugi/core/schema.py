"""Checks of values from outside, such as arguments of the SDK, requests and configurations, and a strict
loader of frozen dataclasses. Each error names the field."""

from __future__ import annotations

import dataclasses
import json
import math
import operator
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, TypeVar, cast, get_args, get_type_hints

from pydantic import BeforeValidator, ConfigDict, TypeAdapter, ValidationError
from pydantic_core import SchemaValidator

from kintsugi.core.errors import InvalidField, UnknownField

T = TypeVar("T")

NAME_CHARS_SHOWN = 64
STRICT = ConfigDict(extra="forbid", strict=False)
"""Set as `__pydantic_config__` on a dataclass that `load` reads."""
OFF_IN_YAML = BeforeValidator(lambda value: "off" if value is False else value)
"""Annotation of a setting with the value `off`, which YAML reads as false without quotes."""


def load(cls: type[T], values: Mapping[str, Any], where: str = "", are_texts: bool = False) -> T:
    """Build the dataclass `cls` from `values`, whose path in the user's input is `where`.

    Numbers and truth values have their own types: `true` is not 1, and "1" neither. With ``are_texts``, as in
    the query of a URL, they are written as text.

    Raises `UnknownField` (with the nearest valid name) for a key that `cls` lacks and `InvalidField` for a
    value of the wrong type or outside its bounds, or for a key in a dataclass's `REFUSED`, with the reason
    given there. Nothing is dropped silently.
    """
    if not isinstance(values, Mapping):
        raise InvalidField(where or cls.__name__, f"expected a mapping, got {type(values).__name__}")
    try:
        value: T = _validator(cast("Any", cls), are_texts).validate_python(dict(values))
        return value
    except ValidationError as error:
        raise _first_error(cls, error, where) from None


def check_text(value: object, where: str) -> str:
    """Return a text. ``where``: its field. Raises `InvalidField` for another type, and for a text that UTF-8
    cannot hold: a program that cuts texts by UTF-16 units may cut an emoji in half."""
    if not isinstance(value, str):
        raise InvalidField(where, f"must be a text, not {_kind_of(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidField(
            where,
            f"has half of a surrogate pair at character {error.start}, as a cut through an emoji leaves it; "
            "cut between characters",
        ) from None
    return value


def check_whole(value: object, where: str, minimum: int, maximum: int) -> int:
    """Return a whole number in [minimum, maximum]. Raises `InvalidField`; `True` and 1.0 are not whole
    numbers."""
    try:
        number = operator.index(value) if not isinstance(value, bool) else None  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None:
        raise InvalidField(where, f"must be a whole number, not {_kind_of(value)}")
    if not minimum <= number <= maximum:
        raise InvalidField(where, f"must be a whole number from {minimum} to {maximum}")
    return number


def check_number(value: object, where: str, above: float = -math.inf) -> float:
    """Return a finite number that exceeds ``above``. Raises `InvalidField`."""
    try:
        number = float(value) if not isinstance(value, bool | str | bytes) else None  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None or not math.isfinite(number):
        shown = _kind_of(value) if number is None else number
        raise InvalidField(where, f"must be a finite number, not {shown}")
    if number <= above:
        raise InvalidField(where, f"{number} must be above {above:g}")
    return number


def check_flag(value: object, where: str) -> bool:
    """Return a truth value. Raises `InvalidField` for another type."""
    if not isinstance(value, bool):
        raise InvalidField(where, f"must be true or false, not {_kind_of(value)}")
    return value


def check_items(value: object, where: str) -> Iterable[Any]:
    """Return a list or another iterable. Raises `InvalidField`; a text does not count as a list of its
    letters."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise InvalidField(where, f"must be a list, not {_kind_of(value)}")
    return value


def _kind_of(value: object) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"


@lru_cache(maxsize=64)
def _validator(cls: type[Any], are_texts: bool) -> SchemaValidator:
    config = getattr(cls, "__pydantic_config__", {})
    assert config.get("extra") == "forbid", f"{cls.__name__} would drop unknown keys: set it to STRICT"
    schema = TypeAdapter(cls).core_schema
    return SchemaValidator(schema if are_texts else _without_conversions(schema))


def _without_conversions(schema: Any) -> Any:
    """Return pydantic's schema with numbers and truth values strict. Its strict mode would also refuse lists
    in place of tuples, and mappings in place of dataclasses."""
    if isinstance(schema, list | tuple):
        return type(schema)(map(_without_conversions, schema))
    if not isinstance(schema, dict):
        return schema
    strict = {"strict": True} if schema.get("type") in ("bool", "float", "int") else {}
    kept = {name: part for name, part in schema.items() if name == "keys_schema"}  # JSON's keys are texts
    return {name: _without_conversions(part) for name, part in schema.items()} | strict | kept


def _first_error(cls: type[Any], error: ValidationError, where: str) -> InvalidField:
    """Return the first error. Unknown keys come first, since a misspelt key also makes another key
    missing."""
    found = error.errors(include_url=False)
    first = min(found, key=lambda item: item["type"] not in _UNKNOWN)
    path = [str(part) for part in first["loc"]]
    field = ".".join([where, *path] if where else path) or cls.__name__
    if first["type"] in _UNKNOWN:
        holder = _class_at(cls, path[:-1])
        if (why := getattr(holder, "REFUSED", {}).get(path[-1])) is not None:
            return InvalidField(field, f"cannot be set: {why}")
        return UnknownField(field, _fields_by_input_name(holder))
    if first["type"] in ("missing", "missing_argument"):
        return InvalidField(field, "is mandatory")
    if first["type"] == "string_pattern_mismatch":
        holder = _class_at(cls, path[:-1])
        one = holder.__dataclass_fields__[_fields_by_input_name(holder)[path[-1]]]
        return InvalidField(field, f"{first['input']!r} {one.metadata['pattern'].words}")
    return InvalidField(field, f"{first['msg'][0].lower()}{first['msg'][1:]} (got {first['input']!r})")


_UNKNOWN = ("unexpected_keyword_argument", "extra_forbidden")


def _class_at(cls: type[Any], path: list[str]) -> type[Any]:
    """Return the dataclass at `path`, through optional types, lists and mappings."""
    for part in path:
        if part in (fields := _fields_by_input_name(cls)):
            # `Field.type` is only text where annotations are postponed.
            cls = dataclass_within(get_type_hints(cls)[fields[part]]) or cls
    return cls


def _fields_by_input_name(cls: type[Any]) -> dict[str, str]:
    name_of = getattr(cls, "__pydantic_config__", {}).get("alias_generator", str)
    return {name_of(one.name): one.name for one in dataclasses.fields(cls)}


def dataclass_within(annotation: Any) -> type[Any] | None:
    """The first dataclass within an annotation: `Tier` of `list[Tier] | None`."""
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return annotation
    return next((inner for one in get_args(annotation) if (inner := dataclass_within(one))), None)


def parse_json(text: str | bytes) -> Any:
    """Return a JSON document. Raises `ValueError` where another reader might find other values: an object
    that has a name twice, NaN, a number that no double can hold."""
    return json.loads(
        text,
        object_pairs_hook=_fields_of,
        parse_constant=_refuse_constant,
        parse_float=_finite,
        parse_int=_finite_int,
    )


def _fields_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name[:NAME_CHARS_SHOWN]!r} occurs twice in an object")
    return fields


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:NAME_CHARS_SHOWN]} exceeds every number")
    return number


def _finite_int(text: str) -> int:
    _finite(text)  # an integer that no double can hold raises where it becomes one
    return int(text)
