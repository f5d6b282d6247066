"""A tier below RAM, as those know it who read chunks from it."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kintsugi.store.shard.entry import ChunkEntry, CopyTier, Residence
from kintsugi.store.shard.eviction.policy import EvictionPolicy

READ_RATE_WEIGHT = 0.1
TOUCHES_REPLAYED_MAX = 3
"""Touches replayed for a chunk that was used before a restart: S3-FIFO counts no further."""


@dataclass(frozen=True)
class Recovered:
    """What a catalog held at start-up."""

    entries: Sequence[ChunkEntry]
    damaged: int
    """Records that were dropped: a wrong checksum, or frames that are not where they should be."""


class LowerTier(CopyTier):
    """An SSD tier or a bucket."""

    def __init__(
        self, name: str, folder: Path, make_policy: Callable[[], EvictionPolicy[ChunkEntry]]
    ) -> None:
        """`folder`: of the catalog."""
        super().__init__(name, make_policy)
        self.folder = folder
        self.read_bytes_per_s = 0.0
        """Moving average over recent reads, from a measurement on."""
        self.failure = ""
        """Why the last write failed; empty: it did not."""
        self.read_failure = ""
        """Why the last read failed; empty: it did not."""

    @abstractmethod
    def read(self, residence: Residence, first: int, frames: Sequence[memoryview]) -> None:
        """Fill padded frames from `first` on. Raises `OSError` where the tier cannot be read now, `Corrupted`
        where the frames are lost."""

    def _note_read(self, num_bytes: int, began_s: float) -> None:
        """A read has ended well. `began_s`: as `time.perf_counter` had it."""
        self.read_failure = ""
        rate = num_bytes / max(time.perf_counter() - began_s, 1e-6)
        self.read_bytes_per_s += READ_RATE_WEIGHT * (rate - self.read_bytes_per_s)

    def _admit_by_use(self, entries: Iterable[ChunkEntry]) -> None:
        """Replay the past to the policy: oldest use first, a few touches for chunks that were used often."""
        for entry in sorted(entries, key=lambda entry: entry.used_at_s):
            self.admit(entry)
            for _ in range(min(entry.uses, TOUCHES_REPLAYED_MAX)):
                self.policy.touch(entry)
