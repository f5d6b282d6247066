"""Bounds stand in the fields: they are enforced, narrowed, and left out of what is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import pytest

from kintsugi.core.errors import InvalidField
from kintsugi.core.schema import load
from kintsugi.core.settings import (
    Pattern,
    Rule,
    Settings,
    bounds_of,
    check,
    convert_settings,
    non_default_fields,
    plain,
    setting,
    this,
)


@dataclass(frozen=True)
class Item(Settings):
    name: str = setting(pattern=Pattern("^[a-z]+$", "must hold a-z only"), maxLength=3)
    size: float = setting(1.0, exclusiveMinimum=0)


@dataclass(frozen=True)
class Common(Settings):
    RULES = (Rule(this.copies <= this.count, "copies must not exceed count", "copies"),)

    count: int = setting(1, minimum=1)
    copies: int = setting(1, minimum=1)
    part: Item = field(default_factory=lambda: Item("a"))


@dataclass(frozen=True)
class Wide(Common):
    mode: str = setting("on", enum=("on", "off"))
    items: tuple[Item, ...] = setting((), maxItems=2, mapKey="name")
    ports: tuple[int, ...] = setting((80,), minItems=1, items={"minimum": 1, "maximum": 99})
    extra: Mapping[str, Any] = setting(dict, reserved=("model",), maxProperties=2)
    tags: Mapping[str, str] = setting(dict, items={"maxLength": 2})
    note: str | None = setting(None, minLength=1)


@dataclass(frozen=True)
class Narrow(Common):
    NARROWED: ClassVar = {"count": {"maximum": 2}}

    other: bool = False


def test_a_pattern_is_told_in_words() -> None:
    """By both who may find the mistake: what loads a file, and what checks the settings."""
    said = "'A' must hold a-z only"
    with pytest.raises(InvalidField, match=said):
        load(Item, {"name": "A"})
    with pytest.raises(InvalidField, match=said):
        check(Item("A"))
    check(Item("a"))
    assert Pattern("^a+$", "must be a").or_empty() == "^(a+)?$"


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        (Wide(count=0), "x.count"),
        (Wide(copies=2), "x.copies"),
        (Narrow(count=3), "x.count"),
        (Wide(part=Item("A")), "x.part.name"),
        (Wide(part=Item("abcd")), "x.part.name"),
        (Wide(part=Item("a\n")), "x.part.name"),
        (Wide(part=Item("a", 0.0)), "x.part.size"),
        (Wide(part=Item("a", float("nan"))), "x.part.size"),
        (Wide(part=Item("a", float("inf"))), "x.part.size"),
        (Wide(mode="maybe"), "x.mode"),
        (Wide(items=(Item("a"), Item("b"), Item("c"))), "x.items"),
        (Wide(items=(Item("a"), Item("a"))), "x.items.1.name"),
        (Wide(items=(Item("a"), Item("b", -1))), "x.items.1.size"),
        (Wide(ports=()), "x.ports"),
        (Wide(ports=(80, 100)), "x.ports.1"),
        (Wide(extra={"model": 1}), "x.extra.model"),
        (Wide(extra={"a": 1, "b": 2, "c": 3}), "x.extra"),
        (Wide(tags={"a": "long"}), "x.tags.a"),
        (Wide(note=""), "x.note"),
    ],
)
def test_what_breaks_a_bound_is_named(settings: Settings, where: str) -> None:
    with pytest.raises(InvalidField) as raised:
        check(settings, "x")
    assert raised.value.field == where


def test_what_keeps_its_bounds_passes() -> None:
    check(Wide(count=3, copies=2, items=(Item("a"), Item("b")), extra={"a": 1}, tags={"a": "b"}, note="n"))
    check(Narrow(count=2, copies=2))


def test_a_minimum_takes_the_place_of_an_exclusive_one() -> None:
    @dataclass(frozen=True)
    class Large(Item):
        NARROWED: ClassVar = {"size": {"minimum": 1}}

    size = fields(Large)[1]
    assert bounds_of(Large, size) == {"minimum": 1}
    assert bounds_of(Item, size) == {"exclusiveMinimum": 0}


def test_only_what_differs_from_its_default_is_written() -> None:
    assert non_default_fields(Wide()) == {}
    changed = Wide(count=2, part=Item("a", 2.0), items=(Item("b"),), note="n")
    assert non_default_fields(changed, "note") == {
        "count": 2,
        "part": {"name": "a", "size": 2.0},
        "items": [{"name": "b"}],
    }
    assert plain(Wide())["ports"] == [80]


def test_settings_of_one_class_become_those_of_another() -> None:
    narrow = Narrow(count=2, part=Item("b"), other=True)
    assert convert_settings(Wide, narrow, mode="off") == Wide(count=2, part=Item("b"), mode="off")
