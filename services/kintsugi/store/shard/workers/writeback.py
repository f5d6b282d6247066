"""Writes chunks from RAM to an SSD tier, and moves chunks that a full tier gives up to the next one.

One thread per tier writes pending chunks in batches: their frames, one sync of the slab, one transaction. A
chunk is in the catalog only after its frames are on disk. A second thread syncs and commits a batch while the
first writes the next one; otherwise the disk would be idle a quarter of the time. Cost per byte: the disk's
own, straight from the arena; per batch, one fdatasync and one commit.

A demoted chunk is committed in the next tier before its copy leaves this one.
"""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import accumulate, pairwise
from typing import Protocol

import lmdb

from kintsugi.core.errors import Corrupted, KintsugiError, ResourceExhausted, Unavailable
from kintsugi.store.shard.entry import ChunkEntry, Copying, Residence, frames_bytes
from kintsugi.store.shard.table import EntryTable
from kintsugi.store.shard.tiers.disk_tier import DiskTier
from kintsugi.store.shard.tiers.ram_tier import Arena
from kintsugi.store.shard.work import Eviction, WriteBatch, WriteJob, WriteQueue, settle

log = logging.getLogger(__name__)

_BOUNCE_BYTES = 4 << 20
_Placed = tuple[WriteJob, Residence]
"""A job and where its frames are now."""


class Below(Protocol):
    """The writer that takes chunks which leave an SSD tier."""

    @property
    def name(self) -> str:
        """Name of the tier that it writes to."""

    def copy_from(self, tier: DiskTier, evictions: Sequence[Eviction]) -> Mapping[Eviction, Residence]:
        """Copy chunks that leave a faster tier, as far as there is room. Returns the new copies. Raises
        `OSError`, `lmdb.Error`; then there are none."""


class TierWriter:
    """Writes chunks to a tier in the calling thread. Thread-safe."""

    def __init__(
        self, table: EntryTable, tier: DiskTier, below: Below | None, above: Sequence[DiskTier] = ()
    ) -> None:
        """`below`: the writer of the next slower tier or of the bucket; None for the last tier. `above`: all
        faster tiers."""
        self.tier = tier
        self._table = table
        self._below = below
        self._above = above

    @property
    def name(self) -> str:
        return self.tier.name

    def find_room(self, entry: ChunkEntry) -> Residence | None:
        """Allocate room for a chunk, evicting others if needed; None if that is not enough. Raises `OSError`,
        `lmdb.Error`; chunks that a slower tier cannot take then stay."""
        while True:
            residence = self.tier.allocate(entry)
            if residence is not None:
                return residence
            evictions = self._table.evict_from_disk(self.tier, frames_bytes(entry.manifest))
            self.demote(evictions)
            if not self.tier.bury() and not evictions:
                return None

    def sync_and_commit(self, written: Sequence[tuple[Copying, Residence]], since: int) -> None:
        """Sync written frames, delete older copies of the chunks from faster tiers' catalogs, then commit the
        chunks. `since`: as in `Slab.sync`. Raises `OSError`, `lmdb.Error`; then this tier's catalog is
        unchanged."""
        self.tier.slab.sync(since)
        for faster in self._above:
            faster.forget_older(one for one, _ in written)
        self.tier.commit(written)

    def demote(self, evictions: Sequence[Eviction]) -> None:
        """Move the leaving copies to the next tier, or drop them. Raises `OSError`, `lmdb.Error` if the next
        tier fails; then all of them stay, because they may be the only copies of chunks acknowledged as
        durable."""
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
        """As `Below.copy_from`. The copies are committed."""
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


class WriteBack:
    """The thread that empties one queue."""

    def __init__(self, table: EntryTable, queue: WriteQueue, writer: TierWriter, arena: Arena) -> None:
        self._table = table
        self._queue = queue
        self._writer = writer
        self._tier = writer.tier
        self._arena = arena
        self._committer = ThreadPoolExecutor(1, f"kintsugi-{self._tier.name}-commit")
        self._committing: Future[KintsugiError | None] | None = None
        """The commit of the previous batch. Its result is why it failed, or None; its jobs fail, too."""
        self._thread = threading.Thread(target=self._run, name=f"kintsugi-{self._tier.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Write pending chunks, commit deletions, then end."""
        self._table.close_writes(self._queue)
        self._thread.join()

    # The tier's thread

    def _run(self) -> None:
        try:
            while (batch := self._table.next_writes(self._queue)) is not None:
                self._write_batch(batch)
            self._wait_until_committed()
        except BaseException as error:  # noqa: BLE001 - the shard fails, visibly
            self._die(error)
        finally:
            self._committer.shutdown()

    def _die(self, error: BaseException) -> None:
        self._table.fail(error)
        abandoned = self._table.abandon_writes(self._queue)
        failure = Unavailable(f"{self._tier.name}: its writer died; the chunk is in RAM alone")
        settle((*(job.done for job in abandoned.jobs), *abandoned.flushes), failure)

    def _write_batch(self, batch: WriteBatch) -> None:
        # A chunk that was deleted during its commit leaves the catalog in this turn.
        failure = self._wait_until_committed() if batch.flushes else None
        failure = self._write_once(batch.jobs) or failure
        if batch.flushes:
            failure = self._wait_until_committed() or failure
        settle(batch.flushes, failure)

    def _wait_until_committed(self) -> KintsugiError | None:
        """Wait for the running commit. Returns why it failed, or None."""
        committing, self._committing = self._committing, None
        return None if committing is None else committing.result()

    def _write_once(self, jobs: Sequence[WriteJob]) -> KintsugiError | None:
        """Write a batch and start its commit. A failure of the disk fails the jobs, not the thread."""
        since = self._tier.slab.syncs_failed
        try:
            self._tier.bury()
            placed = self._write_frames([job for job in jobs if not job.entry.gone])
        except (OSError, lmdb.Error) as error:
            return self._fail_jobs(jobs, error)
        written = {job for job, _ in placed}
        for job in jobs:
            if job not in written:
                self._end(job, None)
        self._wait_until_committed()
        if placed:
            self._committing = self._committer.submit(self._commit, placed, since)
        else:
            self._tier.failure = ""
        return None

    def _write_frames(self, jobs: Sequence[WriteJob]) -> list[_Placed]:
        """Write the frames of chunks, without a sync. Returns the chunks that found room. Raises `OSError`;
        then none did."""
        placed: list[_Placed] = []
        try:
            for job in jobs:
                target = self._writer.find_room(job.entry)
                if target is None:
                    self._fail(job, self._no_room(job.entry))
                    continue
                placed.append((job, target))
                self._tier.write(target, [self._arena.view(*place) for place in job.source.places()])
        except BaseException:
            self._give_back(placed)
            raise
        return placed

    def _commit(self, placed: Sequence[_Placed], since: int) -> KintsugiError | None:
        """Sync and commit a batch and end its jobs, in the committer's thread. `since`: as in `Slab.sync`."""
        try:
            self._writer.sync_and_commit(placed, since)
        except (OSError, lmdb.Error) as error:
            self._give_back(placed)
            return self._fail_jobs([job for job, _ in placed], error)
        except BaseException as error:  # noqa: BLE001 - the shard fails, visibly
            self._die(error)
            return None
        self._tier.failure = ""
        for job, target in placed:
            self._end(job, target)
        return None

    def _give_back(self, placed: Sequence[_Placed]) -> None:
        for _, target in placed:
            self._tier.return_unwritten(target)

    def _no_room(self, entry: ChunkEntry) -> KintsugiError:
        return ResourceExhausted(
            f"{entry.manifest.chunk_bytes} bytes do not fit into {self._tier.name} "
            f"({self._tier.capacity_bytes} bytes) beside what is pinned or being read"
        )

    def _fail_jobs(self, jobs: Sequence[WriteJob], error: Exception) -> KintsugiError:
        failure = Unavailable(f"{self._tier.name}: {error}; the chunk is in RAM alone")
        self._tier.failure = str(error)
        log.error("%s: write-back failed: %s", self._tier.name, error)
        for job in jobs:
            self._fail(job, failure)
        return failure

    def _end(self, job: WriteJob, target: Residence | None) -> None:
        if not job.done.done():
            self._table.end_write(self._queue, job, target)
            job.done.set_result(None)

    def _fail(self, job: WriteJob, failure: KintsugiError) -> None:
        if not job.done.done():
            self._table.fail_write(self._queue, job)
            job.done.set_exception(failure)


def copy_frames(
    tier: DiskTier, source: Residence, write: Callable[[Sequence[memoryview], int], None]
) -> None:
    """Copy a chunk's frames from a slab through a bounded buffer. `write` takes padded frames and the index
    of the first one. Raises `Corrupted` if the source cannot be read, and the errors of `write`."""
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
