"""Work that the table hands to the shard's threads: chunks to write, to load and to move down.

The queues are plain data, not thread-safe: only the table calls them, under its lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from kintsugi.core.errors import ResourceExhausted, Unavailable
from kintsugi.store.shard.admission import may_leave_disk
from kintsugi.store.shard.entry import ChunkEntry, Residence
from kintsugi.store.shard.eviction.placement import READS_OFTEN, faster_tier
from kintsugi.store.shard.tiers.disk_tier import DiskTier

WRITE_BATCH_BYTES_MAX = 128 << 20
QUEUE_SHARE_MAX = 0.25
"""Largest share of RAM that may wait for one SSD tier; puts wait beyond it."""
MOVE_REST_S = 600.0
"""Least time from one move of a chunk that is read often to the next. Speeds waver, and what moves up may be
demoted again: a chunk must not be written back and forth at the rate of its reads."""
LOAD_STEP_BYTES = 4 << 20
"""Bytes that a promotion reads in one turn."""


def uncancellable_future() -> Future[None]:
    """A future that no waiter can cancel: others wait for it too, and the writer ends it."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    return future


def run_in_turn(begin: Sequence[Callable[[], Future[None]]]) -> list[Future[None]]:
    """Begin each piece of work once the one before has ended, however it did; a future for each. Work that
    cannot begin has ended: its future fails."""
    futures = [uncancellable_future() for _ in begin]

    def begin_next(index: int) -> None:
        if index == len(begin):
            return
        try:
            work = begin[index]()
        except Exception as error:  # noqa: BLE001 - whoever waits is told
            end(index, error)
        else:
            work.add_done_callback(lambda done: end(index, done.exception()))

    def end(index: int, failure: BaseException | None) -> None:
        begin_next(index + 1)
        if failure is None:
            futures[index].set_result(None)
        else:
            futures[index].set_exception(failure)

    begin_next(0)
    return futures


@dataclass(eq=False)
class WriteJob:
    """A chunk whose RAM copy is held until it is on disk."""

    entry: ChunkEntry
    source: Residence
    done: Future[None] = field(default_factory=uncancellable_future)


@dataclass(frozen=True)
class WriteBatch:
    """What a writer does next: the jobs, then, once all jobs before are committed, the flushes."""

    jobs: Sequence[WriteJob]
    flushes: Sequence[Future[None]]


class WriteQueue:
    """The chunks on their way to one SSD tier."""

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
        """Raise `ResourceExhausted` for a chunk that the tier can never hold."""
        if size_bytes > self.tier.capacity_bytes:
            raise ResourceExhausted(
                f"a chunk of {size_bytes} bytes exceeds {self.tier.name}'s {self.tier.capacity_bytes}; "
                "name another tier or make chunks shorter"
            )

    def is_full_for(self, size_bytes: int) -> bool:
        """Whether a job of this size has to wait. An empty queue takes any."""
        return self.queue_bytes > 0 and self.queue_bytes + size_bytes > self._queue_bytes_max

    def add(self, job: WriteJob) -> None:
        self.queue_bytes += job.source.size_bytes
        self._waiting.append(job)

    def add_flush(self) -> Future[None]:
        """Done once every job and deletion before it is on disk. Fails where no writer is left."""
        flush = uncancellable_future()
        if self.closed:
            flush.set_exception(Unavailable(f"{self.tier.name} is not written any more; restart the shard"))
        else:
            self._flushes.append(flush)
        return flush

    def close(self) -> None:
        """No more jobs come: the writer ends with a last flush."""
        if not self.closed:
            self.add_flush()
        self.closed = True

    def take_batch(self) -> WriteBatch:
        """At least one job where there is one; flushes with the last of the jobs."""
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
        """Everything that has not ended, because the writer died. The bytes stay counted as unwritten."""
        batch = WriteBatch([*self._taken, *self._waiting], self._flushes)
        self._waiting.clear()
        self._flushes = []
        self.closed = True
        return batch


def speeds_of(queues: Sequence[WriteQueue]) -> list[tuple[str, float]]:
    """Names of the queues' tiers and their measured bytes per second, in the same order."""
    return [(queue.tier.name, queue.tier.read_bytes_per_s) for queue in queues]


def find_queue(queues: Sequence[WriteQueue], tier: str) -> WriteQueue | None:
    """The queue of the tier with this name; None for RAM."""
    return next((queue for queue in queues if queue.tier.name == tier), None)


def give_up(tier: DiskTier, goal_bytes: int) -> list[Eviction]:
    """Chunks that a tier's policy gives up, worth so many bytes or all that may leave."""
    evictions: list[Eviction] = []
    while goal_bytes > 0 and (victim := tier.policy.evict(may_leave_disk)) is not None:
        assert victim.disk is not None
        tier.evictions += 1
        goal_bytes -= victim.manifest.chunk_bytes
        evictions.append(Eviction(victim, victim.disk))
    return evictions


def find_faster_queue(
    queues: Sequence[WriteQueue],
    entry: ChunkEntry,
    hides_s: float,
    now_s: float,
    demoting: Collection[Eviction],
) -> WriteQueue | None:
    """The queue of the tier that a chunk moves to once it has been read; None where it stays.

    It stays where its tier is fast enough, it is not read often, it moved less than `MOVE_REST_S` ago, or RAM
    does not hold all of it. While the other tier's queue is full, it stays, too: the next read asks again.
    While it is among those `demoting`, it stays, because one tier must not be given two copies: the catalog
    names one by the chunk's address. `hides_s`: how long a load of it hides behind its blend. `now_s`: on the
    clock of `ChunkEntry.moved_s`.
    """
    if entry.disk is None or entry.ram is None or entry.is_loading or now_s < entry.moved_s + MOVE_REST_S:
        return None
    if any(eviction.entry is entry for eviction in demoting):
        return None
    if entry.writing is not None or entry.uses < READS_OFTEN:
        return None
    size = entry.manifest.chunk_bytes
    target = faster_tier(entry.disk.tier.name, speeds_of(queues), size, hides_s)
    queue = None if target is None else find_queue(queues, target)
    if queue is None or queue.tier.failure or size > queue.tier.capacity_bytes or queue.is_full_for(size):
        return None
    return queue


@dataclass(frozen=True)
class Promotion:
    """A chunk on its way into RAM; both residences are held until it is there."""

    entry: ChunkEntry
    source: Residence
    tier: DiskTier
    target: Residence


@dataclass(frozen=True)
class LoadStep:
    """Frames `[start, stop)` of a promotion, by their place in the chunk."""

    load: Promotion
    start: int
    stop: int


class LoadQueue:
    """Promotions under way. Every request gets one step in turn: a large one delays nobody's first layer."""

    def __init__(self) -> None:
        self.closed = False
        self._requests: deque[Iterator[LoadStep]] = deque()

    def __bool__(self) -> bool:
        return bool(self._requests)

    def add(self, loads: Sequence[Promotion]) -> None:
        """Loads of one request, none of them empty."""
        self._requests.append(_split_by_layer(loads))

    def take_step(self) -> LoadStep | None:
        """The next step; None where nothing is left."""
        while self._requests:
            request = self._requests.popleft()
            step = next(request, None)
            if step is not None:
                self._requests.append(request)
                return step
        return None


def _split_by_layer(loads: Sequence[Promotion]) -> Iterator[LoadStep]:
    """Steps of bounded size, the earliest layers of every load first."""
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


@dataclass(frozen=True, eq=False)
class Eviction:
    """A chunk that a full SSD tier gives up, and the copy that is to leave."""

    entry: ChunkEntry
    source: Residence
