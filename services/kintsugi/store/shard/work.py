"""Work for the shard's threads: chunks to write, to load and to move down.

The queues are plain data, not thread-safe: only the table calls them, under its lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from kintsugi.core.errors import ResourceExhausted, Unavailable
from kintsugi.core.layout import ChunkManifest
from kintsugi.store.shard.entry import ChunkEntry, Copying, Residence
from kintsugi.store.shard.tiers.disk_tier import DiskTier
from kintsugi.store.shard.tiers.lower_tier import LowerTier

WRITE_BATCH_BYTES_MAX = 128 << 20
QUEUE_SHARE_MAX = 0.25
"""Largest share of RAM that may wait for one SSD tier. Beyond it, puts wait."""
FAR_SHARE_MAX = 0.25
"""Largest share of RAM for chunks that are being loaded from a bucket."""
LOAD_STEP_BYTES = 4 << 20
"""Bytes that a promotion reads in one turn."""


def uncancellable_future() -> Future[None]:
    """Return a future that its waiters cannot cancel, because several wait for it."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    return future


def settle(futures: Iterable[Future[None]], failure: BaseException | None) -> None:
    """End the futures that have not ended. An error of None means success."""
    for future in futures:
        if future.done():
            continue
        if failure is None:
            future.set_result(None)
        else:
            future.set_exception(failure)


def run_in_turn(begin: Sequence[Callable[[], Future[None]]]) -> list[Future[None]]:
    """Begin each piece of work when the previous one has succeeded or failed. Returns a future for each. If a
    piece cannot begin, its future fails."""
    futures = [uncancellable_future() for _ in begin]

    def begin_next(index: int) -> None:
        if index == len(begin):
            return
        try:
            work = begin[index]()
        except Exception as error:  # noqa: BLE001 - the future reports it
            end(index, error)
        else:
            work.add_done_callback(lambda done: end(index, done.exception()))

    def end(index: int, failure: BaseException | None) -> None:
        begin_next(index + 1)
        settle([futures[index]], failure)

    begin_next(0)
    return futures


@dataclass(frozen=True, eq=False)
class WriteJob(Copying):
    """A chunk whose RAM copy is held until it is on disk."""

    done: Future[None] = field(default_factory=uncancellable_future)


class Eviction(Copying):
    """A chunk that a full tier gives up, and the copy that leaves."""


@dataclass(frozen=True)
class WriteBatch:
    """The next work of a writer: first the jobs, then, after all earlier jobs are committed, the flushes."""

    jobs: Sequence[WriteJob]
    flushes: Sequence[Future[None]]


class WriteQueue:
    """The chunks to be written to one SSD tier."""

    def __init__(self, tier: DiskTier, ram_bytes: int) -> None:
        self.tier = tier
        self.queue_bytes = 0
        """Bytes of RAM held by jobs that have not ended."""
        self.closed = False
        self._queue_bytes_max = int(QUEUE_SHARE_MAX * ram_bytes)
        self._waiting: deque[WriteJob] = deque()
        self._taken: dict[WriteJob, None] = {}
        self._flushes: list[Future[None]] = []

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._flushes)

    def check_size(self, size_bytes: int) -> None:
        """Raise `ResourceExhausted` for a chunk larger than the tier."""
        if size_bytes > self.tier.capacity_bytes:
            raise ResourceExhausted(
                f"a chunk of {size_bytes} bytes exceeds {self.tier.name}'s {self.tier.capacity_bytes}; "
                "make chunks shorter or the tier larger"
            )

    def is_full_for(self, size_bytes: int) -> bool:
        """Return whether a job of this size has to wait. An empty queue takes any job."""
        return self.queue_bytes > 0 and self.queue_bytes + size_bytes > self._queue_bytes_max

    def add(self, job: WriteJob) -> None:
        self.queue_bytes += job.source.size_bytes
        self._waiting.append(job)

    def add_flush(self) -> Future[None]:
        """Return a future that is done when every earlier job and deletion is on disk. It fails if no writer
        is left."""
        flush = uncancellable_future()
        if self.closed:
            flush.set_exception(Unavailable(f"{self.tier.name} has no writer any more; restart the shard"))
        else:
            self._flushes.append(flush)
        return flush

    def close(self) -> None:
        """Make the writer end after a last flush. No more jobs are added."""
        if not self.closed:
            self.add_flush()
        self.closed = True

    def take_batch(self) -> WriteBatch:
        """Take jobs of bounded size, at least one if there is any. The last jobs come with the flushes."""
        jobs: list[WriteJob] = []
        size = 0
        while self._waiting and (
            not jobs or size + self._waiting[0].source.size_bytes <= WRITE_BATCH_BYTES_MAX
        ):
            jobs.append(self._waiting.popleft())
            size += jobs[-1].source.size_bytes
        self._taken.update(dict.fromkeys(jobs))
        flushes: list[Future[None]] = []
        if not self._waiting:
            flushes, self._flushes = self._flushes, []
        return WriteBatch(jobs, flushes)

    def end(self, job: WriteJob) -> None:
        del self._taken[job]
        self.queue_bytes -= job.source.size_bytes

    def abandon(self) -> WriteBatch:
        """Take all work that has not ended, because the writer died. Its bytes stay counted as unwritten."""
        batch = WriteBatch([*self._taken, *self._waiting], self._flushes)
        self._waiting.clear()
        self._flushes = []
        self.closed = True
        return batch


@dataclass(frozen=True)
class Promotion:
    """A chunk that is being loaded into RAM. Both residences are held until it is there."""

    entry: ChunkEntry
    source: Residence
    tier: LowerTier
    target: Residence


@dataclass(frozen=True)
class LoadStep:
    """Frames `[start, stop)` of a promotion, by their index in the chunk."""

    load: Promotion
    start: int
    stop: int


class LoadQueue:
    """Running promotions. Requests get steps in turn, so a large one does not delay others' first layers."""

    def __init__(self) -> None:
        self.closed = False
        self._requests: deque[Iterator[LoadStep]] = deque()

    def __bool__(self) -> bool:
        return bool(self._requests)

    def add(self, loads: Sequence[Promotion]) -> None:
        """Add the loads of one request. No load is empty."""
        self._requests.append(_split_by_layer(loads))

    def take_step(self) -> LoadStep | None:
        """Take the next step; None if there is none."""
        while self._requests:
            request = self._requests.popleft()
            step = next(request, None)
            if step is not None:
                self._requests.append(request)
                return step
        return None


def _split_by_layer(loads: Sequence[Promotion]) -> Iterator[LoadStep]:
    """Yield steps of bounded size, the earliest layers of every load first."""
    positions = dict.fromkeys(loads, 0)
    while positions:
        load = min(positions, key=positions.__getitem__)
        start = positions[load]
        stop = load.target.strides.stop_within(start, LOAD_STEP_BYTES)
        yield LoadStep(load, start, stop)
        if stop == len(load.target.strides.each):
            del positions[load]
        else:
            positions[load] = stop


@dataclass(frozen=True)
class Promotions:
    """Functions of the table that change chunks which are loaded."""

    acquire: Callable[[Residence], None]
    release: Callable[[Residence], None]
    begin_load: Callable[[ChunkEntry, Residence], Promotion]
    make_room: Callable[[ChunkManifest], Residence | None]
    """Allocates RAM for a chunk; None if there is no room now."""


class Loads:
    """Running loads. Loads from SSD tiers and loads from the bucket have separate queues and threads, so a
    bucket that hangs delays no load from a disk; loads from the bucket take a bounded share of RAM. Not
    thread-safe: the table holds the lock."""

    def __init__(self, promotions: Promotions, ram_bytes: int) -> None:
        self.near = LoadQueue()
        """Loads from SSD tiers."""
        self.far = LoadQueue()
        """Loads from the bucket."""
        self._promotions = promotions
        self._far_bytes = 0
        self._far_bytes_max = int(FAR_SHARE_MAX * ram_bytes)

    def begin(self, entries: Iterable[ChunkEntry]) -> bool:
        """Begin to load chunks that RAM lacks and has room for. Returns whether any load began."""
        loads: dict[LoadQueue, list[Promotion]] = {self.near: [], self.far: []}
        for entry in list(dict.fromkeys(entry for entry in entries if entry.ram is None)):
            load = self._begin_one(entry)
            if load is not None:
                loads[self.far if load.tier.is_remote else self.near].append(load)
        for queue, begun in loads.items():
            if begun:
                queue.add(begun)
        return any(loads.values())

    def _begin_one(self, entry: ChunkEntry) -> Promotion | None:
        source, size = entry.copies[0], entry.copies[0].size_bytes
        is_far = source.tier.is_remote
        is_full = is_far and self._far_bytes and self._far_bytes + size > self._far_bytes_max
        if is_full or not source.tier.is_in_reach:  # without other loads, any size may begin
            return None
        self._promotions.acquire(source)  # making room must not evict it
        target = self._promotions.make_room(entry.manifest)
        if target is None:
            self._promotions.release(source)
            return None
        if is_far:
            self._far_bytes += size
        return self._promotions.begin_load(entry, target)

    def end(self, step: LoadStep) -> None:
        """Note that a step has ended, which may be the last one of its load."""
        load = step.load
        if load.tier.is_remote and not load.target.unloaded:
            self._far_bytes -= load.source.size_bytes
