"""Eviction policies by name: LRU, S3-FIFO, and those that other distributions add."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from kintsugi.core.errors import InvalidField
from kintsugi.core.plugins import EVICTION_POLICIES, load_plugin, plugin_names
from kintsugi.store.shard.eviction.policy import EvictionPolicy, Lru, itself
from kintsugi.store.shard.eviction.s3fifo import S3Fifo

PolicyClass = Callable[[int, Callable[[Any], Hashable]], EvictionPolicy[Any]]

POLICIES: dict[str, PolicyClass] = {"lru": Lru, "s3fifo": S3Fifo}
DEFAULT_POLICY = "s3fifo"


def policy_factory(
    name: str, identity: Callable[[Any], Hashable] = itself
) -> Callable[[int], EvictionPolicy[Any]]:
    """A function from a tier's capacity in bytes to its policy. Raises `InvalidField` for an unknown name, or
    a policy of another distribution that cannot be loaded.

    `identity` names an item across its lives; the default is for items that have only one.
    """
    make = POLICIES.get(name)
    if make is None:
        added = plugin_names(EVICTION_POLICIES)
        if name not in added:
            raise InvalidField("policy", f"{name!r} is not one of {', '.join(sorted({*POLICIES, *added}))}")
        make = load_plugin(EVICTION_POLICIES, name, "policy", EvictionPolicy)
    return lambda capacity_bytes: make(capacity_bytes, identity)
