"""Decides which tier a chunk goes to, and which other chunks leave to make room for it.

A tier is fast enough for a chunk if loading it takes no longer than the computation of its blend: the ratio
times the chunk's prefill. `Shares` holds the limits of namespaces, and `Room` makes room in RAM. Call both
under the table's lock; only the table changes chunks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from kintsugi.core.errors import InvalidField, ResourceExhausted, Unavailable
from kintsugi.core.held import Held
from kintsugi.core.layout import ChunkManifest
from kintsugi.core.namespaces import NO_RULES, NamespaceRules, bytes_of
from kintsugi.core.sizing import manifests_bytes_max
from kintsugi.core.spaces import ChunkKey
from kintsugi.store.protocol.wire import memory_bytes
from kintsugi.store.shard.entry import (
    Address,
    ChunkEntry,
    CopyTier,
    EntryIndex,
    Residence,
    charge_of,
    frames_bytes,
)
from kintsugi.store.shard.erasure import Deletions
from kintsugi.store.shard.pins import Leases
from kintsugi.store.shard.tiers.lower_tier import LowerTier
from kintsugi.store.shard.tiers.ram_tier import PutOptions, RamTier
from kintsugi.store.shard.work import Eviction, WriteQueue

RAM = "ram"
READS_OFTEN = 4
"""A chunk with at least this many uses is placed again when it is read from an SSD tier."""
SPEED_GAIN_MIN = 1.5
"""A chunk moves only to a tier that is faster by this factor, because measured speeds vary."""
MOVE_REST_S = 600.0
"""Minimum time between two moves of a chunk that is read often. Measured speeds vary, and a promoted chunk
may be demoted again: a chunk must not be written back and forth at the rate of its reads."""
LIFETIME_S_MIN = 60.0
"""A chunk with a shorter lifetime is not uploaded."""
NO_SSD_TIER = "durable needs an SSD tier; put with ack=ram, or start the shard with --ssd"
EVICTED_BYTES_MAX = 32 << 20
"""Memory for the keys of evicted chunks."""
SOON_S = 600.0
"""A chunk that is looked up again within this time should have been kept."""
WINDOW_S = 60.0
RETURNS_MAX = 4096


RATIO = 0.15
"""The default ratio of blends."""
HOT_SHARE_MAX = 1 / 16
"""Maximum share of RAM for hot copies."""
ROOM_BYTES_MIN = 64 << 20
"""An SSD tier evicts this much at once, but at most 1/16 of the tier: each round costs a catalog commit."""


# Placement


def hides_s(ratio: float, recompute_ms: float) -> float:
    """Return how long the load of a chunk may take so that its blend, which computes the share `ratio` of the
    chunk's prefill, hides it; 0 if unknown."""
    return ratio * recompute_ms / 1e3


def choose_tier(tiers: Sequence[tuple[str, float]], chunk_bytes: int, hides_s: float, durable: bool) -> str:
    """Return the tier that a chunk is written to: `ram` or the name of one of `tiers`.

    `tiers`: the SSD tiers, fastest first, as names and the bytes per second of recent loads. `hides_s`: how
    long a load of the chunk may take so that its blend hides it; 0: unknown.

    The last tier (the cheapest) that is fast enough is chosen. If none is, RAM is chosen, or for a durable
    put the first tier; if `hides_s` is unknown, the first tier. Raises `InvalidField` for a durable put to a
    shard without SSD tiers.
    """
    if not tiers:
        if durable:
            raise InvalidField("ack", NO_SSD_TIER)
        return RAM
    first, _ = tiers[0]
    if not hides_s:
        return first
    return cheapest_tier(tiers, chunk_bytes, hides_s) or (first if durable else RAM)


def faster_tier(
    held: str, tiers: Sequence[tuple[str, float]], chunk_bytes: int, hides_s: float
) -> str | None:
    """Return the tier that a chunk read often moves to from tier `held`; None if it stays.

    It stays if `held` is fast enough, or if `hides_s` is unknown. Otherwise it moves to the cheapest tier
    that is fast enough, or else to the fastest, if that tier is faster by `SPEED_GAIN_MIN`.
    """
    speeds = dict(tiers)
    if not hides_s or chunk_bytes <= speeds[held] * hides_s:
        return None
    target = cheapest_tier(tiers, chunk_bytes, hides_s) or max(speeds, key=speeds.__getitem__)
    return target if speeds[target] >= SPEED_GAIN_MIN * speeds[held] else None


def pays_to_keep(chunk_bytes: int, bytes_per_s: float, recompute_ms: float, left_s: float) -> bool:
    """Return whether a chunk that leaves the SSD tiers is worth uploading: loading it takes less time than
    computing it again, if that time is known, and its remaining lifetime is much longer. `bytes_per_s`:
    measured on the bucket. `left_s`: the remaining lifetime, inf for a lasting chunk."""
    load_s = chunk_bytes / bytes_per_s
    return (not recompute_ms or load_s < recompute_ms / 1e3) and left_s > LIFETIME_S_MIN + load_s


def cheapest_tier(tiers: Sequence[tuple[str, float]], num_bytes: int, hides_s: float) -> str | None:
    """Return the last of `tiers`, ordered from the most to the least expensive, from which `num_bytes` load
    within `hides_s` (paper, section 5: the loading controller's choice of a storage device). None if no tier
    is fast enough."""
    hiding = [name for name, bytes_per_s in tiers if num_bytes <= bytes_per_s * hides_s]
    return hiding[-1] if hiding else None


def speeds_of(queues: Sequence[WriteQueue]) -> list[tuple[str, float]]:
    """Return name and measured bytes per second of each queue's tier."""
    return [(queue.tier.name, queue.tier.read_bytes_per_s) for queue in queues]


def find_queue(queues: Sequence[WriteQueue], tier: str) -> WriteQueue | None:
    """Return the queue of the tier with this name; None for RAM."""
    return next((queue for queue in queues if queue.tier.name == tier), None)


def find_faster_queue(
    queues: Sequence[WriteQueue],
    entry: ChunkEntry,
    hides_s: float,
    now_s: float,
    demoting: Collection[Eviction],
) -> WriteQueue | None:
    """Return the queue of the tier that a chunk moves to after it was read; None if it stays.

    From a bucket, a chunk moves to the tier of a durable put. It stays if its SSD tier is fast enough, if it
    is not read often, if it moved less than `MOVE_REST_S` ago, if RAM does not hold all of it, or if the
    other tier's queue is full. It also stays while it is `demoting`: a tier's catalog can name only one copy
    of a chunk. `hides_s`: as in `choose_tier`. `now_s`: on the clock of `ChunkEntry.moved_s`.
    """
    if entry.disk is None or entry.ram is None or entry.is_loading or now_s < entry.moved_s + MOVE_REST_S:
        return None
    if any(eviction.entry is entry for eviction in demoting):
        return None
    if entry.writing is not None or entry.uses < READS_OFTEN:
        return None
    size, speeds, held = entry.manifest.chunk_bytes, speeds_of(queues), entry.disk.tier
    if held.is_remote:
        target: str | None = choose_tier(speeds, size, hides_s, durable=True)
    else:
        target = faster_tier(held.name, speeds, size, hides_s)
    queue = None if target is None else find_queue(queues, target)
    if queue is None or queue.tier.failure or size > queue.tier.capacity_bytes or queue.is_full_for(size):
        return None
    return queue


# Limits


@dataclass(frozen=True)
class NamespaceUse:
    """Bytes that one namespace, or all namespaces that share limits, use in a shard."""

    name: str
    used_bytes: Mapping[str, int]
    """By resource: `ram`, `ssd`, `pinned`."""
    bytes_max: Mapping[str, float]


class Shares:
    """The rules, and the bytes that count against them."""

    def __init__(self, ram: RamTier, lower: Sequence[LowerTier], leases: Leases) -> None:
        """`lower`: the tiers whose bytes `ssd_gib` limits: the SSD tiers, and the bucket if there is one."""
        self.rules: NamespaceRules = NO_RULES
        self._ram = ram
        self.lower = lower
        self._leases = leases

    def exceeds_ram(self, namespace: str, added_bytes: int) -> bool:
        """Return whether `added_bytes` more would exceed the namespace's limit of RAM."""
        limits = self.rules.limits_of(namespace)
        return limits is not None and self._ram_bytes(namespace) + added_bytes > bytes_of(limits.ram_gib)

    def _exceeds_ssd(self, namespace: str, added_bytes: int = 0) -> bool:
        limits = self.rules.limits_of(namespace)
        return limits is not None and self._ssd_bytes(namespace) + added_bytes > bytes_of(limits.ssd_gib)

    def is_full_for(self, manifest: ChunkManifest) -> bool:
        """Return whether the limits of its namespace admit the chunk only after others leave."""
        exceeds = self._exceeds_ssd if self.lower else self.exceeds_ram
        return exceeds(manifest.namespace, charge_of(manifest))

    def may_be_on_ssd(self, manifest: ChunkManifest) -> bool:
        """Return whether the chunk, on its own, fits its namespace's limit of SSD."""
        limits = self.rules.limits_of(manifest.namespace)
        return limits is None or charge_of(manifest) <= bytes_of(limits.ssd_gib)

    def check_size(self, manifest: ChunkManifest) -> None:
        """Raise `ResourceExhausted` for a chunk larger than RAM, or than its namespace's limit of RAM."""
        if (size := frames_bytes(manifest)) > self._ram.capacity_bytes:
            raise ResourceExhausted(
                f"a chunk of {size} bytes exceeds the RAM tier's {self._ram.capacity_bytes}; "
                "raise its capacity or make chunks shorter"
            )
        limits = self.rules.limits_of(manifest.namespace)
        if limits is not None and charge_of(manifest) > bytes_of(limits.ram_gib):
            raise ResourceExhausted(
                f"a chunk of {charge_of(manifest)} bytes exceeds ram_gib {limits.ram_gib:g} of namespace "
                f"{manifest.namespace!r}; make chunks shorter, or have the limit raised"
            )

    def tier_for(self, manifest: ChunkManifest, tier: str, durable: bool) -> str:
        """Return `tier`, or RAM if the namespace's limit keeps the chunk off SSD. Raises `ResourceExhausted`
        for a `durable` put, which requires SSD."""
        if tier == RAM or self.may_be_on_ssd(manifest):
            return tier
        if durable:
            raise _ssd_refusal(manifest)
        return RAM

    def check_write(self, entry: ChunkEntry) -> None:
        """Raise `ResourceExhausted` for a chunk that may not be on SSD, and `Unavailable` for one that only
        an unreachable bucket holds."""
        if entry.ram is None:
            raise Unavailable("the chunk is only in a bucket that does not answer; put it again later")
        if not self.may_be_on_ssd(entry.manifest):
            raise _ssd_refusal(entry.manifest)

    def may_make_room(self, namespace: str) -> Callable[[str], bool]:
        """Return a test of whether another namespace's chunks count against this namespace's limits."""
        account = self.rules.account_of(namespace)
        return lambda other: other == namespace or self.rules.account_of(other) == account

    def choose_from_ssd(self, namespace: str) -> ChunkEntry | None:
        """Return the chunk whose copy below RAM leaves next, from the slowest tier first. None if the
        namespace is within its limit, or if no chunk may leave."""
        if not self._exceeds_ssd(namespace):
            return None
        is_own = self.may_make_room(namespace)
        for tier in reversed(self.lower):
            victim = tier.policy.evict(
                lambda entry: is_own(entry.manifest.namespace) and may_leave_disk(entry)
            )
            if victim is not None:
                tier.evictions += 1
                return victim
        return None

    def uses(self, namespaces: Iterable[str]) -> list[NamespaceUse]:
        """Return the uses of those namespaces that have limits, by account."""
        limited = [name for name in namespaces if self.rules.limits_of(name) is not None]
        by_account = {self.rules.account_of(name): name for name in limited}
        return [self._use_of(account, name) for account, name in sorted(by_account.items())]

    def _use_of(self, account: str, namespace: str) -> NamespaceUse:
        limits = self.rules.limits_of(namespace)
        assert limits is not None
        pinned = self._leases.bytes_by_namespace.of_account(namespace, self.rules)
        return NamespaceUse(
            account,
            {"ram": self._ram_bytes(namespace), "ssd": self._ssd_bytes(namespace), "pinned": pinned},
            {
                "ram": bytes_of(limits.ram_gib),
                "ssd": bytes_of(limits.ssd_gib),
                "pinned": self._leases.namespace_bytes_max,
            },
        )

    def _ram_bytes(self, namespace: str) -> int:
        return self._ram.bytes_by_namespace.of_account(namespace, self.rules)

    def _ssd_bytes(self, namespace: str) -> int:
        return sum(tier.bytes_by_namespace.of_account(namespace, self.rules) for tier in self.lower)


def _ssd_refusal(manifest: ChunkManifest) -> ResourceExhausted:
    return ResourceExhausted(
        f"a chunk of {charge_of(manifest)} bytes exceeds ssd_gib of namespace {manifest.namespace!r}; "
        "put it to RAM, or have the limit raised"
    )


# Room


class NoRoomYet(ResourceExhausted):
    """There is no room now, but other chunks are being read or written back and may leave later."""


def may_leave_ram(entry: ChunkEntry, can_write: bool, is_chosen: Callable[[str], bool] | None = None) -> bool:
    """Return whether the RAM copy may leave. `can_write`: chunks without another copy may be queued or
    dropped now. `is_chosen`: whether chunks of a namespace may leave; None: all may."""
    if is_chosen is not None and not is_chosen(entry.manifest.namespace):
        return False
    if entry.ram is None or entry.ram.readers or (entry.pins and not entry.is_below_ram):
        return False
    return entry.is_below_ram or entry.is_hot or can_write


def may_leave_disk(entry: ChunkEntry) -> bool:
    """Return whether a tier below RAM may give up its copy. A chunk that is being moved stays: its demotion
    might write to the tier that it moves to, whose catalog can name only one copy."""
    if entry.disk is None or entry.disk.readers or entry.pins:
        return False
    return entry.writing is None


def may_be_forgotten(entry: ChunkEntry) -> bool:
    """Return whether no call, thread or lease needs the chunk now."""
    in_use = entry.pins or entry.writing is not None or entry.is_loading
    return not in_use and not any(copy.readers for copy in entry.copies)


def give_up(tier: LowerTier, needed_bytes: int) -> list[Eviction]:
    """Take chunks that a tier's policy evicts, until their bytes exceed the need or no more may leave."""
    goal_bytes = max(needed_bytes, min(ROOM_BYTES_MIN, tier.capacity_bytes // 16))
    evictions: list[Eviction] = []
    while goal_bytes > 0 and (victim := tier.policy.evict(may_leave_disk)) is not None:
        assert victim.disk is not None
        tier.evictions += 1
        goal_bytes -= victim.disk.size_bytes
        evictions.append(Eviction(victim, victim.disk))
    return evictions


@dataclass
class Counters:
    """Counts since the shard started."""

    hits: int = 0
    misses: int = 0
    quarantined: int = 0
    expired: int = 0
    copied: int = 0
    """Chunks copied from other shards."""


class ReuseGaps:
    """Remembers recent evictions. Not thread-safe: the table holds the lock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.evicted: Held[ChunkKey, float] = Held(EVICTED_BYTES_MAX)
        """When chunks were evicted."""
        self._returns: deque[float] = deque(maxlen=RETURNS_MAX)
        self.observe: Callable[[float], None] = lambda gap_s: None
        """Called with each gap, in seconds."""

    def record_eviction(self, address: Address) -> None:
        self.evicted.put(*address, self._clock())

    def record_lookup_miss(self, address: Address) -> None:
        left_s = self.evicted.pop(*address)
        if left_s is None:
            return
        now_s = self._clock()
        self.observe(now_s - left_s)
        if now_s - left_s <= SOON_S:
            self._returns.append(now_s)

    def soon_per_s(self) -> float:
        """Return the rate, over the last `WINDOW_S`, of lookups of chunks evicted less than `SOON_S`
        before."""
        begin_s = self._clock() - WINDOW_S
        return sum(at_s > begin_s for at_s in self._returns) / WINDOW_S


@dataclass(frozen=True)
class Transitions:
    """Functions of the table that change chunks which have to leave."""

    begin_write: Callable[[ChunkEntry, WriteQueue, bool], Future[None]]
    """Has a chunk written to a queue's tier. If the last argument is true, the chunk then leaves RAM."""
    drop_copy: Callable[[ChunkEntry, Residence], None]
    forget: Callable[[ChunkEntry], None]


class Room:
    """Free space in RAM, and the chunks that can leave for others. Not thread-safe: the table holds the
    lock."""

    def __init__(
        self,
        index: EntryIndex,
        ram: RamTier,
        queues: Sequence[WriteQueue],
        shares: Shares,
        reuse: ReuseGaps,
        transitions: Transitions,
        deletions: Deletions,
    ) -> None:
        self._slowest_first: tuple[CopyTier, ...] = (*reversed(shares.lower), ram)
        lower_bytes = sum(tier.capacity_bytes for tier in shares.lower)
        self.index_bytes_max = manifests_bytes_max(ram.capacity_bytes, lower_bytes)
        """Memory for the entries of all chunks."""
        self._index = index
        self._ram = ram
        self._queues = queues
        self._shares = shares
        self._reuse = reuse
        self._transitions = transitions
        self._deletions = deletions

    def free_bytes(self) -> int:
        """Return how many bytes of chunks fit without the loss of another chunk."""
        if not self._queues:
            return self._ram.allocator.free_bytes
        return sum(queue.tier.allocator.free_bytes for queue in self._queues)

    def takes_copy(self, manifest: ChunkManifest, is_hot: bool) -> bool:
        """Return whether a copy from another shard is taken. A chunk that was deleted recently is not. A copy
        must fit within its namespace's limits without the loss of another chunk, a hot copy within the share
        of RAM for hot copies, of which the coldest leave for it."""
        if is_hot:
            return not self._deletions.took(manifest) and self._make_hot(manifest)
        is_full = self._shares.is_full_for(manifest) or frames_bytes(manifest) > self.free_bytes()
        return not is_full and not self._deletions.took(manifest)

    def keeps_copy(self, entry: ChunkEntry) -> bool:
        """Return whether a copy that was taken, and has its room, is still wanted."""
        is_unwanted = self._deletions.took(entry.manifest)
        return not is_unwanted and (not entry.is_hot or self._make_hot(entry.manifest))

    def _make_hot(self, manifest: ChunkManifest) -> bool:
        """Forget hot copies until another one fits their share of RAM. Returns whether it fits, is within its
        namespace's limits, and is of an absent chunk."""
        size, bytes_max = charge_of(manifest), HOT_SHARE_MAX * self._ram.capacity_bytes
        is_new = self._index.get((manifest.namespace, manifest.key)) is None
        if not is_new or size > bytes_max or self._shares.exceeds_ram(manifest.namespace, size):
            return False
        while self._ram.hot_bytes + size > bytes_max:
            victim = self._ram.policy.evict(lambda entry: entry.is_hot and may_be_forgotten(entry))
            if victim is None:
                return False
            self._ram.evictions += 1
            self.forget(victim)
        return True

    def make_to_put(
        self, manifest: ChunkManifest, options: PutOptions, hides_s: float
    ) -> tuple[str, Residence | None]:
        """Return the tier that a chunk is to be written to, and room for it in RAM, None if it has to wait.
        `hides_s`: as in `choose_tier`. Raises `InvalidField` and `ResourceExhausted`."""
        size = frames_bytes(manifest)
        tiers = [] if options.is_hot else speeds_of(self._queues)
        best = choose_tier(tiers, size, hides_s, options.durable)
        tier = self._shares.tier_for(manifest, best, options.durable)
        queue = find_queue(self._queues, tier)
        if queue is not None:
            queue.check_size(size)
            if queue.is_full_for(size):
                return tier, None
        return tier, self.make(manifest)

    def unwritten(self) -> list[ChunkEntry]:
        """Return the chunks that only RAM has and that may be on SSD."""
        unwritten = [entry for entry in self._index if entry.disk is None] if self._queues else []
        return [one for one in unwritten if not one.is_hot and self._shares.may_be_on_ssd(one.manifest)]

    def make_share(self, manifest: ChunkManifest) -> bool:
        """Evict a namespace's own chunks from RAM until another one fits its limit. Returns whether it
        fits."""
        while self._shares.exceeds_ram(manifest.namespace, charge_of(manifest)):
            is_own = self._shares.may_make_room(manifest.namespace)
            if not self._evict_from_ram(frames_bytes(manifest), is_own):
                return False
        return True

    def make_in_index(self, manifest: ChunkManifest) -> bool:
        """Forget chunks, those of the slowest tier first, until the entry of another fits the memory that
        entries may take. Returns whether it fits."""
        while self._index.memory_bytes + memory_bytes(manifest) > self.index_bytes_max:
            found = ((tier, tier.policy.evict(may_be_forgotten)) for tier in self._slowest_first)
            tier, victim = next((one for one in found if one[1] is not None), (None, None))
            if tier is None or victim is None:
                return False
            tier.evictions += 1
            self.forget(victim)
        return True

    def trim_ssd(self, namespace: str) -> None:
        """Drop copies below RAM until a namespace is within its limit."""
        while (victim := self._shares.choose_from_ssd(namespace)) is not None:
            if victim.ram is None:
                self.forget(victim)
            else:
                self._transitions.drop_copy(victim, victim.copies[-1])

    def make(self, manifest: ChunkManifest) -> Residence | None:
        """Allocate RAM for a chunk, evicting others if needed. None if no other chunk may leave now."""
        if not self.make_share(manifest):
            return None
        residence = self._ram.allocate(manifest)
        while residence is None and self._evict_from_ram(frames_bytes(manifest)):
            residence = self._ram.allocate(manifest)
        return residence

    def _evict_from_ram(self, needed_bytes: int, is_own: Callable[[str], bool] | None = None) -> bool:
        """Drop the RAM copy of a chunk that has another copy, or begin to write a chunk that leaves RAM
        afterwards. Returns whether any chunk could be evicted."""
        queue = self._queues[0] if self._queues and not self._queues[0].tier.failure else None
        may_write = queue is None or queue.queue_bytes < needed_bytes
        victim = self._ram.policy.evict(lambda entry: may_leave_ram(entry, may_write, is_own))
        if victim is None:
            return False
        assert victim.ram is not None
        self._ram.evictions += 1
        if victim.is_below_ram:
            self._transitions.drop_copy(victim, victim.ram)
        elif queue is not None and not victim.is_hot and self._shares.may_be_on_ssd(victim.manifest):
            self._transitions.begin_write(victim, queue, True)
        elif victim.disk is not None:  # it is being uploaded to a bucket, which may refuse it
            self._transitions.drop_copy(victim, victim.ram)
        else:
            self.forget(victim)
        return True

    def forget(self, entry: ChunkEntry) -> None:
        """Forget an evicted chunk."""
        self._transitions.forget(entry)
        if not entry.is_hot:  # its owners have it, so the store has not become too small
            self._reuse.record_eviction(entry.address)

    def write_or_forget(self, entry: ChunkEntry, source: CopyTier) -> None:
        """Write a chunk that left the tier `source`, and that only RAM has, to the last SSD tier, unless
        `source` is that tier."""
        if source is self._queues[-1].tier:
            self.forget(entry)
        else:
            self._transitions.begin_write(entry, self._queues[-1], False)

    def refusal(self, manifest: ChunkManifest) -> NoRoomYet:
        """The error for a put that found no room in time."""
        return NoRoomYet(
            f"{frames_bytes(manifest)} bytes do not fit beside chunks that are pinned, being read or waiting "
            f"for the disk ({self._ram.allocator.free_bytes} of {self._ram.capacity_bytes} bytes of RAM are "
            "free), or exceed the namespace's limit; try again later"
        )
