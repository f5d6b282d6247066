"""Measures a stream of frames at its consumer: how long each source kept the loader waiting.

Only the layers that the loader takes without waiting for room are measured: later ones may have arrived while
it waited and would make the source look faster than it is. Cost: two clock readings per frame.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from kintsugi.core.layout import ChunkLost, LayerFrame
from kintsugi.core.plan import ChunkSource
from kintsugi.fusor.control.estimates import Transfer

Frames = Iterator[LayerFrame | ChunkLost]


@dataclass
class Meter:
    """The cost of one stream so far. The loader's thread writes it; others read it after that thread or the
    pass has ended, and may miss the newest frame."""

    sources: Sequence[ChunkSource]
    """The source of each chunk of the stream."""
    layers_max: int
    clock: Callable[[], float] = time.perf_counter
    decode_s: float = 0.0
    """Seconds that the consumer spent on the frames."""
    decode_bytes: int = 0
    _transfers: dict[ChunkSource, Transfer] = field(default_factory=dict)

    def measure(self, frames: Frames) -> Frames:
        """Yield the same frames, measured. Closes `frames`."""
        try:
            asked = self.clock()
            for item in frames:
                arrived = self.clock()
                yield item
                if isinstance(item, LayerFrame) and item.layer < self.layers_max:
                    self._add(self.sources[item.chunk], arrived - asked, len(item.data))
                    if item.layer < self.layers_max - 1:  # after the last, the loader may wait for room
                        self.decode_s += self.clock() - arrived
                        self.decode_bytes += len(item.data)
                asked = self.clock()
        finally:
            close = getattr(frames, "close", None)
            if close is not None:
                close()

    def _add(self, source: ChunkSource, seconds: float, num_bytes: int) -> None:
        known = self._transfers.get(source)
        if known is None:
            self._transfers[source] = Transfer(source, seconds, num_bytes)
        else:
            known.wait_s += seconds
            known.num_bytes += num_bytes

    @property
    def transfers(self) -> list[Transfer]:
        return [replace(transfer) for transfer in self._transfers.values()]
