"""Deletions and erasures: their scope, the recorded erasures of a shard, and the calls that an erasure cuts.

A chunk whose save was requested before its erasure is neither accepted nor kept. A record of an erasure is a
tombstone: a namespace or a chunk's key, and the time at which the erasure was requested. Records are numbered
in their order. The latest record of a chunk or namespace replaces earlier ones, and a record of a namespace
replaces those of its chunks. They are in memory, and in the data directory if there is one.

The number of records is bounded. If a namespace has more than `NAMESPACE_MAX`, the older half is merged into
one mark; shards that have missed some of these then lose more chunks of that namespace than were erased.
Beyond `ERASURES_MAX` records in all, records of the pattern that has the most are merged: the pattern of
namespaces that the caller of an erasure may use. So no caller can make a shard lose chunks that it may not
delete. See docs/adr/0015.
"""

from __future__ import annotations

import math
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import lmdb

from kintsugi.core.errors import ResourceExhausted, Unavailable
from kintsugi.core.layout import ChunkManifest
from kintsugi.core.namespaces import EVERY_NAMESPACE, enclosing, is_within, matches
from kintsugi.core.spaces import ChunkKey
from kintsugi.store.protocol.files import make_folder, sync_path
from kintsugi.store.protocol.interface import Erasure, ErasureMark, ErasureRange
from kintsugi.store.protocol.save_times import AFTER_S
from kintsugi.store.shard.entry import Address, ChunkEntry, CopyTier
from kintsugi.store.shard.tiers.lower_tier import open_private
from kintsugi.store.shard.tiers.ram_tier import ChunkPut
from kintsugi.store.shard.work import Eviction


@dataclass(frozen=True)
class Scope:
    """Some chunks of a namespace, or all of it with its parts."""

    namespace: str
    keys: frozenset[ChunkKey] | None = None
    """None: all."""
    until_s: float = math.inf
    """Unix seconds: chunks whose save was requested later are kept."""
    within: str = EVERY_NAMESPACE
    """The pattern of namespaces that the caller may use."""
    latest_s: float = math.inf
    """Unix seconds: no save can have been requested later. A chunk that was has its time from a clock that
    was ahead, and nobody knows when its save was requested."""

    @staticmethod
    def of(namespace: str, keys: Iterable[ChunkKey], within: str = EVERY_NAMESPACE) -> Scope:
        return Scope(namespace, frozenset(keys), within=within)

    @property
    def is_erasure(self) -> bool:
        return self.until_s < math.inf

    def takes(self, entry: ChunkEntry) -> bool:
        """Return whether a chunk with a covered address was requested early enough to be removed."""
        return not self.until_s < entry.manifest.asked_at_s <= self.latest_s

    def covers(self, address: Address) -> bool:
        namespace, key = address
        if self.keys is None:
            return is_within(namespace, self.namespace)
        return namespace == self.namespace and key in self.keys

    def find_prepared(self, manifests: Iterable[ChunkManifest]) -> set[ChunkKey]:
        """Return the keys of those chunks that were prefilled after one of the scope's chunks."""
        keys = self.keys or frozenset()
        return {
            one.key
            for one in manifests
            if one.namespace == self.namespace and not keys.isdisjoint(one.context_keys)
        }

    def with_keys(self, keys: Iterable[ChunkKey]) -> Scope:
        """Return the scope with these chunks added. The scope of a whole namespace includes them already."""
        return self if self.keys is None else replace(self, keys=self.keys.union(keys))


@dataclass
class Removed:
    """Counts of removed chunks and copies."""

    chunks: int = 0
    tiers: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Copies and their bytes by the name of their tier."""
    gone_at_s: float = 0.0
    """Unix seconds: when an erasure finished wiping their bytes."""

    def count(self, entry: ChunkEntry) -> None:
        """Count a chunk that is about to be forgotten."""
        self.chunks += 1
        for residence in entry.copies:
            chunks, size_bytes = self.tiers.get(residence.tier.name, (0, 0))
            self.tiers[residence.tier.name] = (chunks + 1, size_bytes + residence.size_bytes)

    def add(self, other: Removed) -> None:
        """Add the counts of `other`."""
        self.chunks += other.chunks
        for name, (chunks, size_bytes) in other.tiers.items():
            before = self.tiers.get(name, (0, 0))
            self.tiers[name] = (before[0] + chunks, before[1] + size_bytes)


def scopes_of(erasures: Iterable[Erasure]) -> list[Scope]:
    """Return the scopes of erasures: one for all erasures of a namespace with the same time."""
    keys: dict[tuple[str, float], set[ChunkKey] | None] = {}
    for erasure in erasures:
        named = keys.setdefault((erasure.namespace, erasure.at_s), set())
        if erasure.key is None:
            keys[erasure.namespace, erasure.at_s] = None
        elif named is not None:
            named.add(erasure.key)
    return [
        Scope(namespace, None if some is None else frozenset(some), at_s)
        for (namespace, at_s), some in keys.items()
    ]


def is_in_hand(
    scope: Scope, tiers: Iterable[CopyTier], puts: Iterable[ChunkPut], evictions: Iterable[Eviction]
) -> bool:
    """Return whether any call or thread still uses the bytes of removed chunks."""
    addresses = chain(
        (residence.address for tier in tiers for residence in tier.lingering),
        (put.entry.address for put in puts if put.is_erased),
        (eviction.entry.address for eviction in evictions if eviction.entry.gone),
    )
    return any(map(scope.covers, addresses))


CLEAR_BATCH = 256
"""Maximum number of a namespace's chunks that are forgotten per acquisition of the table's lock."""
DELETION_S = 600.0
"""How long copies of a deleted chunk are refused: longer than a shard takes to send a copy that it has
read."""
DELETIONS_MAX = 100_000
ERASURES_MAX = 200_000
NAMESPACE_MAX = ERASURES_MAX // 16
"""Maximum number of records of one namespace."""
AWAY_S_MAX = 30 * 86_400.0
"""Records are not kept for a shard that has recorded nothing for this long."""
_MAP_BYTES = 1 << 30
MERGED_AT_ONCE = 1 / 8
"""Share of `ERASURES_MAX` that is merged at a time."""
_VALUE = struct.Struct("<dQx")
"""Time of the request, number, and an unused byte. Then the pattern, unless it includes every namespace."""
_MARK = struct.Struct("<Qd")
"""A number, and Unix seconds."""
_MERGED, _PEER, _TIER = b"\0merged\0", b"\0peer\0", b"\0tier\0"
"""Prefixes of names that no namespace can have."""

_Name = tuple[str, ChunkKey | None]


@dataclass(frozen=True)
class _Record:
    at_s: float
    number: int
    within: str


class Erasures:
    """The records. Thread-safe. Writes raise `Unavailable` if the disk fails; then nothing is recorded. Reads
    do not wait for the disk."""

    def __init__(self, folder: Path | None, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._writing = threading.Lock()
        """Held during a write and the following change in memory."""
        self._lock = threading.Lock()
        """Guards the attributes below."""
        self._records: dict[str, dict[ChunkKey | None, _Record]] = {}
        self._order: dict[int, _Name] = {}
        """Names by number, in ascending order."""
        self._merged: dict[str, ErasureMark] = {}
        """By pattern of namespaces."""
        self._peers: dict[str, ErasureMark] = {}
        """By shard: up to which number its erasures were applied here, and when."""
        self._tiers: dict[str, ErasureMark] = {}
        """By tier: up to which number erasures were applied in it."""
        self._acknowledged: dict[str, int] = {}
        """By shard: up to which number it has acknowledged this shard's erasures."""
        self._env = None
        if folder is not None:
            make_folder(folder)
            self._env = open_private(folder, _MAP_BYTES)
            sync_path(folder)
            self._load(self._env)
        self._last = max([*self._order, *(mark.number for mark in self._merged.values())], default=0)

    def __len__(self) -> int:
        return len(self._order)

    def _load(self, env: lmdb.Environment) -> None:
        with env.begin() as transaction:
            for name, value in transaction.cursor():
                for prefix, marks in self._marks():
                    if name.startswith(prefix):
                        marks[name[len(prefix) :].decode()] = ErasureMark(*_MARK.unpack(value))
                        break
                else:
                    namespace, key = _decode_name(name)
                    self._records.setdefault(namespace, {})[key] = _decode_record(value)
        named = [
            (one.number, (namespace, key))
            for namespace, some in self._records.items()
            for key, one in some.items()
        ]
        self._order = dict(sorted(named, key=lambda item: item[0]))

    def _marks(self) -> tuple[tuple[bytes, dict[str, ErasureMark]], ...]:
        return (_MERGED, self._merged), (_PEER, self._peers), (_TIER, self._tiers)

    @property
    def newest(self) -> int:
        """The number of the newest erasure."""
        return self._last

    def record(
        self, erasures: Iterable[Erasure], *, learned: bool = False, tiers: Sequence[str] = ()
    ) -> float:
        """Record erasures, durably on return. Returns their latest time in Unix seconds. `learned`: they come
        from another shard. `tiers`: this shard's tiers, which apply the erasures. Raises `ResourceExhausted`
        if too many records must be kept for absent shards."""
        given = list(dict.fromkeys(erasures))
        with self._writing:
            for namespace in {erasure.namespace for erasure in given}:
                self._merge_old(namespace, NAMESPACE_MAX - len(given))
            self._make_room(len(given))
            number, latest_s = self._last, -math.inf
            changes: dict[_Name, _Record | None] = {}
            for erasure in given:
                number += 1
                namespace, key = erasure.namespace, erasure.key
                held = self._records.get(namespace, {})
                replaced = [key, None] if key is not None else list(held)
                before_s = max((held[one].at_s for one in replaced if one in held), default=-math.inf)
                if key is None:
                    changes.update(dict.fromkeys((namespace, one) for one in held))
                at_s = _asked_s(erasure.at_s, before_s, learned)
                latest_s = max(latest_s, at_s)
                changes[namespace, key] = _Record(at_s, number, erasure.within)
            applied = dict.fromkeys(tiers, ErasureMark(number, self._clock()))
            self._change(changes, {_TIER: applied}, number)
        return latest_s

    def merge(self, pattern: str, at_s: float) -> None:
        """Record that another shard has merged its erasures of a pattern's namespaces until `at_s`."""
        with self._writing:
            self._change(
                {}, {_MERGED: {pattern: self._joined(pattern, self._last + 1, at_s)}}, self._last + 1
            )

    def _joined(self, pattern: str, number: int, at_s: float) -> ErasureMark:
        before = self._merged.get(pattern, ErasureMark())
        return ErasureMark(max(before.number, number), max(before.at_s, at_s))

    def _merge_old(self, namespace: str, room: int) -> None:
        """Merge the older half of a namespace's records if it has more than `room`."""
        held = self._records.get(namespace, {})
        if len(held) > max(room, 1):
            numbers = sorted(record.number for record in held.values())
            self._merge(namespace, numbers[: len(numbers) // 2])

    def _merge(self, pattern: str, numbers: Sequence[int]) -> None:
        """Merge records, whose numbers ascend, into the mark of a pattern that includes their namespaces."""
        names = [self._order[number] for number in numbers]
        latest_s = max(self._records[name][key].at_s for name, key in names)
        mark = self._joined(pattern, numbers[-1], latest_s)
        self._change(dict.fromkeys(names), {_MERGED: {pattern: mark}}, self._last)

    def _make_room(self, count: int) -> None:
        """If there are too many records in all, merge the oldest of the pattern that has the most, if
        possible those that every known shard has applied. Records of every namespace are merged only if
        every known shard has applied them; then the pattern with the next most records follows."""
        while len(self._order) + count > ERASURES_MAX:
            acknowledged, slowest = self._find_acknowledged()
            by_pattern: dict[str, list[int]] = {}
            for number, (name, key) in self._order.items():
                by_pattern.setdefault(self._records[name][key].within, []).append(number)
            for pattern in sorted(by_pattern, key=lambda pattern: -len(by_pattern[pattern])):
                applied = [number for number in by_pattern[pattern] if number <= acknowledged]
                if applied or pattern != EVERY_NAMESPACE:
                    self._merge(
                        pattern, (applied or by_pattern[pattern])[: int(ERASURES_MAX * MERGED_AT_ONCE)]
                    )
                    break
            else:
                raise ResourceExhausted(
                    f"this shard keeps {len(self._order)} erasures for shards that have not applied them "
                    f"yet; restart shard {slowest}, or wait until it counts as gone, "
                    f"{AWAY_S_MAX / 86_400:.0f} days after its last erasure"
                )

    def _find_acknowledged(self) -> tuple[int, str]:
        """Return up to which number every known shard has applied the erasures, and the slowest shard."""
        since_s = self._clock() - AWAY_S_MAX
        with self._lock:
            waited_for = [peer for peer, mark in self._peers.items() if mark.at_s >= since_s]
            numbers = {peer: self._acknowledged.get(peer, 0) for peer in waited_for}
        slowest = min(numbers, key=lambda peer: numbers[peer], default="")
        return numbers.get(slowest, self._last), slowest

    def _change(
        self,
        changes: Mapping[_Name, _Record | None],
        marks: Mapping[bytes, Mapping[str, ErasureMark]],
        last: int,
    ) -> None:
        """Store records (None deletes one) and marks. Raises `Unavailable`; then nothing changed."""
        if self._env is not None:
            values = {_encode_name(name): _encode_record(record) for name, record in changes.items()}
            for prefix, some in marks.items():
                values |= {
                    prefix + name.encode(): _MARK.pack(mark.number, mark.at_s) for name, mark in some.items()
                }
            _write(self._env, values)
        with self._lock:
            for namespace, key in changes:
                held = self._records.get(namespace, {})
                if (old := held.pop(key, None)) is not None:
                    del self._order[old.number]
                if not held:
                    self._records.pop(namespace, None)
            for (namespace, key), record in changes.items():
                if record is not None:
                    self._records.setdefault(namespace, {})[key] = record
                    self._order[record.number] = (namespace, key)
            for prefix, known in self._marks():
                known.update(marks.get(prefix, {}))
            self._last = last

    def is_known(self, erasure: Erasure) -> bool:
        """Return whether the same erasure, or a later one that covers it, is recorded."""
        with self._lock:
            return self._latest_s(erasure.namespace, erasure.key) >= erasure.at_s

    def cover(self, address: Address, asked_at_s: float, seen: int = 0) -> bool:
        """Return whether a chunk requested at `asked_at_s` was erased, or may have been erased by a merged
        erasure with a number above `seen`."""
        with self._lock:
            marks = (mark for pattern, mark in self._merged.items() if matches(pattern, address[0]))
            merged_s = max((mark.at_s for mark in marks if mark.number > seen), default=-math.inf)
            return max(self._latest_s(*address), merged_s) >= asked_at_s

    def _latest_s(self, namespace: str, key: ChunkKey | None) -> float:
        """Return the time of the latest erasure that covers a chunk, or a whole namespace."""
        names = [(namespace, key), *((name, None) for name in enclosing(namespace))]
        found = (self._records.get(name, {}).get(one) for name, one in names)
        return max((record.at_s for record in found if record is not None), default=-math.inf)

    def seen_of(self, peer: str) -> int:
        """Return up to which number another shard's erasures were applied here; 0: none were."""
        with self._lock:
            return self._peers.get(peer, ErasureMark()).number

    def note_seen(self, peer: str, number: int) -> None:
        """Record up to which number another shard's erasures were applied here. Durable on return."""
        with self._writing:
            self._change({}, {_PEER: {peer: ErasureMark(number, self._clock())}}, self._last)

    def acknowledge(self, peer: str, number: int) -> None:
        """Note up to which number another shard has applied this shard's erasures."""
        with self._lock:
            self._acknowledged[peer] = number

    def applied_in(self, tier: str) -> int:
        """Return up to which number erasures were applied in a tier; 0 for an unknown tier."""
        with self._lock:
            return self._tiers.get(tier, ErasureMark()).number

    def after(self, number: int, limit: int) -> ErasureRange:
        """Return at most `limit` records after `number`, with those learned from other shards."""
        with self._lock:
            if number >= self._last:
                return ErasureRange((), number, {})
            numbers = [one for one in self._order if one > number][:limit]
            found = [
                (name, self._records[name[0]][name[1]]) for name in (self._order[one] for one in numbers)
            ]
            end = numbers[-1] if len(numbers) == limit else self._last
            merged = {name: mark for name, mark in self._merged.items() if mark.number > number}
        erasures = [Erasure(*name, one.at_s, one.within) for name, one in found]
        return ErasureRange(erasures, end, merged)

    def close(self) -> None:
        if self._env is not None:
            self._env.close()


def _asked_s(at_s: float, before_s: float, learned: bool) -> float:
    """Return the time to record for an erasure if the same chunk or namespace was already erased at
    `before_s`. A learned erasure keeps its time, because two shards would otherwise exchange ever later ones.
    An erasure that is repeated because its answer was lost keeps its time, too.
    """
    if learned or at_s >= before_s:
        return max(at_s, before_s)
    return before_s + AFTER_S


def _write(env: lmdb.Environment, values: Mapping[bytes, bytes | None]) -> None:
    """Put values (None deletes one) in one durable transaction. Raises `Unavailable`."""
    try:
        with env.begin(write=True) as transaction:
            for name, value in values.items():
                if value is None:
                    transaction.delete(name)
                else:
                    transaction.put(name, value)
    except lmdb.Error as error:
        raise Unavailable(f"the erasure could not be recorded: {error}; erase again") from error


def _encode_record(record: _Record | None) -> bytes | None:
    if record is None:
        return None
    within = "" if record.within == EVERY_NAMESPACE else record.within
    return _VALUE.pack(record.at_s, record.number) + within.encode()


def _decode_record(value: bytes) -> _Record:
    at_s, number = _VALUE.unpack(value[: _VALUE.size])
    within = value[_VALUE.size :].decode()
    return _Record(at_s, number, within or EVERY_NAMESPACE)


def _encode_name(name: _Name) -> bytes:
    """Return the namespace, a zero byte, and the chunk key if there is one."""
    namespace, key = name
    return namespace.encode() + b"\0" + (b"" if key is None else key.digest)


def _decode_name(name: bytes) -> _Name:
    namespace, _, digest = name.partition(b"\0")
    return namespace.decode(), ChunkKey(digest) if digest else None


class Holders:
    """The running calls. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[object, tuple[Sequence[Address], Callable[[], bool], Callable[[], None]]] = {}

    @contextmanager
    def add(
        self, addresses: Sequence[Address], is_in_the_way: Callable[[], bool], cut: Callable[[], None]
    ) -> Iterator[None]:
        """Register a call that holds chunks during the `with` block. `is_in_the_way` returns whether the
        chunks that it holds were forgotten; other chunks may have their addresses by then. `cut` ends the
        call. Both may be called from any thread and more than once, and must not wait."""
        call = object()
        with self._lock:
            self._calls[call] = addresses, is_in_the_way, cut
        try:
            yield
        finally:
            with self._lock:
                del self._calls[call]

    def cut(self, scope: Scope) -> None:
        """Cut the calls that hold forgotten chunks of a scope."""
        with self._lock:
            calls = list(self._calls.values())
        for addresses, is_in_the_way, cut in calls:
            if any(map(scope.covers, addresses)) and is_in_the_way():
                cut()


class Shared:
    """Runs work once for all callers that joined before it began. Thread-safe."""

    def __init__(self) -> None:
        self._running = threading.Lock()
        self._joined = 0
        self._done = 0
        self._closed = False
        self._counting = threading.Lock()

    def join(self) -> int:
        """Return a number for `run`."""
        with self._counting:
            self._joined += 1
            return self._joined

    def run(self, number: int, work: Callable[[], None]) -> bool:
        """Return whether a whole run has begun and ended after `join` returned `number`. Runs the work in
        this thread unless another thread does; then call again. Raises the errors of the work, and
        `Unavailable` after `close`."""
        if self._done >= number:
            return True
        if not self._running.acquire(blocking=False):
            return False
        try:
            if self._done < number:
                if self._closed:
                    raise Unavailable("this shard is ending; try again after its restart")
                with self._counting:
                    covers = self._joined
                work()
                self._done = covers
            return True
        finally:
            self._running.release()

    def close(self) -> None:
        """Wait for the running work and prevent further runs."""
        with self._running:
            self._closed = True


class Deletions:
    """Recent deletions. Another shard may have read a copy before a deletion; it must not restore the chunk.

    Not thread-safe: the table holds the lock.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._deleted_s: dict[str, OrderedDict[Address | str, float]] = {}
        """When a chunk or a whole namespace was deleted, by the pattern of namespaces that the caller may
        use: the newest, `DELETIONS_MAX` in all."""
        self._forgotten_s: dict[str, float] = {}
        """By pattern: time of the newest deletion that was dropped from the list."""

    def note(self, deleted: Iterable[Address | str], within: str = EVERY_NAMESPACE) -> None:
        """Note that a caller that may use the namespaces `within` has now deleted chunks or whole namespaces,
        whether or not they existed."""
        now_s = self._clock()
        noted = self._deleted_s.setdefault(within, OrderedDict())
        for one in deleted:
            noted[one] = now_s
            noted.move_to_end(one)
        while sum(map(len, self._deleted_s.values())) > DELETIONS_MAX:
            largest = max(self._deleted_s, key=lambda pattern: len(self._deleted_s[pattern]))
            self._forgotten_s[largest] = self._deleted_s[largest].popitem(last=False)[1]

    def took(self, manifest: ChunkManifest) -> bool:
        """Return whether a chunk, or a text that it was prefilled after, may have been deleted recently."""
        return any(self.cover((manifest.namespace, key)) for key in manifest.erased_by)

    def cover(self, address: Address) -> bool:
        """Return whether a chunk may have been deleted within `DELETION_S`."""
        since_s = self._clock() - DELETION_S
        names: tuple[Address | str, ...] = (address, *enclosing(address[0]))
        return any(
            noted.get(name, -math.inf) > since_s for noted in self._deleted_s.values() for name in names
        ) or any(
            forgotten_s > since_s and matches(pattern, address[0])
            for pattern, forgotten_s in self._forgotten_s.items()
        )
