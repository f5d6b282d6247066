"""Measures a stream of frames at its consumer: how long each source kept the loader waiting.

Only the layers that the loader takes without waiting for room are measured: later ones may have arrived while
it waited and would make the source look faster than it is. Cost: two clock readings per frame.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kintsugi.core.plan import ChunkSource
from kintsugi.core.stream import ChunkLost, LayerFrame
from kintsugi.fusor.control.estimates import Transfer

Frames = Iterator[LayerFrame | ChunkLost]


@dataclass
class _Sum:
    opening_s: float
    opening_bytes: int
    wait_s: float = 0.0
    num_bytes: int = 0


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
    _sums: dict[ChunkSource, _Sum] = field(default_factory=dict)

    def measure(self, frames: Frames) -> Frames:
        """Yield the same frames, measured. Closes `frames`."""
        try:
            yield from self._measure_frames(frames)
        finally:
            close = getattr(frames, "close", None)
            if close is not None:
                close()

    def _measure_frames(self, frames: Frames) -> Frames:
        while True:
            asked = self.clock()
            item = next(frames, None)
            if item is None:
                return
            arrived = self.clock()
            yield item
            if isinstance(item, ChunkLost) or item.layer >= self.layers_max:
                continue
            self._add(self.sources[item.chunk], arrived - asked, len(item.data))
            if item.layer < self.layers_max - 1:  # after the last one, the loader may have waited for room
                self.decode_s += self.clock() - arrived
                self.decode_bytes += len(item.data)

    def _add(self, source: ChunkSource, seconds: float, num_bytes: int) -> None:
        known = self._sums.get(source)
        if known is None:
            self._sums[source] = _Sum(seconds, num_bytes)
        else:
            known.wait_s += seconds
            known.num_bytes += num_bytes

    @property
    def transfers(self) -> list[Transfer]:
        return [
            Transfer(source, part.opening_s, part.opening_bytes, part.wait_s, part.num_bytes)
            for source, part in self._sums.items()
        ]
