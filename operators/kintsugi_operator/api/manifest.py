"""Specs and statuses as they stand in Kubernetes objects, where names are camelCase."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar, get_args, get_type_hints

from kintsugi.core.errors import InvalidField, UnknownField
from kintsugi.core.rules import camel
from kintsugi.core.schema import load
from kintsugi.core.settings import bounds_of, check, non_default_fields, plain

GROUP = "kintsugi.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

T = TypeVar("T")


def yaml_name(cls: type[Any], one: dataclasses.Field[Any]) -> str:
    """What a field of `cls` is called in YAML."""
    return str(bounds_of(cls, one).get("name", camel(one.name)))


def from_manifest(cls: type[T], values: Mapping[str, Any], where: str = "spec") -> T:
    """A spec from an object's. Raises `InvalidField` that names the field as YAML does."""
    if not isinstance(values, Mapping):
        raise InvalidField(where, f"expected a mapping, got {type(values).__name__}")
    try:
        return load(cls, _rename_fields(cls, values, where), where)
    except UnknownField:
        raise
    except InvalidField as error:
        raise InvalidField(_yaml_path(cls, error.field.removeprefix(where), where), error.problem) from None


def check_manifest(spec: Any) -> None:
    """Raise `InvalidField` where a spec breaks a bound or a rule: as the API server does, for specs that an
    older CRD has let pass."""
    check(spec, "spec", yaml_name)


def to_manifest(value: Any) -> Any:
    """A spec as it stands in an object, defaults filled in, unset fields left out."""
    return plain(value, yaml_name, lambda _, inner: inner is not None)


def non_default_manifest(settings: Any) -> dict[str, Any]:
    """The fields of a spec that differ from their defaults, as they stand in an object."""
    return non_default_fields(settings, naming=yaml_name)


def dataclass_within(annotation: Any) -> type[Any] | None:
    """`Tier` of `tuple[Tier, ...]`, `Image` of `Image | None`."""
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return annotation
    return next((inner for one in get_args(annotation) if (inner := dataclass_within(one))), None)


def _yaml_path(cls: type[Any] | None, path: str, where: str) -> str:
    """A path of Python names as YAML has it; keys of free mappings and indexes stay."""
    for name in filter(None, path.split(".")):
        fields = {one.name: one for one in dataclasses.fields(cls)} if cls is not None else {}
        if cls is not None and name in fields:
            where = f"{where}.{yaml_name(cls, fields[name])}"
            cls = dataclass_within(get_type_hints(cls)[name])
        else:
            where = f"{where}.{name}"
    return where


def _rename_fields(cls: type[Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The values with Python's names; free maps, such as labels, keep theirs. Raises `UnknownField`."""
    hints = get_type_hints(cls)
    names = {yaml_name(cls, one): one.name for one in dataclasses.fields(cls)}
    renamed: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{where}.{key}"
        if key not in names:
            raise UnknownField(path, names)
        inner = dataclass_within(hints[names[key]])
        if inner is not None and isinstance(value, Mapping):
            value = _rename_fields(inner, value, path)
        elif inner is not None and isinstance(value, list):
            value = [_rename_fields(inner, one, path) if isinstance(one, Mapping) else one for one in value]
        renamed[names[key]] = value
    return renamed
