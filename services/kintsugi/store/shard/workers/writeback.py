"""Chunks on their way from RAM to an SSD tier.

One thread per tier takes what waits in batches: frames, one sync of the slab, one transaction. A chunk is
in the catalog only after its frames are on disk. A second thread syncs and commits a batch while the first
writes the next: a disk that waits for its own flushes is idle a quarter of the time. Cost per byte: nothing
but the disk's own, straight from the arena; per batch, one fdatasync and one commit.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import lmdb

from kintsugi.core.errors import KintsugiError, ResourceExhausted, Unavailable
from kintsugi.store.shard.entry import ChunkEntry, Residence
from kintsugi.store.shard.table import EntryTable
from kintsugi.store.shard.tiers.arena import Arena
from kintsugi.store.shard.work import WriteBatch, WriteJob, WriteQueue
from kintsugi.store.shard.workers.tier_writer import TierWriter

log = logging.getLogger(__name__)

_Placed = tuple[WriteJob, Residence]
"""A job and where its frames are now."""


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
        """The batch before this one, and why it was not committed; its jobs are told, too."""
        self._thread = threading.Thread(target=self._run, name=f"kintsugi-{self._tier.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Write what waits, deletions included, then end."""
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
        failure = Unavailable(f"{self._tier.name}: its writer died; what was put is in RAM alone")
        _settle((*(job.done for job in abandoned.jobs), *abandoned.flushes), failure)

    def _write_batch(self, batch: WriteBatch) -> None:
        # What was deleted while it was being committed is buried in this turn.
        failure = self._wait_until_committed() if batch.flushes else None
        failure = self._write_once(batch.jobs) or failure
        if batch.flushes:
            failure = self._wait_until_committed() or failure
        _settle(batch.flushes, failure)

    def _wait_until_committed(self) -> KintsugiError | None:
        """Wait for the batch that is being committed; why it was not."""
        committing, self._committing = self._committing, None
        return None if committing is None else committing.result()

    def _write_once(self, jobs: Sequence[WriteJob]) -> KintsugiError | None:
        """Write a batch and have it committed; the disk's failures end with the jobs, not with the thread."""
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
        """Chunks whose frames are in the slab, not synced. Raises `OSError`; then none is."""
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
        """Sync, name in the catalog, end the jobs. In the committer's thread. `since`: as in `Slab.sync`."""
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
        failure = Unavailable(f"{self._tier.name}: {error}; what was put is in RAM alone")
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


def _settle(futures: Iterable[Future[None]], failure: KintsugiError | None) -> None:
    """End futures that have not ended: as failed where there is a failure."""
    for future in futures:
        if future.done():
            continue
        if failure is None:
            future.set_result(None)
        else:
            future.set_exception(failure)
