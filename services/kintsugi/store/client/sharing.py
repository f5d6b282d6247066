"""From which shard a client reads a chunk whose reads several shards share.

The chunk's first owner says how many do. A client then reads from one of them, drawn at random, and asks the
first owner again from time to time. If the drawn shard does not have the chunk, the owners are asked as for
any other chunk, so a wrong number costs a call and never a hit.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

from kintsugi.core.held import Held
from kintsugi.core.spaces import ChunkKey
from kintsugi.store.client.directory import ShardAddress, ShardMap

ASKED_AGAIN = 1 / 64
"""Share of the lookups for which a client asks the first owner again. That owner then gets at most twice the
reads of each of 64 others."""
DRAWN_BYTES_MAX = 4 << 20
"""Memory for the drawn shards: 8,000 chunks."""


class SharedReads:
    """The shards that one client has drawn. Thread-safe."""

    def __init__(self, chance: random.Random | None = None) -> None:
        self._chance = chance or random.Random()
        self._lock = threading.Lock()
        self._drawn: Held[ChunkKey, tuple[int, int]] = Held(DRAWN_BYTES_MAX)
        """For each chunk, how many shards share its reads, and the rank of the drawn one among its owners."""

    def rank(self, namespace: str, key: ChunkKey) -> int:
        """Return the rank of the shard to read a chunk from, among its owners; 0: the first owner."""
        return self._drawn.get(namespace, key, (1, 0))[1]

    def rank_to_ask(self, namespace: str, key: ChunkKey) -> int:
        """Like `rank`, for a lookup, whose answer goes to `learn`."""
        with self._lock:
            if self._drawn.get(namespace, key) and self._chance.random() < ASKED_AGAIN:
                self._drawn.pop(namespace, key)
            return self.rank(namespace, key)

    def learn(self, namespace: str, key: ChunkKey, width: int) -> None:
        """Note that the owners answered that `width` shards share a chunk's reads; 0 or 1: none but them.
        Call it after an answer that has a width, or that did not come from the drawn shard."""
        with self._lock:
            drawn = self._drawn.get(namespace, key)
            if width <= 1:
                if drawn:
                    self._drawn.pop(namespace, key)
            elif drawn != (width, 0):  # keep a first owner that was drawn, or it gets fewer reads than others
                self._drawn.put(namespace, key, (width, self._chance.randrange(width)))


def order_owners(
    shards: ShardMap, keys: Sequence[ChunkKey], ranks: Sequence[int]
) -> list[list[ShardAddress]]:
    """Return the shards to read each chunk from, in order: the one with the chunk's rank, then the chunk's
    owners."""
    ranked = shards.owners_of_each(keys, width=max(ranks, default=0) + 1)
    return [
        list(dict.fromkeys((*every[rank : rank + 1], *every[: shards.replicas])))
        for every, rank in zip(ranked, ranks, strict=True)
    ]
