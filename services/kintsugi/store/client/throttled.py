"""A store whose bytes arrive at a given rate: a slower tier than the machine has, for measuring."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from kintsugi.core.layout import HeadRange
from kintsugi.core.spaces import ChunkKey
from kintsugi.core.stream import ChunkLost, LayerFrame
from kintsugi.store.client.ram import RamStore


class ThrottledStore(RamStore):
    """Memory read no faster than `bytes_per_s`, each stream on its own. Everything else costs nothing."""

    def __init__(self, bytes_per_s: float) -> None:
        super().__init__()
        self.bytes_per_s = bytes_per_s

    def stream(
        self,
        namespace: str,
        keys: Sequence[ChunkKey],
        layers: range,
        heads: HeadRange,
        deadline_s: float,
    ) -> Iterator[LayerFrame | ChunkLost]:
        due_s = time.perf_counter()
        for item in super().stream(namespace, keys, layers, heads, deadline_s):
            if isinstance(item, LayerFrame):
                due_s += len(item.data) / self.bytes_per_s
                time.sleep(max(0.0, due_s - time.perf_counter()))
            yield item
