"""The erasures that a shard has recorded: what caches follow, and what shards that were away obey.

An erasure names a namespace or a chunk by its key and holds nothing of the chunk. Records are numbered in the
order in which they came; the latest of a chunk or namespace replaces the one before, and one of a namespace
replaces those of its chunks. They are in memory, and in the data directory if there is one. Beyond
`ERASURES_MAX` the namespaces that recorded the most forget their oldest (`forgetting`): a shard that has not
seen these when it returns has to give up what it holds of those namespaces.
"""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import lmdb

from kintsugi.core.errors import Unavailable
from kintsugi.core.namespaces.parts import enclosing
from kintsugi.core.spaces import ChunkKey
from kintsugi.store.protocol.callers import EVERY_NAMESPACE
from kintsugi.store.protocol.durable_files import make_folder, sync_folder
from kintsugi.store.protocol.interface import Erasure
from kintsugi.store.protocol.private_files import PRIVATE_MODE
from kintsugi.store.shard.entry import Address
from kintsugi.store.shard.erasure.forgetting import (
    add_marks,
    choose_to_forget,
    find_mark,
)

ERASURES_MAX = 200_000
FORGOTTEN_AT_ONCE = 1 / 8
"""Share of `ERASURES_MAX` that makes room at a time: choosing looks at all that is recorded."""
AFTER_S = 1e-3
"""So much later than the last erasure of the same chunk does a new one count as asked for, at least: the
clocks of those who ask may differ."""
_MAP_BYTES = 1 << 30
_VALUE = struct.Struct("<dQ?")
"""When it was asked for, its number, and whether another shard told of it."""
_FORGOTTEN = b"\0forgotten"
"""The highest of all marks. Earlier versions know no other, and take it for one of every namespace."""
_PEER = b"\0peer\0"
_MARK = _PEER + b"\0forgotten\0"
"""Prefixes of names that no namespace can have. Earlier versions read a mark as a peer that never asks."""
_NUMBER = struct.Struct("<Q")

_Name = tuple[str, ChunkKey | None]


@dataclass(frozen=True)
class _Record:
    at_s: float
    number: int
    learned: bool


@dataclass(frozen=True)
class ErasureRange:
    """Some of the erasures in their order."""

    erasures: Sequence[Erasure]
    next: int
    """The number up to which they were looked at."""
    forgotten: Mapping[str, int]
    """As `Erasures.forgotten`, at the same moment."""


class Erasures:
    """Thread-safe. Writes raise `Unavailable` where the disk fails; then nothing is recorded."""

    def __init__(self, folder: Path | None) -> None:
        self._lock = threading.Lock()
        self._records: dict[_Name, _Record] = {}
        self._order: dict[int, _Name] = {}
        """Names by number, in ascending order."""
        self.forgotten: dict[str, int] = {}
        """Up to which number erasures may be forgotten, by pattern (`forgetting`). Replaced, not changed."""
        self._peers: dict[str, int] = {}
        self._env = None
        if folder is not None:
            make_folder(folder)
            self._env = lmdb.open(str(folder), map_size=_MAP_BYTES, mode=PRIVATE_MODE)
            sync_folder(folder)
            self._load(self._env)
        self._last = max([*self._order, *self.forgotten.values()], default=0)

    def __len__(self) -> int:
        return len(self._records)

    def _load(self, env: lmdb.Environment) -> None:
        highest = 0
        with env.begin() as transaction:
            for name, value in transaction.cursor():
                if name == _FORGOTTEN:
                    (highest,) = _NUMBER.unpack(value)
                elif name.startswith(_MARK):
                    (self.forgotten[name[len(_MARK) :].decode()],) = _NUMBER.unpack(value)
                elif name.startswith(_PEER):
                    (self._peers[name[len(_PEER) :].decode()],) = _NUMBER.unpack(value)
                else:
                    at_s, number, learned = _VALUE.unpack(value)
                    self._records[_decode_name(name)] = _Record(at_s, number, learned)
        if highest > max(self.forgotten.values(), default=0):  # an earlier version forgot the oldest of all
            self.forgotten[EVERY_NAMESPACE] = highest
        ordered = sorted(self._records.items(), key=lambda item: item[1].number)
        self._order = {record.number: name for name, record in ordered}

    @property
    def newest(self) -> int:
        """The number of the erasure that was recorded last."""
        return self._last

    def record(
        self, erasures: Iterable[Erasure], *, peer: str = "", seen: int = 0, places: Sequence[str] = ()
    ) -> None:
        """Record erasures, durably on return. With `peer` they were learned from that shard, whose erasures
        up to the number `seen` have been seen now. `places`: where these, and all that were recorded before,
        were obeyed; none is named as a shard."""
        with self._lock:
            changes: dict[_Name, _Record | None] = {}
            for erasure in erasures:
                self._last += 1
                namespace, key = erasure.namespace, erasure.key
                if key is None:
                    replaced = [name for name in self._records if name[0] == namespace]
                    changes.update(dict.fromkeys(replaced))
                else:
                    replaced = [
                        name for name in ((namespace, key), (namespace, None)) if name in self._records
                    ]
                before_s = max((self._records[name].at_s for name in replaced), default=-math.inf)
                changes[namespace, key] = _Record(_asked_s(erasure, before_s, peer), self._last, bool(peer))
            numbers = dict.fromkeys(places, self._last) | ({peer: seen} if peer else {})
            self._change(changes, {_PEER + name.encode(): number for name, number in numbers.items()})
            self._peers |= numbers
            if len(self._records) > ERASURES_MAX:
                self._forget_some()

    def _forget_some(self) -> None:
        """Make room for more erasures."""
        count = max(len(self._records) - ERASURES_MAX, int(ERASURES_MAX * FORGOTTEN_AT_ONCE))
        recorded = {number: namespace for number, (namespace, _) in self._order.items()}
        numbers = choose_to_forget(recorded, count)
        marks = add_marks(self.forgotten, {number: recorded[number] for number in numbers})
        stored: dict[bytes, int | None] = dict.fromkeys(_MARK + name.encode() for name in self.forgotten)
        stored |= {_MARK + name.encode(): number for name, number in marks.items()}
        stored[_FORGOTTEN] = max(marks.values())
        self._change({self._order[number]: None for number in numbers}, stored)
        self.forgotten = marks

    def _change(self, changes: Mapping[_Name, _Record | None], numbers: Mapping[bytes, int | None]) -> None:
        """Store, or delete where there is None, records and the numbers beside them. Raises `Unavailable`;
        then nothing changed."""
        if self._env is not None:
            values = {
                name: None if number is None else _NUMBER.pack(number) for name, number in numbers.items()
            }
            values |= {_encode_name(name): _encode_record(record) for name, record in changes.items()}
            _write(self._env, values)
        for name in changes:
            if (old := self._records.pop(name, None)) is not None:
                del self._order[old.number]
        for name, record in changes.items():
            if record is not None:
                self._records[name] = record
                self._order[record.number] = name

    def is_known(self, erasure: Erasure) -> bool:
        """Whether it was obeyed here: the same erasure or a later one of the same chunk is recorded."""
        with self._lock:
            names = self._names_covering(erasure.namespace, erasure.key)
            records = [self._records.get(name) for name in names]
        return any(record is not None and record.at_s >= erasure.at_s for record in records)

    def cover(self, address: Address, seen: int) -> bool:
        """Whether a chunk may have been erased after the erasure with the number `seen`."""
        with self._lock:
            found = [self._records.get(name) for name in self._names_covering(*address)]
            numbers = [one.number for one in found if one is not None]
            return max([*numbers, find_mark(self.forgotten, address[0])]) > seen

    @staticmethod
    def _names_covering(namespace: str, key: ChunkKey | None) -> list[_Name]:
        """The names of the records that a chunk, or all of a namespace, is erased with."""
        return [(namespace, key), *((name, None) for name in enclosing(namespace))]

    def seen_of(self, peer: str) -> int:
        """The number up to which another shard's erasures were obeyed here; 0: none were asked for."""
        with self._lock:
            return self._peers.get(peer, 0)

    def obeyed_in(self, place: str) -> int | None:
        """The number up to which erasures were obeyed in a place; None where none was recorded with it."""
        with self._lock:
            return self._peers.get(place)

    def after(self, number: int, limit: int, learned: bool) -> ErasureRange:
        """At most `limit` records with higher numbers; without `learned` none that another shard told of."""
        with self._lock:
            if number >= self._last:
                return ErasureRange((), number, self.forgotten)
            numbers = [one for one in self._order if one > number][:limit]
            found = [(self._order[one], self._records[self._order[one]]) for one in numbers]
            end, forgotten = numbers[-1] if len(numbers) == limit else self._last, self.forgotten
        erasures = [Erasure(*name, at_s=one.at_s) for name, one in found if learned or not one.learned]
        return ErasureRange(erasures, end, forgotten)

    def close(self) -> None:
        if self._env is not None:
            self._env.close()


def _asked_s(erasure: Erasure, before_s: float, peer: str) -> float:
    """When an erasure counts as asked for, after others of the same chunk or namespace until `before_s`.

    One that another shard told of keeps its time, or two shards would tell each other of ever later ones; so
    does one that is asked for again because its answer was lost.
    """
    if peer or erasure.at_s >= before_s:
        return max(erasure.at_s, before_s)
    return before_s + AFTER_S


def _write(env: lmdb.Environment, values: Mapping[bytes, bytes | None]) -> None:
    """Put values, or delete where there is None, in one durable transaction. Raises `Unavailable`."""
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
    """The namespace, a zero byte, the chunk key or nothing."""
    namespace, key = name
    return namespace.encode() + b"\0" + (b"" if key is None else key.digest)


def _decode_name(name: bytes) -> _Name:
    namespace, _, digest = name.partition(b"\0")
    return namespace.decode(), ChunkKey(digest) if digest else None
