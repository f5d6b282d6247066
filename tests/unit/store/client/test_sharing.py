"""Clients spread their reads of a hot chunk, and forget nothing that they need for it."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kintsugi.core.spaces import ChunkKey
from kintsugi.store.client.directory import ShardAddress, ShardMap
from kintsugi.store.client.sharing import ASKED_AGAIN, DRAWN_BYTES_MAX, SharedReads, order_owners

KEY = ChunkKey(bytes(32))


def ask(reads: SharedReads, width: int) -> int:
    """Look `KEY` up: its first owner tells `width`, the others have the chunk and tell nothing."""
    rank = reads.rank_to_ask("acme", KEY)
    if rank == 0:
        reads.learn("acme", KEY, width)
    return rank


@pytest.mark.parametrize("clients", [1, 3, 100])
@pytest.mark.parametrize("width", [2, 5, 64])
def test_every_shard_gets_its_part(width: int, clients: int) -> None:
    chance = random.Random(width * clients)
    fleet = [SharedReads(chance) for _ in range(clients)]
    reads = 600 * width
    asked = Counter(ask(client, width) for _ in range(reads // clients + 100) for client in fleet)
    total = asked.total()
    assert set(asked) == set(range(width))
    assert asked[0] <= total * (1.5 / width + 2 * ASKED_AGAIN)
    if clients == 100:
        assert min(asked.values()) >= total / width / 3


def test_a_client_that_reads_once_reads_from_the_first_owner() -> None:
    assert ask(SharedReads(), 64) == 0
    assert SharedReads().rank("acme", KEY) == 0


def test_what_the_first_owner_tells_is_followed() -> None:
    reads = SharedReads(random.Random(1))
    assert [ask(reads, 64) for _ in range(2)][1] > 0
    reads.learn("acme", KEY, 4)
    assert reads.rank("acme", KEY) < 4
    for nobody in (0, 1):
        reads.learn("acme", KEY, 64)
        reads.learn("acme", KEY, nobody)
        assert reads.rank("acme", KEY) == 0
    assert {ask(reads, 0) for _ in range(1000)} == {0}


def test_a_shard_that_lacks_the_chunk_is_left() -> None:
    """Then the first owner answers, and the client draws again."""
    reads = SharedReads(random.Random(1))
    drawn = set()
    for _ in range(50):
        reads.learn("acme", KEY, 8)
        drawn.add(reads.rank("acme", KEY))
        if reads.rank("acme", KEY) == 0:
            reads.learn("acme", KEY, 0)
    assert len(drawn) == 8


def test_the_memory_is_bounded() -> None:
    reads = SharedReads()
    for number in range(DRAWN_BYTES_MAX // 256):
        reads.learn(f"tenant-{number % 3}", ChunkKey(number.to_bytes(32, "little")), 2)
    assert reads._drawn.num_bytes <= DRAWN_BYTES_MAX


def test_the_owners_follow_the_drawn_shard() -> None:
    every = tuple(ShardAddress(f"shard-{number}", f"h:{number}") for number in range(9))
    keys = [ChunkKey(number.to_bytes(32, "little")) for number in range(50)]
    for shares in ((), tuple(0.1 * number for number in range(1, 10))):
        shards = ShardMap(1, every, 2, shares)
        ranks = [number % 12 for number in range(50)]
        for key, rank, order in zip(keys, ranks, order_owners(shards, keys, ranks), strict=True):
            wide = shards.owners(key, width=9)
            assert len(set(wide)) == 9
            assert wide[:2] == shards.owners(key)
            assert order == list(dict.fromkeys([*wide[rank : rank + 1], *wide[:2]]))
    assert order_owners(ShardMap(1), keys, ranks) == [[]] * 50
    assert order_owners(ShardMap(1, every[:1]), keys, ranks) == [[every[0]]] * 50
    assert order_owners(ShardMap(1, every), [], []) == []
