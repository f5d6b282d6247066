"""What Python code imports: names by path, the signatures of public classes, the tree of errors."""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import re
import textwrap
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import kintsugi
from kintsugi.core import errors

CLASSES = (
    "kintsugi:AsyncClient",
    "kintsugi:Client",
    "kintsugi:ClientOptions",
    "kintsugi:DocumentChunk",
    "kintsugi:Key",
    "kintsugi:Plain",
    "kintsugi:Sampling",
    "kintsugi:Tokens",
    "kintsugi.sdk.client:GenerateOptions",
    "kintsugi.sdk.types:Answer",
    "kintsugi.sdk.types:Delta",
    "kintsugi.sdk.types:PlacedSegment",
    "kintsugi.sdk.types:Prefetched",
    "kintsugi.sdk.types:PutChunk",
    "kintsugi.sdk.types:StoredChunk",
    "kintsugi.sdk.types:TokenizedText",
    "kintsugi.sdk.types:Usage",
    "kintsugi.precompute.chunking:Chunker",
    "kintsugi.precompute.chunking:ChunkingConfig",
    "kintsugi.sdk.langchain:KintsugiTextSplitter",
    "kintsugi.sdk.llama_index:KintsugiNodeParser",
    "kintsugi.sdk.llama_index:KintsugiPromptHelper",
    "kintsugi.core.plan:Selection",
    "kintsugi.core.report:Binding",
    "kintsugi.core.request:KintsugiParams",
    "kintsugi.core.request:Op",
    "kintsugi.core.request:SelectorName",
    "kintsugi.core.spaces:ChunkKey",
    "kintsugi.core.spaces:ChunkSpace",
    "kintsugi.core.spaces:ModelFingerprint",
    "kintsugi.core.spaces:Span",
    "kintsugi.engine.local:Generation",
    "kintsugi.engine.local:LocalEngine",
    "kintsugi.engine.local:Prompt",
)
"""The SDK, the engine in one's own process, what they take and give, and what the examples import."""

OTHERS = (
    "kintsugi:__version__",
    "kintsugi.sdk.types:Segment",
    "kintsugi.rpc.v1.gateway_pb2:GenerateRequest",
    "kintsugi.rpc.v1.gateway_pb2_grpc:KintsugiStub",
)
"""Importable too; their shape is another part's, or that of a plain value."""

_SPECIAL = ("__enter__", "__exit__", "__aenter__", "__aexit__", "__iter__", "__len__", "__call__")
_QUALIFIER = re.compile(r"\b(?:[A-Za-z_]\w*\.)+(?=[A-Za-z_])")


def surface() -> dict[str, Any]:
    return {
        "importable from kintsugi": sorted(set(_exported())),
        "importable": {path: _resolves(path) for path in OTHERS},
        "classes": {path: class_of(_found(path)) for path in CLASSES},
        "errors": {error.__name__: _error(error) for error in _error_tree()},
    }


def _exported() -> Iterator[str]:
    """`from a import B as B`, whether at run time or for type checkers alone, and `__all__`."""
    yield from getattr(kintsugi, "__all__", ())
    for node in ast.walk(ast.parse(inspect.getsource(kintsugi))):
        if isinstance(node, ast.ImportFrom):
            yield from (name.name for name in node.names if name.asname == name.name)


def _found(path: str) -> Any:
    module, name = path.split(":")
    return getattr(import_module(module), name)


def _resolves(path: str) -> bool:
    return _found(path) is not None


def class_of(cls: type[Any]) -> dict[str, Any]:
    """Constructor, fields, public methods and properties of a class, inherited ones of ours included."""
    if issubclass(cls, enum.Enum):
        return {"values": {member.name: member.value for member in cls}}
    if hasattr(cls, "__total__"):
        return {"keys": {name: text_of(kind) for name, kind in cls.__annotations__.items()}}
    if dataclasses.is_dataclass(cls):
        found: dict[str, Any] = {"fields": fields_of(cls)}
    elif _is_ours(cls.__init__):
        found = {"constructor": signature_of(cls.__init__), "attributes": attributes_of(cls)}
    else:
        found = {
            "keywords": {name: text_of(kind) for name, kind in cls.__annotations__.items() if name[0] != "_"}
        }
    for name in sorted(_own_names(cls)):
        value = inspect.getattr_static(cls, name)
        if isinstance(value, property):
            assert value.fget is not None
            found.setdefault("properties", {})[name] = signature_of(value.fget)
        elif _is_ours(getattr(cls, name)):
            found.setdefault("methods", {})[name] = f"{_kind(value)}{signature_of(getattr(cls, name))}"
    return found


def _is_ours(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).split(".")[0] == "kintsugi"


def attributes_of(cls: type[Any]) -> list[str]:
    """Public names that constructors of ours assign to."""
    found = set()
    for base in cls.__mro__:
        if _is_ours(base) and "__init__" in vars(base):
            for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(vars(base)["__init__"])))):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    found |= {node.attr} if not node.attr.startswith("_") else set()
    return sorted(found)


def _own_names(cls: type[Any]) -> Iterator[str]:
    fields = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    for base in cls.__mro__:
        if _is_ours(base):
            names = (name for name in vars(base) if not name.startswith("_") or name in _SPECIAL)
            yield from {*names} - fields


def _kind(value: Any) -> str:
    prefix = {staticmethod: "static ", classmethod: "class "}.get(type(value), "")
    function = getattr(value, "__func__", value)
    is_async = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
    return f"{prefix}async " if is_async else prefix


def signature_of(function: Any) -> str:
    """Parameters with kinds, defaults and annotations, without module paths."""
    signature = inspect.signature(function)
    parameters = [
        parameter.replace(annotation=_Text(text_of(parameter.annotation)), default=_shown(parameter.default))
        if parameter.annotation is not inspect.Parameter.empty
        else parameter.replace(default=_shown(parameter.default))
        for parameter in signature.parameters.values()
    ]
    returned = signature.return_annotation
    if returned is not inspect.Signature.empty:
        returned = _Text(text_of(returned))
    return str(signature.replace(parameters=parameters, return_annotation=returned))


class _Text:
    """Shown in a signature as it stands."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def text_of(annotation: Any) -> str:
    """An annotation without module paths: `Sequence[Segment]`."""
    text = annotation if isinstance(annotation, str) else None
    if text is None:
        text = getattr(annotation, "__forward_arg__", None) or inspect.formatannotation(annotation)
    return _QUALIFIER.sub("", text)


def _shown(default: Any) -> Any:
    if default is inspect.Parameter.empty:
        return default
    return _Text(_QUALIFIER.sub("", repr(default)) if isinstance(default, type) else repr(default))


def fields_of(cls: type[Any]) -> dict[str, str]:
    """Type and default of each field of a dataclass that its constructor takes."""
    found = {}
    for field in dataclasses.fields(cls):
        default: Any = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        kind = text_of(field.type)
        found[field.name] = kind if default is dataclasses.MISSING else f"{kind} = {default!r}"
    return found


def _error_tree() -> list[type[errors.KintsugiError]]:
    """Every error that the one module of errors offers."""
    names = [getattr(errors, name) for name in dir(errors) if not name.startswith("_")]
    return [one for one in names if isinstance(one, type) and issubclass(one, errors.KintsugiError)]


def _error(error: type[errors.KintsugiError]) -> dict[str, Any]:
    found: dict[str, Any] = {"bases": [base.__name__ for base in error.__bases__]}
    if not _is_ours(error.__init__):
        return found
    return {**found, "constructor": signature_of(error.__init__), "attributes": attributes_of(error)}
