"""Eviction policies by name."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from kintsugi.core.errors import InvalidField
from kintsugi.store.shard.eviction.gdsf import Gdsf
from kintsugi.store.shard.eviction.policy import EvictionPolicy, Lru, itself
from kintsugi.store.shard.eviction.s3fifo import S3Fifo

POLICIES: dict[str, type[Lru[Any]] | type[S3Fifo[Any]] | type[Gdsf[Any]]] = {
    "lru": Lru,
    "s3fifo": S3Fifo,
    "gdsf": Gdsf,
}
DEFAULT_POLICY = "s3fifo"


def policy_factory(
    name: str, identity: Callable[[Any], Hashable] = itself
) -> Callable[[int], EvictionPolicy[Any]]:
    """A function from a tier's capacity in bytes to its policy. Raises `InvalidField` for an unknown name.

    `identity` names an item across its lives; the default is for items that have only one.
    """
    policy = POLICIES.get(name)
    if policy is None:
        raise InvalidField("policy", f"{name!r} is not one of {', '.join(sorted(POLICIES))}")
    return lambda capacity_bytes: policy(capacity_bytes, identity)
