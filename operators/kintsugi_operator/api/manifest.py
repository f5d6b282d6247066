"""Converts specs and statuses to and from Kubernetes objects, where names are camelCase."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from pydantic import ConfigDict

from kintsugi.core.errors import InvalidField, UnknownField
from kintsugi.core.schema import STRICT, load
from kintsugi.core.settings import Settings, camel, check, non_default_fields, plain

GROUP = "kintsugi.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

T = TypeVar("T")


class ManifestSettings(Settings):
    """Settings whose fields have camelCase names in Kubernetes objects."""

    __pydantic_config__: ClassVar = ConfigDict(**STRICT, alias_generator=camel)


def from_manifest(cls: type[T], values: Mapping[str, Any], where: str = "spec") -> T:
    """Parse the spec of an object. Raises `InvalidField`, which names the field as in YAML."""
    return load(cls, values, where)


def from_live_spec(cls: type[T], live: Mapping[str, Any]) -> T:
    """Parse the spec of a live object. Unlike `from_manifest`, leaves out fields that this version does not
    know: the API server drops unknown fields, so these belong to a newer CRD, which fills their defaults into
    every object. Unknown fields in additions to pods are errors. Raises `InvalidField`."""
    spec = copy.deepcopy(live["spec"])
    while True:
        try:
            return from_manifest(cls, spec)
        except UnknownField as error:
            *path, name = error.field.split(".")[1:]
            if "podTemplates" in path:
                raise
            inner: Any = spec
            for part in path:
                inner = inner[int(part)] if isinstance(inner, list) else inner[part]
            del inner[name]


def status_of(cls: type[T], live: Mapping[str, Any]) -> T:
    """Return the status that was written last; an empty one if another version wrote it in a form that this
    one cannot read."""
    try:
        return from_manifest(cls, live.get("status") or {}, "status")
    except InvalidField:
        return cls()


def check_manifest(spec: Any) -> None:
    """Raise `InvalidField` if a spec violates a bound or a rule. The API server checks the same, but an older
    CRD may have accepted the spec."""
    check(spec, "spec", camel)


def to_manifest(value: Any) -> Any:
    """Return a spec as an object holds it, with defaults and without unset fields."""
    return plain(value, camel, lambda _, inner: inner is not None)


def non_default_manifest(settings: Any) -> dict[str, Any]:
    """Return the fields of a spec that differ from their defaults, as an object holds them."""
    return non_default_fields(settings, naming=camel)
