"""Eviction policies by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kintsugi.core.errors import InvalidField
from kintsugi.store.policy import EvictionPolicy, Lru

POLICIES: dict[str, Callable[[int], EvictionPolicy[Any]]] = {"lru": Lru}


def policy_factory(name: str) -> Callable[[int], EvictionPolicy[Any]]:
    """Makes the policy for a tier of so many bytes. Raises `InvalidField` for a name that none has."""
    factory = POLICIES.get(name)
    if factory is None:
        raise InvalidField("policy", f"{name!r} is not one of {', '.join(sorted(POLICIES))}")
    return factory
