"""Deletions and erasures: their scope, the recorded erasures of a shard, and the calls that an erasure cuts.

A chunk that was requested before an erasure of it is neither taken nor kept. A record of an erasure is a
tombstone: a namespace or a chunk's key, and the time at which the erasure was requested. Records are numbered
in their order. The latest record of a chunk or namespace replaces earlier ones, and a record of a namespace
replaces those of its chunks. They are in memory, and in the data directory if there is one.

The number of records is bounded. If a namespace has more than `NAMESPACE_MAX`, the older half is merged into
one mark; shards that have missed some of these then lose more chunks of that namespace than were erased.
Beyond `ERASURES_MAX` records in all, the records that every known shard has applied are merged. See
docs/adr/0015.
"""

from __future__ import annotations

import math
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import lmdb

from kintsugi.core.errors import ResourceExhausted, Unavailable
from kintsugi.core.namespaces import enclosing, is_within
from kintsugi.core.spaces import ChunkKey
from kintsugi.store.protocol.files import PRIVATE_MODE, make_folder, sync_path
from kintsugi.store.protocol.interface import Erasure, ErasureMark, ErasureRange
from kintsugi.store.protocol.save_times import AFTER_S
from kintsugi.store.shard.entry import Address, ChunkEntry, CopyTier
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

    @staticmethod
    def of(namespace: str, keys: Iterable[ChunkKey]) -> Scope:
        return Scope(namespace, frozenset(keys))

    @property
    def is_erasure(self) -> bool:
        return self.until_s < math.inf

    def takes(self, entry: ChunkEntry) -> bool:
        """Return whether a chunk with a covered address was requested early enough to be removed."""
        return entry.manifest.asked_at_s <= self.until_s

    def covers(self, address: Address) -> bool:
        namespace, key = address
        if self.keys is None:
            return is_within(namespace, self.namespace)
        return namespace == self.namespace and key in self.keys


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
FREE_POLL_S = 0.02
DELETION_S = 600.0
"""How long copies of a deleted chunk are refused: longer than a shard takes to send a copy that it has
read."""
DELETIONS_MAX = 100_000
ERASURES_MAX = 200_000
NAMESPACE_MAX = ERASURES_MAX // 16
"""Maximum number of records of one namespace."""
MERGED_AT_ONCE = 1 / 8
"""Share of `ERASURES_MAX` that is merged at a time."""
AWAY_S_MAX = 30 * 86_400.0
"""Records are not kept for a shard that has recorded nothing for this long."""
_MAP_BYTES = 1 << 30
_VALUE = struct.Struct("<dQ?")
"""Time of the request, number, and whether the erasure was learned from another shard."""
_MARK = struct.Struct("<Qd")
"""A number, and Unix seconds."""
_MERGED, _PEER, _TIER = b"\0merged\0", b"\0peer\0", b"\0tier\0"
"""Prefixes of names that no namespace can have."""

_Name = tuple[str, ChunkKey | None]


@dataclass(frozen=True)
class _Record:
    at_s: float
    number: int
    learned: bool


class Erasures:
    """The records. Thread-safe. Writes raise `Unavailable` if the disk fails; then nothing is recorded. Reads
    do not wait for the disk."""

    def __init__(self, folder: Path | None, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._writing = threading.Lock()
        """Held over a write and the following change in memory."""
        self._lock = threading.Lock()
        """Guards the attributes below."""
        self._records: dict[str, dict[ChunkKey | None, _Record]] = {}
        self._order: dict[int, _Name] = {}
        """Names by number, in ascending order."""
        self._merged: dict[str, ErasureMark] = {}
        self._peers: dict[str, ErasureMark] = {}
        """By shard: up to which number its erasures were applied here, and when."""
        self._tiers: dict[str, ErasureMark] = {}
        """By tier: up to which number erasures were applied in it."""
        self._acknowledged: dict[str, int] = {}
        """By shard: up to which number it has acknowledged this shard's erasures."""
        self._env = None
        if folder is not None:
            make_folder(folder)
            self._env = lmdb.open(str(folder), map_size=_MAP_BYTES, mode=PRIVATE_MODE)
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
                    self._records.setdefault(namespace, {})[key] = _Record(*_VALUE.unpack(value))
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
                changes[namespace, key] = _Record(at_s, number, learned)
            applied = dict.fromkeys(tiers, ErasureMark(number, self._clock()))
            self._change(changes, {_TIER: applied}, number)
        return latest_s

    def merge(self, namespace: str, at_s: float) -> None:
        """Record that another shard has merged its erasures of a namespace until `at_s`. An empty namespace
        means all."""
        with self._writing:
            self._change(
                {}, {_MERGED: {namespace: self._joined(namespace, self._last + 1, at_s)}}, self._last + 1
            )

    def _joined(self, namespace: str, number: int, at_s: float) -> ErasureMark:
        before = self._merged.get(namespace, ErasureMark())
        return ErasureMark(max(before.number, number), max(before.at_s, at_s))

    def _merge_old(self, namespace: str, room: int) -> None:
        """Merge the older half of a namespace's records if it has more than `room`."""
        held = self._records.get(namespace, {})
        if len(held) > max(room, 1):
            numbers = sorted(record.number for record in held.values())
            self._merge(namespace, numbers[: len(numbers) // 2])

    def _merge(self, namespace: str, numbers: Sequence[int]) -> None:
        names = [self._order[number] for number in numbers]
        latest_s = max(self._records[name][key].at_s for name, key in names)
        mark = self._joined(namespace, numbers[-1], latest_s)
        self._change(dict.fromkeys(names), {_MERGED: {namespace: mark}}, self._last)

    def _make_room(self, count: int) -> None:
        """If there are too many records in all, merge those that every known shard has applied."""
        if len(self._order) + count <= ERASURES_MAX:
            return
        acknowledged, slowest = self._find_acknowledged()
        some = max(count, int(ERASURES_MAX * MERGED_AT_ONCE))
        numbers = [number for number in self._order if number <= acknowledged][:some]
        if len(numbers) < count:
            raise ResourceExhausted(
                f"this shard keeps {len(self._order)} erasures for shards that have not applied them yet; "
                f"restart shard {slowest}, or wait until it counts as gone, "
                f"{AWAY_S_MAX / 86_400:.0f} days after its last erasure"
            )
        self._merge("", numbers)

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
            around = ("", *enclosing(address[0]))
            marks = [self._merged[name] for name in around if name in self._merged]
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

    def after(self, number: int, limit: int, learned: bool) -> ErasureRange:
        """Return at most `limit` records after `number`; those learned from other shards only with
        `learned`."""
        with self._lock:
            if number >= self._last:
                return ErasureRange((), number, {})
            numbers = [one for one in self._order if one > number][:limit]
            found = [
                (name, self._records[name[0]][name[1]]) for name in (self._order[one] for one in numbers)
            ]
            end = numbers[-1] if len(numbers) == limit else self._last
            merged = {name: mark for name, mark in self._merged.items() if mark.number > number}
        erasures = [Erasure(*name, at_s=one.at_s) for name, one in found if learned or not one.learned]
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
    return None if record is None else _VALUE.pack(record.at_s, record.number, record.learned)


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
    """Runs work once for all callers that waited when it began. Thread-safe."""

    def __init__(self) -> None:
        self._running = threading.Lock()
        self._asked = 0
        self._done = 0
        self._closed = False
        self._counting = threading.Lock()

    def run(self, work: Callable[[], None]) -> None:
        """Return after one whole run that began after this call. Raises the errors of a run in this
        thread, and `Unavailable` after `close`."""
        with self._counting:
            self._asked += 1
            mine = self._asked
        with self._running:
            if self._done >= mine:
                return
            if self._closed:
                raise Unavailable("this shard is ending; try again after its restart")
            with self._counting:
                covers = self._asked
            work()
            self._done = covers

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
        self._deleted_s: OrderedDict[Address | str, float] = OrderedDict()
        """When a chunk or a whole namespace was deleted: the newest `DELETIONS_MAX`."""
        self._forgotten_s = -math.inf
        """Time of the newest deletion that was dropped from the list."""

    def note(self, deleted: Iterable[Address | str]) -> None:
        """Note that chunks or whole namespaces were deleted now, whether or not they existed."""
        now_s = self._clock()
        for one in deleted:
            self._deleted_s[one] = now_s
            self._deleted_s.move_to_end(one)
        while len(self._deleted_s) > DELETIONS_MAX:
            self._forgotten_s = self._deleted_s.popitem(last=False)[1]

    def cover(self, address: Address) -> bool:
        """Return whether a chunk may have been deleted within `DELETION_S`."""
        whole = (self._deleted_s.get(namespace) for namespace in enclosing(address[0]))
        times = (self._deleted_s.get(address), *whole, self._forgotten_s)
        last_s = max(time for time in times if time is not None)
        return self._clock() - last_s < DELETION_S
