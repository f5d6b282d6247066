"""Specs and statuses as they stand in Kubernetes objects, where names are camelCase."""

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
    """Settings that are read under the names of their fields in YAML."""

    __pydantic_config__: ClassVar = ConfigDict(**STRICT, alias_generator=camel)


def from_manifest(cls: type[T], values: Mapping[str, Any], where: str = "spec") -> T:
    """A spec from an object's. Raises `InvalidField` that names the field as YAML does."""
    return load(cls, values, where)


def from_live_spec(cls: type[T], live: Mapping[str, Any]) -> T:
    """The spec of a live object. Raises `InvalidField` as `from_manifest`, but leaves out fields that this
    version does not know: the API server has dropped what its CRD does not name, so they are those of a newer
    CRD, which fills their defaults into every object. What a person may add to pods is not guessed about."""
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
    """The status that was written last; an empty one where another version's cannot be read."""
    try:
        return from_manifest(cls, live.get("status") or {}, "status")
    except InvalidField:
        return cls()


def check_manifest(spec: Any) -> None:
    """Raise `InvalidField` where a spec breaks a bound or a rule: as the API server does, for specs that an
    older CRD has let pass."""
    check(spec, "spec", camel)


def to_manifest(value: Any) -> Any:
    """A spec as it stands in an object, defaults filled in, unset fields left out."""
    return plain(value, camel, lambda _, inner: inner is not None)


def non_default_manifest(settings: Any) -> dict[str, Any]:
    """The fields of a spec that differ from their defaults, as they stand in an object."""
    return non_default_fields(settings, naming=camel)
