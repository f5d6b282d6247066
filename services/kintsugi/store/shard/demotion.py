"""What an SSD tier evicts: on to the next tier, or out of the store."""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Callable, Mapping, Sequence

import lmdb

from kintsugi.core.errors import Corrupted
from kintsugi.store.shard.entry import ChunkEntry, Residence
from kintsugi.store.shard.tiers.disk_tier import DiskTier, runs_of
from kintsugi.store.shard.writeback import WriteBack

log = logging.getLogger(__name__)

_BOUNCE_BYTES = 4 << 20


class Demoter:
    """Runs in the thread of the tier that evicts; the copy exists in both tiers before it leaves one."""

    def __init__(
        self,
        lock: threading.RLock,
        next_of: Mapping[DiskTier, WriteBack],
        forget: Callable[[ChunkEntry], None],
    ) -> None:
        self._lock = lock
        self._next_of = next_of
        """Writer of the tier behind each but the last."""
        self._forget = forget
        """Drop an entry that no tier holds. Under the lock."""

    def demote(self, victims: Sequence[ChunkEntry], tier: DiskTier) -> None:
        """Unlink `victims` from `tier`. Those that RAM does not hold either go one tier down, or away."""
        writer = self._next_of.get(tier)
        placed: dict[ChunkEntry, Residence] = {}
        if writer is not None:
            try:
                placed = self._copy_to_tier(victims, tier, writer)
            except (OSError, lmdb.Error) as error:
                log.error("%s: demotion to %s failed: %s", tier.name, writer.tier.name, error)
        with self._lock:
            for entry in victims:
                target = placed.get(entry)
                promoting = entry.ram is not None and entry.ram.unloaded
                if entry.gone or entry.disk is None or promoting:
                    if target is not None and writer is not None:
                        writer.tier.discard(target)
                    if promoting and entry.disk is not None:  # RAM does not hold it yet: its source stays
                        tier.policy.admit(entry, entry.manifest.chunk_bytes, entry.recompute_ms)
                    continue
                tier.unlink(entry)
                if target is not None and writer is not None:
                    writer.tier.adopt(entry, target)
                elif entry.ram is None:
                    self._forget(entry)

    def _copy_to_tier(
        self, victims: Sequence[ChunkEntry], tier: DiskTier, writer: WriteBack
    ) -> dict[ChunkEntry, Residence]:
        """Committed copies in the next tier of what RAM does not hold. Raises `OSError`, `lmdb.Error`."""
        placed: dict[ChunkEntry, Residence] = {}
        try:
            for entry in victims:
                with self._lock:
                    source = None if entry.gone or entry.ram is not None else entry.disk
                    if source is not None:
                        source.acquire()
                if source is not None:
                    self._copy(entry, source, tier, writer, placed)
            if placed:
                writer.tier.slab.sync()
                writer.tier.commit(self._lock, list(placed.items()))
        except BaseException:
            with self._lock:
                for target in placed.values():
                    writer.tier.return_unwritten(target)
            raise
        return placed

    def _copy(
        self,
        entry: ChunkEntry,
        source: Residence,
        tier: DiskTier,
        writer: WriteBack,
        placed: dict[ChunkEntry, Residence],
    ) -> None:
        try:
            target = writer.room_for(entry)
            if target is None:
                return
            placed[entry] = target
            copy_frames(tier, source, writer.tier, target)
        except Corrupted as error:
            log.error("%s: %s", tier.name, error)
            with self._lock:
                writer.tier.return_unwritten(placed.pop(entry))
        finally:
            with self._lock:
                source.release()


def copy_frames(tier: DiskTier, source: Residence, other: DiskTier, target: Residence) -> None:
    """From slab to slab through a bounded buffer. Raises `OSError` and `Corrupted`."""
    stride = source.stride
    step = max(1, _BOUNCE_BYTES // stride)
    bounce = memoryview(mmap.mmap(-1, step * stride))
    for first in range(0, len(source.offsets), step):
        count = min(step, len(source.offsets) - first)
        frames = [bounce[i * stride : (i + 1) * stride] for i in range(count)]
        tier.read(source, first, frames)
        for start, stop in runs_of(target.offsets, stride, first, count):
            other.slab.write(target.offsets[start], frames[start - first : stop - first])
