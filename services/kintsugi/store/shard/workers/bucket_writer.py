"""Uploads chunks from the last SSD tier to a bucket, and deletes objects from it.

Demotion copies a chunk into memory and returns, so making room on a disk never waits for the network. A few
threads upload. Another thread deletes dropped copies from the catalog, and a last one deletes their objects
and probes a bucket that has failed, so a deletion does not wait for the bucket. Chunks that the bucket does
not take, because it is slow, full or unreachable, are lost, as they would be without a bucket.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress

import lmdb

from kintsugi.core.errors import Corrupted, InvalidField, Unavailable
from kintsugi.store.shard.entry import ChunkEntry, Residence, frames_bytes
from kintsugi.store.shard.eviction.room import pays_to_keep
from kintsugi.store.shard.table import EntryTable
from kintsugi.store.shard.tiers.disk_tier import DiskTier
from kintsugi.store.shard.tiers.object_tier import ChunkUpload, ObjectTier
from kintsugi.store.shard.work import Eviction, settle, uncancellable_future
from kintsugi.store.shard.workers.writeback import copy_frames

log = logging.getLogger(__name__)

UPLOADERS = 3
TURN_S = 1.0
SWEEP_PERIOD_S = 3600.0
"""Time between two listings of the bucket for objects that belong to no chunk."""
RETRY_S = 60.0
"""Time to the next listing after one that failed or left objects."""
CLOSE_S_MAX = 10.0
"""How long uploads may continue while the shard closes."""


class BucketWriter:
    """The threads of the object tier."""

    def __init__(self, table: EntryTable, tier: ObjectTier, wall_clock: Callable[[], float]) -> None:
        self.tier = tier
        self._table = table
        self._wall_clock = wall_clock
        self._changed = threading.Condition()
        self._waiting: deque[ChunkUpload] = deque()
        self._flushes: list[Future[None]] = []
        self._closed = False
        self._swept_s = -math.inf
        self._threads = [
            threading.Thread(target=self._run, args=(work,), name=f"kintsugi-bucket{i}", daemon=True)
            for i, work in enumerate([self._forget_all, self._keep, *[self._upload_all] * UPLOADERS])
        ]

    @property
    def name(self) -> str:
        return self.tier.name

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self, timeout_s: float = CLOSE_S_MAX) -> None:
        """Upload pending chunks for at most `timeout_s`, delete dropped copies from the catalog, then end."""
        self.await_uploads(timeout_s)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.tier.bucket.close()  # ends a listing, which may have any number of pages
        for thread in self._threads:
            thread.join()

    def await_uploads(self, timeout_s: float) -> int:
        """Wait until all uploads have ended. Returns the bytes that were not uploaded in time."""
        with self._changed:
            self._changed.wait_for(lambda: not self.tier.staged_bytes, timeout_s)
        return self.tier.staged_bytes

    def flush(self) -> Future[None]:
        """Return a future that is done when the copies dropped so far are deleted from the catalog. Their
        objects are deleted later; `ObjectTier.wipe` waits for that."""
        flush = uncancellable_future()
        with self._changed:
            if self._closed:
                flush.set_exception(Unavailable(f"{self.name} is closed"))
            else:
                self._flushes.append(flush)
                self._changed.notify_all()
        return flush

    # Demotion, in the thread of the tier above

    def copy_from(self, tier: DiskTier, evictions: Sequence[Eviction]) -> Mapping[Eviction, Residence]:
        """Take chunks that leave a tier. Returns no copies: taken chunks have moved already, the others are
        lost. A bucket's failures raise nothing."""
        for eviction in evictions:
            if self._is_worth_it(eviction.entry) and self._table.begin_copy(eviction):
                upload = self._copy(tier, eviction)
                self._table.end_copy(eviction, None if upload is None else upload.target)
                if upload is not None:
                    self._table.end_demotions([eviction], {eviction: upload.target})
                    self._begin(upload)
        return {}

    def _copy(self, tier: DiskTier, eviction: Eviction) -> ChunkUpload | None:
        upload = None
        try:
            upload = self._reserve(eviction.entry)
            if upload is None or self._fill(tier, eviction, upload):
                return upload
        except (OSError, MemoryError) as error:  # the system refuses memory
            self.tier.faults["refused"] += 1
            log.error("%s: no memory for an upload: %s", self.name, error)
        if upload is not None:
            self.tier.give_back(upload)
        return None

    def _is_worth_it(self, entry: ChunkEntry) -> bool:
        left_s = entry.expires_at_s - self._wall_clock()
        size, rate = entry.manifest.chunk_bytes, self.tier.read_bytes_per_s
        if not pays_to_keep(size, rate, entry.recompute_ms, left_s):
            return False
        if not self.tier.is_in_reach:
            self.tier.faults["refused"] += 1
            return False
        return True

    def _reserve(self, entry: ChunkEntry) -> ChunkUpload | None:
        """Reserve room in the bucket, evicting other chunks if needed, and in memory."""
        upload = self.tier.reserve(entry)
        if upload is None and self.tier.is_full_for(entry):
            evictions = self._table.evict_from_disk(self.tier, frames_bytes(entry.manifest))
            self._table.end_demotions(evictions, {})
            upload = self.tier.reserve(entry)
        if upload is None:
            self.tier.faults["refused"] += 1
        return upload

    def _fill(self, tier: DiskTier, eviction: Eviction, upload: ChunkUpload) -> bool:
        """Copy a chunk's bytes from disk. Returns whether they could be read."""

        def write(frames: Sequence[memoryview], first: int) -> None:
            position = upload.target.offsets[first]
            for frame in frames:
                upload.body[position : position + len(frame)] = frame
                position += len(frame)

        try:
            copy_frames(tier, eviction.source, write)
        except Corrupted as error:
            log.error("%s: %s", tier.name, error)
            return False
        return True

    def _begin(self, upload: ChunkUpload) -> None:
        with self._changed:
            self._waiting.append(upload)
            self._changed.notify_all()

    # The threads

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - the shard fails, visibly
            self._table.fail(error)
            self._settle(Unavailable(f"{self.name}: its writer died"))

    def _upload_all(self) -> None:
        while self._upload_next():  # a call of its own, which releases the bytes when it returns
            pass

    def _upload_next(self) -> bool:
        """Wait for an upload and finish it. Returns False when the shard closes and none is left."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if not self._waiting:
                return False
            upload = self._waiting.popleft()
            is_late = self._closed
        self._upload(upload, is_late)
        return True

    def _upload(self, upload: ChunkUpload, is_late: bool) -> None:
        """Upload a chunk unless it was dropped. `is_late`: there is no time left for it."""
        failed = is_late
        try:
            if not is_late and not upload.target.condemned:
                self.tier.send(upload)
        except (OSError, lmdb.Error) as error:
            failed = True
            self.tier.faults["failed"] += 1
            self.tier.failure = str(error)
            log.error("chunk %s is lost: %s: %s", upload.entry.manifest.key, self.name, error)
        self.tier.end_upload(upload)
        self._table.end_upload(upload.entry, upload.target, failed)
        with self._changed:
            self._changed.notify_all()

    def _forget_all(self) -> None:
        """Delete dropped copies from the catalog, until the shard closes."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._flushes or self._closed, TURN_S)
                is_closed = self._closed
            self._forget()
            if is_closed:
                return

    def _keep(self) -> None:
        """Delete, sweep and probe until the shard closes."""
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._closed, TURN_S):
                    return
            if self.tier.is_in_reach:
                self._delete()
            else:
                self._probe()

    def _probe(self) -> None:
        with suppress(InvalidField):  # versions were turned on while the shard ran; the tier reports it
            self.tier.check_bucket()

    def _forget(self) -> None:
        """Delete dropped copies from the catalog, and end the flushes that wait for it."""
        with self._changed:
            flushes, self._flushes = self._flushes, []
        failure: Unavailable | None = None
        try:
            self.tier.bury()
        except lmdb.Error as error:
            self.tier.failure = str(error)
            log.error("%s: the catalog cannot be written: %s", self.name, error)
            failure = Unavailable(f"{self.name}: {error}")
        settle(flushes, failure)

    def _delete(self) -> None:
        try:
            if time.monotonic() >= self._swept_s + (RETRY_S if self.tier.needs_sweep else SWEEP_PERIOD_S):
                self._swept_s = time.monotonic()
                self.tier.sweep()
            else:
                self.tier.delete_dead()
        except OSError as error:
            log.warning("%s: objects are deleted later: %s", self.name, error)

    def _settle(self, failure: Unavailable) -> None:
        with self._changed:
            self._closed = True
            flushes, self._flushes = self._flushes, []
            self._changed.notify_all()
        settle(flushes, failure)
