"""The page of settings, generated from the settings classes and the docstrings of their fields."""

from __future__ import annotations

import dataclasses
import enum
import inspect
from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from scripts.reference.page import Entry, Page, Section, code

from kintsugi.core.deploy import ServiceSpec
from kintsugi.core.request import KintsugiParams
from kintsugi.core.settings import default_of
from kintsugi.engine.config import EngineConfig
from kintsugi.store.client.options import UrlQuery as StoreUrlQuery
from kintsugi.store.protocol.access import AccessDocument
from kintsugi_operator.api.crd import descriptions
from tests.unit.surface.deployment import _dataclass_in, environment_variables
from tests.unit.surface.python_api import text_of

VARIABLES = {
    "KINTSUGI_CACHE": "Folder for downloaded models and compiled kernels. Default: `~/.cache/kintsugi`.",
    "KINTSUGI_LOG_LEVEL": "Lowest level that gateways, engines and shards log. Default: `INFO`, which "
    "includes one line for each request.",
}
"""Meanings of the environment variables, which belong to no settings class."""


def page() -> Page:
    return Page(
        "reference/configuration.md",
        "Configuration",
        "An unknown key is refused with the nearest valid name. How the parts work together is in "
        "[Serve a model](../howto/serve.md).",
        [
            _section(
                "Service",
                "The file of `kintsugi serve --config`, in YAML. Only `model.path` is mandatory.",
                ServiceSpec,
            ),
            _section(
                "Engine",
                "The plugin's part of vLLM's `--kv-transfer-config`, under `kv_connector_extra_config`. A "
                "service derives it, from `engines.expert` among others.",
                EngineConfig,
            ),
            _section(
                "Request",
                'What a request carries in `kv_transfer_params`, under `"kintsugi"`.',
                KintsugiParams,
            ),
            _section("Tokens file", "Who may do what: JSON, read again when it changes.", AccessDocument),
            _section(
                "Store URL",
                "Options behind the `?` of a `grpc://`, `shards://` or `shardfile://` URL.",
                StoreUrlQuery,
            ),
            Section(
                "Environment",
                "Variables that processes read when they start.",
                [Entry(name, VARIABLES.get(name, "")) for name in environment_variables()],
                "variable",
            ),
        ],
    )


def _section(title: str, sentence: str, cls: type[Any]) -> Section:
    return Section(title, sentence, list(_entries(cls, "")), "key")


def _entries(cls: type[Any], path: str) -> Iterator[Entry]:
    """Yield the fields of a dataclass. The fields of an inner dataclass follow the field that holds it."""
    docs, hints = descriptions(cls), get_type_hints(cls)
    for one in dataclasses.fields(cls):
        inner = _dataclass_in(hints[one.name])
        sentence = docs.get(one.name, "") or (_paragraph(inner) if inner else "")
        facts = {"type": code(_type_of(hints[one.name])), "default": _default(one, inner)}
        yield Entry(f"{path}{one.name}", sentence, facts)
        if inner is not None:
            yield from _entries(inner, f"{path}{one.name}{_below(hints[one.name], inner)}.")


def _type_of(hint: Any) -> str:
    """Return a type as authors of files need it: `mapping` or an enumeration's values, not a class name."""
    inner = get_args(hint)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return " | ".join(str(one.value) for one in hint)
    if dataclasses.is_dataclass(hint) or get_origin(hint) in (dict, Mapping):
        return "mapping"
    if get_origin(hint) in (list, tuple):
        return f"list[{_type_of(inner[0])}]"
    if inner:
        return " | ".join(_type_of(one) for one in inner if one != "")
    return "None" if hint is NoneType else text_of(hint)


def _below(hint: Any, inner: type[Any]) -> str:
    """Return the suffix of a path: `[]` for a list, `.*` for a mapping."""
    if hint is inner:
        return ""
    text = str(hint)
    return ".*" if "Mapping" in text else "[]" if "tuple" in text or "list" in text else ""


def _default(one: dataclasses.Field[Any], inner: type[Any] | None) -> str:
    default = default_of(one)
    if default is dataclasses.MISSING:
        return "required"
    if inner is not None or default is None or default in ("", (), [], {}):
        return ""
    return code({True: "true", False: "false"}[default] if isinstance(default, bool) else default)


def _paragraph(cls: type[Any]) -> str:
    return " ".join(inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0].split())
