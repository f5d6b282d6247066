"""What of the SDK lacks a docstring. Its page is made by mkdocstrings, which shows what is there."""

from __future__ import annotations

import dataclasses
import enum
import inspect
from collections.abc import Iterator
from typing import Any

from kintsugi_operator.api.crd import _docstrings, descriptions
from tests.unit.surface import python_api


def undocumented() -> Iterator[str]:
    """Yield public classes, fields, methods and properties without a sentence."""
    seen = set()
    for path in python_api.CLASSES:
        cls = python_api._found(path)
        if cls in seen:
            continue
        seen.add(cls)
        name = f"SDK: {cls.__module__}.{cls.__qualname__}"
        if not _own_docstring(cls):
            yield name
        yield from (f"{name}.{one}" for one in _members_without_docstring(cls))


def _own_docstring(cls: type[Any]) -> str:
    """A dataclass without one gets its signature from Python."""
    text = str(vars(cls).get("__doc__") or "")
    return "" if text.startswith(f"{cls.__name__}(") else text


def _members_without_docstring(cls: type[Any]) -> Iterator[str]:
    if issubclass(cls, enum.Enum):
        return
    if dataclasses.is_dataclass(cls):
        docs = descriptions(cls)
        yield from (one.name for one in dataclasses.fields(cls) if not docs.get(one.name))
    if hasattr(cls, "__total__"):
        yield from (name for name in cls.__annotations__ if not _docstrings(cls).get(name))
        return
    for name in sorted(set(python_api._own_names(cls))):
        value = inspect.getattr_static(cls, name)
        is_public = not name.startswith("_") and (isinstance(value, property) or callable(getattr(cls, name)))
        if is_public and not inspect.getdoc(value):
            yield name
