"""The strict loader: nothing is dropped, every error names the field and what would be right."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest
from pydantic import Field

from kintsugi.core.errors import InvalidField, UnknownField
from kintsugi.core.schema import STRICT, load


@dataclass(frozen=True)
class Tier:
    path: str
    capacity_bytes: Annotated[int, Field(gt=0)] = 1024


@dataclass(frozen=True)
class Config:
    __pydantic_config__ = STRICT

    name: str
    ratio: Annotated[float, Field(ge=0.0, le=1.0)] = 0.15
    tier: Tier | None = None
    tiers: list[Tier] = field(default_factory=list)
    by_name: dict[str, Tier] = field(default_factory=dict)
    shares: tuple[float, ...] = ()
    is_shared: bool | None = None
    biases: dict[int, float] = field(default_factory=dict)


def test_values_and_defaults() -> None:
    values = {"name": "a", "tier": {"path": "/x"}, "tiers": [{"path": "/y", "capacity_bytes": 7}]}
    assert load(Config, values) == Config("a", tier=Tier("/x"), tiers=[Tier("/y", 7)])


@pytest.mark.parametrize(
    ("values", "where", "nearest"),
    [
        ({"name": "a", "ratoi": 0.1}, "ratoi", "ratio"),
        ({"nam": "a"}, "nam", "name"),
        ({"name": "a", "tier": {"path": "/", "capacity": 1}}, "tier.capacity", "capacity_bytes"),
        ({"name": "a", "tiers": [{"path": "/"}, {"pth": "/"}]}, "tiers.1.pth", "path"),
        ({"name": "a", "by_name": {"fast": {"path": "/", "pat": 1}}}, "by_name.fast.pat", "path"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest_name(
    values: dict[str, Any], where: str, nearest: str
) -> None:
    with pytest.raises(UnknownField, match=f"did you mean '{nearest}'") as raised:
        load(Config, values, where="config")
    assert raised.value.field == f"config.{where}"
    assert raised.value.nearest == nearest


def test_a_key_like_no_other_is_answered_with_all_names() -> None:
    with pytest.raises(UnknownField, match="valid names are capacity_bytes, path") as raised:
        load(Config, {"name": "a", "tier": {"path": "/", "zzzzz": 1}})
    assert raised.value.nearest is None


@pytest.mark.parametrize(
    ("values", "where", "problem"),
    [
        ({"name": "a", "ratio": 1.5}, "ratio", "less than or equal to 1"),
        ({"name": "a", "ratio": float("nan")}, "ratio", "1"),
        ({"name": "a", "tier": {"path": "/", "capacity_bytes": 0}}, "tier.capacity_bytes", "greater than 0"),
        ({"name": 3}, "name", "string"),
        ({"ratio": 0.1}, "name", "is mandatory"),
        ({1: "a", "name": "a"}, "1", "keys should be strings"),
        ({"name": "a", "tier": {}}, "tier.path", "is mandatory"),
    ],
)
def test_a_bad_value_is_named(values: dict[Any, Any], where: str, problem: str) -> None:
    with pytest.raises(InvalidField, match=problem) as raised:
        load(Config, values)
    assert raised.value.field == where


@pytest.mark.parametrize(
    ("values", "where"),
    [
        ({"ratio": True}, "ratio"),
        ({"ratio": "0.5"}, "ratio"),
        ({"tier": {"path": "/", "capacity_bytes": True}}, "tier.capacity_bytes"),
        ({"tier": {"path": "/", "capacity_bytes": 7.0}}, "tier.capacity_bytes"),
        ({"tiers": [{"path": "/", "capacity_bytes": "7"}]}, "tiers.0.capacity_bytes"),
        ({"by_name": {"a": {"path": "/", "capacity_bytes": False}}}, "by_name.a.capacity_bytes"),
        ({"shares": [0.5, True]}, "shares.1"),
        ({"is_shared": 1}, "is_shared"),
        ({"is_shared": "yes"}, "is_shared"),
        ({"biases": {"5": True}}, "biases.5"),
    ],
)
def test_a_value_of_another_type_is_not_converted(values: dict[str, Any], where: str) -> None:
    with pytest.raises(InvalidField, match="input should be a valid") as raised:
        load(Config, {"name": "a", **values})
    assert raised.value.field == where


def test_whole_numbers_are_numbers_and_keys_are_texts() -> None:
    loaded = load(Config, {"name": "a", "ratio": 1, "shares": [1, 0.5], "biases": {"5": 2}})
    assert (loaded.ratio, loaded.shares, loaded.biases) == (1.0, (1.0, 0.5), {5: 2.0})


def test_texts_are_converted_where_all_values_are_texts() -> None:
    loaded = load(Config, {"name": "a", "ratio": "0.5", "is_shared": "true"}, are_texts=True)
    assert (loaded.ratio, loaded.is_shared) == (0.5, True)


@pytest.mark.parametrize("values", [None, [], "name", 3])
def test_only_mappings_are_read(values: Any) -> None:
    with pytest.raises(InvalidField, match="expected a mapping") as raised:
        load(Config, values)
    assert raised.value.field == "Config"


def test_a_dataclass_that_would_drop_keys_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="STRICT"):
        load(Tier, {"path": "/"})
