"""Decides which shard sends which chunk to which shard. Pure.

Every shard decides about the chunks that it holds, from the answers of the other owners. No coordination is
needed: the first owner that has a chunk sends it to the owners that lack it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from kintsugi.core.spaces import ChunkKey
from kintsugi.store.client.directory import ShardAddress, ShardMap


def owners_of(shards: ShardMap, key: ChunkKey) -> list[ShardAddress]:
    """Return the shards that should hold a chunk: its owners now, and its owners as soon as every shard owns
    its full share."""
    now, then = shards.owners(key), replace(shards, shares=()).owners(key)
    return list(dict.fromkeys((*now, *then)))


def receivers_of(
    owners: Sequence[ShardAddress],
    me: str,
    holders: Collection[ShardAddress],
    silent: Collection[ShardAddress],
) -> list[ShardAddress]:
    """Return the owners to which shard `me`, which has the chunk, sends it.

    `holders` are the other owners that have the chunk. `silent` are the owners that did not answer: they
    receive nothing and do not count as the first owner."""
    first = next((owner for owner in owners if owner.shard_id == me or owner in holders), None)
    if first is not None and first.shard_id != me:
        return []
    lacking = [owner for owner in owners if owner.shard_id != me and owner not in holders]
    return [owner for owner in lacking if owner not in silent]
