"""Comma-separated options."""

from __future__ import annotations

from kintsugi.core.errors import InvalidField
from kintsugi.core.request import SelectorName, parse_selector


def integers(name: str, text: str) -> list[int]:
    """`1,2,3`; empty text is an empty list. Raises `InvalidField`."""
    try:
        return [int(part) for part in _parts(text)]
    except ValueError:
        raise InvalidField(name, f"{text!r} is not a comma-separated list of whole numbers") from None


def floats(name: str, text: str) -> list[float]:
    """`0.1,0.2`; empty text is an empty list. Raises `InvalidField`."""
    try:
        return [float(part) for part in _parts(text)]
    except ValueError:
        raise InvalidField(name, f"{text!r} is not a comma-separated list of numbers") from None


def selector_names(text: str) -> list[SelectorName]:
    """`hkvd,query`. Raises `InvalidField`."""
    return [parse_selector(part) for part in _parts(text)]


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
