"""Frozen dataclasses from untrusted mappings: one strict loader for configs and request fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeVar, cast

from pydantic import ConfigDict, TypeAdapter, ValidationError

from kintsugi.core.errors import InvalidField, UnknownField

T = TypeVar("T")

STRICT = ConfigDict(extra="forbid", strict=False)
"""Set as `__pydantic_config__` on a dataclass that `load` reads."""


def load(cls: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """Build the dataclass `cls` from `values`, whose path in the user's input is `where`.

    Raises `UnknownField` (with the nearest valid name) for a key that `cls` lacks and `InvalidField`
    for a value of the wrong type or outside its bounds. Nothing is dropped silently.
    """
    if not isinstance(values, Mapping):
        raise InvalidField(where or cls.__name__, f"expected a mapping, got {type(values).__name__}")
    try:
        value: T = _adapter(cast("Any", cls)).validate_python(dict(values))
        return value
    except ValidationError as error:
        raise _first_error(cls, error, where) from None


@lru_cache(maxsize=64)
def _adapter(cls: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


def _first_error(cls: type[Any], error: ValidationError, where: str) -> InvalidField:
    first = error.errors(include_url=False)[0]
    path = [str(part) for part in first["loc"]]
    field = ".".join([where, *path] if where else path) or cls.__name__
    if first["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return UnknownField(field, _names_at(cls, path[:-1]))
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InvalidField):
        return cause
    return InvalidField(field, f"{first['msg'][0].lower()}{first['msg'][1:]} (got {first['input']!r})")


def _names_at(cls: Any, path: list[str]) -> list[str]:
    """Field names of the dataclass that `path` leads to, following nested dataclass fields."""
    for part in path:
        fields = {f.name: f.type for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else {}
        if part not in fields or not dataclasses.is_dataclass(fields[part]):
            break
        cls = fields[part]
    return [f.name for f in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
