"""Chunks on their way from RAM to an SSD tier, and from one SSD tier to the next.

One thread per tier takes what waits in batches: frames, one sync of the slab, one transaction. A chunk is
in the catalog only after its frames are on disk. A second thread syncs and commits a batch while the first
writes the next: a disk that waits for its own flushes is idle a quarter of the time. Cost per byte: nothing
but the disk's own, straight from the arena; per batch, one fdatasync and one commit.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import lmdb

from kintsugi.core.errors import KintsugiError, ResourceExhausted, Unavailable
from kintsugi.store.shard.entry import ChunkEntry, Residence
from kintsugi.store.shard.tiers.disk_tier import DiskTier
from kintsugi.store.shard.tiers.ram_tier import RamTier

log = logging.getLogger(__name__)

BATCH_BYTES_MAX = 128 << 20
ROOM_BYTES_MIN = 64 << 20
"""Eviction makes room for so much at once, up to 1/16 of a tier: each round costs the catalog a commit."""


def _promise() -> Future[None]:
    """A future that whoever waits for it cannot cancel: others wait, too, and the writer settles it."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    return future


@dataclass(eq=False)
class WriteJob:
    """A chunk whose RAM copy is held until it is on disk."""

    entry: ChunkEntry
    source: Residence
    done: Future[None] = field(default_factory=_promise)


_Placed = tuple[WriteJob, Residence]
"""A job and where its frames are now."""


class WriteBack:
    """The writer of one tier. `queue_bytes` counts what waits, under the shard's lock."""

    def __init__(
        self,
        tier: DiskTier,
        ram: RamTier,
        changed: threading.Condition,
        lock: threading.RLock,
        queue_bytes_max: int,
        demote: Callable[[Sequence[ChunkEntry], DiskTier], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        self.tier = tier
        self.queue_bytes = 0
        self.queue_bytes_max = queue_bytes_max
        self._ram = ram
        self._changed = changed
        self._lock = lock
        self._demote = demote
        self._on_death = on_death
        self._jobs: deque[WriteJob] = deque()
        self._batch: list[WriteJob] = []
        self._flushes: list[Future[None]] = []
        self._closed = False
        self._committer = ThreadPoolExecutor(1, f"kintsugi-{tier.name}-commit")
        self._committing: Future[KintsugiError | None] | None = None
        """The batch before this one, and what the disk had against it; its jobs hear of it, too."""
        self._thread = threading.Thread(target=self._run, name=f"kintsugi-{tier.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def is_full_for(self, size_bytes: int) -> bool:
        """Whether so much more has to wait. A queue that is empty takes anything. Under the lock."""
        return self.queue_bytes > 0 and self.queue_bytes + size_bytes > self.queue_bytes_max

    def submit(self, entry: ChunkEntry) -> Future[None]:
        """Write an entry's RAM copy to the tier. Holds it meanwhile. Under the lock."""
        assert entry.ram is not None
        assert entry.writing is None
        entry.ram.acquire()
        job = WriteJob(entry, entry.ram)
        entry.writing = job.done
        self.queue_bytes += job.source.size_bytes
        self._jobs.append(job)
        self._changed.notify_all()
        return job.done

    def flush(self) -> Future[None]:
        """Done once everything that was asked before is on disk, deletions included. Under the lock."""
        done = _promise()
        self._flushes.append(done)
        self._changed.notify_all()
        return done

    def close(self) -> None:
        """Write what waits, deletions included, then end."""
        with self._lock:
            if not self._closed:
                self.flush()
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    # The tier's thread

    def _run(self) -> None:
        try:
            while self._turn():
                pass
            self._wait_until_committed()
        except BaseException as error:  # noqa: BLE001 - the shard fails, visibly
            self._die(error)
        finally:
            self._committer.shutdown()

    def _die(self, error: BaseException) -> None:
        self._on_death(error)
        self._abandon()

    def _abandon(self) -> None:
        """Nobody will ever write what waits: say so."""
        failure = Unavailable(f"{self.tier.name}: its writer died; what was put is in RAM alone")
        with self._lock:
            jobs = [*self._batch, *self._jobs]
            flushes, self._flushes = self._flushes, []
            self._jobs.clear()
            self._closed = True
        for job in jobs:
            if not job.done.done():
                job.done.set_exception(failure)
        for flush in flushes:
            flush.set_exception(failure)

    def _turn(self) -> bool:
        with self._lock:
            self._changed.wait_for(lambda: self._jobs or self._flushes or self._closed)
            if not self._jobs and not self._flushes:
                return False
            jobs = self._take_write_batch()
            self._batch = [*(job for job in self._batch if not job.done.done()), *jobs]
            flushes, self._flushes = (self._flushes, []) if not self._jobs else ([], self._flushes)
        # What was deleted while it was being committed is buried in this turn.
        failure = self._wait_until_committed() if flushes else None
        failure = self._write_once(jobs) or failure
        if flushes:
            failure = self._wait_until_committed() or failure
        for flush in flushes:
            if failure is None:
                flush.set_result(None)
            else:
                flush.set_exception(failure)
        return True

    def _wait_until_committed(self) -> KintsugiError | None:
        """Wait for the batch that is being committed; why it was not."""
        committing, self._committing = self._committing, None
        return None if committing is None else committing.result()

    def _take_write_batch(self) -> list[WriteJob]:
        """The next batch: at least one job where there is one."""
        jobs: list[WriteJob] = []
        size = 0
        while self._jobs and (not jobs or size + self._jobs[0].source.size_bytes <= BATCH_BYTES_MAX):
            jobs.append(self._jobs.popleft())
            size += jobs[-1].source.size_bytes
        return jobs

    def _write_once(self, jobs: list[WriteJob]) -> KintsugiError | None:
        """Write a batch and have it committed; the disk's failures end with the jobs, not with the thread."""
        try:
            self.tier.bury(self._lock)
            placed = self._write_frames([job for job in jobs if not job.entry.gone])
        except (OSError, lmdb.Error) as error:
            return self._fail_jobs(jobs, error)
        ending = {job for job, _ in placed}
        for job in jobs:
            if job not in ending:
                self._end(job, None)
        self._wait_until_committed()
        if placed:
            self._committing = self._committer.submit(self._commit, placed)
        else:
            self.tier.failure = ""
        return None

    def _fail_jobs(self, jobs: Sequence[WriteJob], error: Exception) -> KintsugiError:
        failure = Unavailable(f"{self.tier.name}: {error}; what was put is in RAM alone")
        self.tier.failure = str(error)
        log.error("%s: write-back failed: %s", self.tier.name, error)
        for job in jobs:
            self._end(job, failure)
        return failure

    def _write_frames(self, jobs: Sequence[WriteJob]) -> list[_Placed]:
        """Chunks whose frames are in the slab, not synced. Raises `OSError`; then none is."""
        placed: list[_Placed] = []
        try:
            for job in jobs:
                target = self.room_for(job.entry)
                if target is None:
                    self._end(job, self._no_room(job.entry))
                    continue
                placed.append((job, target))
                self.tier.write(target, self._frames(job.source))
        except BaseException:
            self._give_back(placed)
            raise
        return placed

    def _commit(self, placed: Sequence[_Placed]) -> KintsugiError | None:
        """Sync, name in the catalog, end the jobs. In the committer's thread."""
        jobs = [job for job, _ in placed]
        try:
            self.tier.slab.sync()
            self.tier.commit(self._lock, [(job.entry, target) for job, target in placed])
        except (OSError, lmdb.Error) as error:
            self._give_back(placed)
            return self._fail_jobs(jobs, error)
        except BaseException as error:  # noqa: BLE001 - the shard fails, visibly
            self._die(error)
            return None
        self.tier.failure = ""
        with self._lock:
            for job, target in placed:
                if job.entry.gone:
                    self.tier.discard(target)
                else:
                    self.tier.adopt(job.entry, target)
        for job in jobs:
            self._end(job, None)
        return None

    def _give_back(self, placed: Sequence[_Placed]) -> None:
        with self._lock:
            for _, target in placed:
                self.tier.return_unwritten(target)

    def _no_room(self, entry: ChunkEntry) -> KintsugiError:
        return ResourceExhausted(
            f"{entry.manifest.chunk_bytes} bytes do not fit into {self.tier.name} "
            f"({self.tier.capacity_bytes} bytes) beside what is pinned or being read"
        )

    def _frames(self, source: Residence) -> list[memoryview]:
        return [self._ram.arena.view(offset, source.stride) for offset in source.offsets]

    def _end(self, job: WriteJob, failure: KintsugiError | None) -> None:
        if job.done.done():
            return
        with self._lock:
            job.entry.writing = None
            self.queue_bytes -= job.source.size_bytes
            if job.entry.leaving and job.entry.ram is job.source:
                job.entry.leaving = False
                if failure is None or job.entry.gone:
                    self._ram.unlink(job.entry)
                else:
                    self._ram.policy.admit(job.entry, job.entry.manifest.chunk_bytes, job.entry.recompute_ms)
            job.source.release()
            self._changed.notify_all()
        if failure is None:
            job.done.set_result(None)
        else:
            job.done.set_exception(failure)

    def room_for(self, entry: ChunkEntry) -> Residence | None:
        """Room in the tier, after evicting what its policy gives up first; None where that is not enough.

        Any thread, without the lock."""
        while True:
            with self._lock:
                residence = self.tier.allocate(entry)
                if residence is not None:
                    return residence
                victims = self._victims(entry.manifest.chunk_bytes)
            self._demote(victims, self.tier)
            if not self.tier.bury(self._lock) and not victims:
                return None

    def _victims(self, needed_bytes: int) -> list[ChunkEntry]:
        """Entries that the policy gives up, worth more than is needed; still linked, no longer ordered."""
        goal = max(needed_bytes, min(ROOM_BYTES_MIN, self.tier.capacity_bytes // 16))
        victims: list[ChunkEntry] = []
        while goal > 0:
            victim = self.tier.policy.evict(_may_leave)
            if victim is None:
                break
            self.tier.evictions += 1
            goal -= victim.manifest.chunk_bytes
            victims.append(victim)
        return victims


def _may_leave(entry: ChunkEntry) -> bool:
    return not entry.pins and entry.disk is not None and not entry.disk.readers
