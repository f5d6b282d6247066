"""Who sends a chunk to whom. Pure."""

from __future__ import annotations

import pytest

from kintsugi.core.spaces import ChunkKey
from kintsugi.store.client.directory import ShardAddress, ShardMap
from kintsugi.store.replication import owners_of, receivers_of

A, B, C, D = (ShardAddress(name, f"{name}:1") for name in "abcd")


@pytest.mark.parametrize(
    ("me", "holders", "silent", "receivers"),
    [
        (A, [], [], [B, C]),
        (A, [B], [], [C]),
        (A, [B, C], [], []),
        (B, [A], [], []),
        (B, [C], [], [A]),
        (B, [], [A], [C]),
        (C, [], [A, B], []),
        (D, [], [], [A, B, C]),
        (D, [C], [], []),
        (D, [], [A], [B, C]),
    ],
)
def test_the_first_owner_that_has_a_chunk_sends_it_to_those_that_lack_it(
    me: ShardAddress, holders: list[ShardAddress], silent: list[ShardAddress], receivers: list[ShardAddress]
) -> None:
    assert receivers_of([A, B, C], me.shard_id, holders, silent) == receivers


def test_a_shard_that_is_still_given_little_is_sent_what_will_be_its_own() -> None:
    keys = [ChunkKey(i.to_bytes(32, "little")) for i in range(200)]
    ramping, full = ShardMap(1, (A, B), shares=(0.01, 1.0)), ShardMap(2, (A, B))
    later = [key for key in keys if full.owners(key) == [A] and ramping.owners(key) == [B]]
    assert len(later) > 50
    assert all(owners_of(ramping, key) == [B, A] for key in later)
    assert all(owners_of(full, key) == full.owners(key) for key in keys)
