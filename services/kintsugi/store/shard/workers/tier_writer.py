"""Room and records on one SSD tier: what a full tier gives up moves to the next, or out of the store.

A chunk is committed in the next tier before its copy leaves this one.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Protocol

import lmdb

from kintsugi.core.errors import Corrupted
from kintsugi.store.shard.entry import ChunkEntry, Copying, Residence
from kintsugi.store.shard.table import EntryTable
from kintsugi.store.shard.tiers.disk_tier import DiskTier
from kintsugi.store.shard.work import Eviction

log = logging.getLogger(__name__)

_BOUNCE_BYTES = 4 << 20


class Below(Protocol):
    """Who takes what leaves an SSD tier."""

    @property
    def name(self) -> str:
        """Name of the tier that it writes to."""

    def copy_from(self, tier: DiskTier, evictions: Sequence[Eviction]) -> Mapping[Eviction, Residence]:
        """New copies of what leaves a faster tier, as far as there is room for them. Raises `OSError`,
        `lmdb.Error`; then there are none."""


class TierWriter:
    """Writes chunks to a tier, for the thread that asks. Any number of threads."""

    def __init__(
        self, table: EntryTable, tier: DiskTier, below: Below | None, above: Sequence[DiskTier] = ()
    ) -> None:
        """`below`: the writer of the next slower tier or of the bucket; None for the last. `above`: all
        faster tiers."""
        self.tier = tier
        self._table = table
        self._below = below
        self._above = above

    @property
    def name(self) -> str:
        return self.tier.name

    def find_room(self, entry: ChunkEntry) -> Residence | None:
        """Room for a chunk, after evicting what the policy gives up first; None where that is not enough.

        Raises `OSError`, `lmdb.Error`; what a slower tier then fails to take stays.
        """
        while True:
            residence = self.tier.allocate(entry)
            if residence is not None:
                return residence
            evictions = self._table.evict_from_disk(self.tier, entry.manifest.chunk_bytes)
            self.demote(evictions)
            if not self.tier.bury() and not evictions:
                return None

    def sync_and_commit(self, written: Sequence[tuple[Copying, Residence]], since: int) -> None:
        """Have the catalog name chunks whose frames were written, and those of faster tiers nothing older of
        their addresses. `since`: as in `Slab.sync`.

        Raises `OSError`, `lmdb.Error`; then this tier's catalog is as it was."""
        self.tier.slab.sync(since)
        for faster in self._above:
            faster.forget_older(one for one, _ in written)
        self.tier.commit(written)

    def demote(self, evictions: Sequence[Eviction]) -> None:
        """Drop the copies that leave the tier. They go one tier down, or away.

        Raises `OSError`, `lmdb.Error` if the next tier fails; then all of them stay, because chunks whose
        puts were acknowledged as durable may be nowhere else."""
        placed: Mapping[Eviction, Residence] = {}
        if self._below is not None:
            try:
                placed = self._below.copy_from(self.tier, evictions)
            except (OSError, lmdb.Error) as error:
                log.error("%s: demotion to %s failed: %s", self.tier.name, self._below.name, error)
                self._table.end_demotions(evictions, None)
                raise
        self._table.end_demotions(evictions, placed)

    def copy_from(self, tier: DiskTier, evictions: Sequence[Eviction]) -> Mapping[Eviction, Residence]:
        """Committed copies of what leaves a faster tier.

        Raises `OSError`, `lmdb.Error`; then there are none.
        """
        placed: dict[Eviction, Residence] = {}
        since = self.tier.slab.syncs_failed
        try:
            for eviction in evictions:
                if self._table.begin_copy(eviction):
                    try:
                        self._copy(tier, eviction, placed)
                    finally:
                        self._table.end_copy(eviction)
            if placed:
                self.sync_and_commit([*placed.items()], since)
                self.tier.failure = ""
        except BaseException as error:
            if isinstance(error, OSError | lmdb.Error):
                self.tier.failure = str(error)
            for target in placed.values():
                self.tier.return_unwritten(target)
            raise
        return placed

    def _copy(self, tier: DiskTier, eviction: Eviction, placed: dict[Eviction, Residence]) -> None:
        target = self.find_room(eviction.entry)
        if target is None:
            return
        placed[eviction] = target
        try:
            copy_frames(tier, eviction.source, partial(self.tier.write, target))
        except Corrupted as error:
            log.error("%s: %s", tier.name, error)
            self.tier.return_unwritten(placed.pop(eviction))


def copy_frames(
    tier: DiskTier, source: Residence, write: Callable[[Sequence[memoryview], int], None]
) -> None:
    """From a slab through a bounded buffer. `write` takes padded frames and the place of the first of them in
    the chunk. Raises `Corrupted` where the source cannot be read, and what `write` raises."""
    strides = source.strides
    frame_bytes_max = max(stride for stride, _ in strides.runs)
    bounce = memoryview(mmap.mmap(-1, min(max(_BOUNCE_BYTES, frame_bytes_max), strides.size_bytes)))
    first = 0
    while first < len(strides.each):
        stop = strides.stop_within(first, _BOUNCE_BYTES)
        ends = list(accumulate(strides.each[first:stop], initial=0))
        frames = [bounce[start:end] for start, end in pairwise(ends)]
        try:
            tier.read(source, first, frames)
        except OSError as error:
            raise Corrupted(f"a chunk cannot be read ({error})") from error
        write(frames, first)
        first = stop
