"""Which shard sends which chunk where. Pure.

Every shard decides for the chunks that it holds, from what the others answer. They agree without speaking to
each other: the first owner that has a chunk sends it to those that lack it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from kintsugi.core.spaces import ChunkKey
from kintsugi.store.client.directory import ShardAddress, ShardMap


def owners_of(shards: ShardMap, key: ChunkKey) -> list[ShardAddress]:
    """The shards that are to hold a chunk: those that own it now, and those that will once every shard is
    given all its chunks."""
    now, then = shards.owners(key), replace(shards, shares=()).owners(key)
    return list(dict.fromkeys((*now, *then)))


def receivers_of(
    owners: Sequence[ShardAddress],
    me: str,
    holders: Collection[ShardAddress],
    silent: Collection[ShardAddress],
) -> list[ShardAddress]:
    """The owners to which shard `me`, which has the chunk, sends it.

    `holders`: the other owners that have it. `silent`: those that did not answer; nothing is sent to them,
    and who is first counts without them.
    """
    first = next((owner for owner in owners if owner.shard_id == me or owner in holders), None)
    if first is not None and first.shard_id != me:
        return []
    lacking = [owner for owner in owners if owner.shard_id != me and owner not in holders]
    return [owner for owner in lacking if owner not in silent]
