"""The erasures that a shard has recorded: what caches follow, and what shards that were away obey.

An erasure names a namespace or a chunk by its key and holds nothing of the chunk. Records are numbered in the
order in which they came; the latest of a chunk or namespace replaces the one before, and one of a namespace
replaces those of its chunks. They are in memory, and in the data directory if there is one. The oldest beyond
`ERASURES_MAX` are forgotten: a shard that has not seen them when it returns has to give up all that it holds.
"""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import lmdb

from kintsugi.core.errors import Unavailable
from kintsugi.core.spaces import ChunkKey
from kintsugi.store.protocol.durable_files import make_folder, sync_folder
from kintsugi.store.protocol.interface import Erasure
from kintsugi.store.protocol.private_files import PRIVATE_MODE
from kintsugi.store.shard.entry import Address

ERASURES_MAX = 200_000
AFTER_S = 1e-3
"""So much later than the last erasure of the same chunk does a new one count as asked for, at least: the
clocks of those who ask may differ."""
_MAP_BYTES = 1 << 30
_VALUE = struct.Struct("<dQ?")
"""When it was asked for, its number, and whether another shard told of it."""
_FORGOTTEN = b"\0forgotten"
_PEER = b"\0peer\0"
"""Prefixes of names that no namespace can have."""
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


class Erasures:
    """Thread-safe. Writes raise `Unavailable` where the disk fails; then nothing is recorded."""

    def __init__(self, folder: Path | None) -> None:
        self._lock = threading.Lock()
        self._records: dict[_Name, _Record] = {}
        self._order: dict[int, _Name] = {}
        """Names by number, in ascending order."""
        self.forgotten = 0
        """Erasures up to this number are forgotten."""
        self._peers: dict[str, int] = {}
        self._env = None
        if folder is not None:
            make_folder(folder)
            self._env = lmdb.open(str(folder), map_size=_MAP_BYTES, mode=PRIVATE_MODE)
            sync_folder(folder)
            self._load(self._env)
        self._last = max(self._order, default=self.forgotten)

    def __len__(self) -> int:
        return len(self._records)

    def _load(self, env: lmdb.Environment) -> None:
        with env.begin() as transaction:
            for name, value in transaction.cursor():
                if name == _FORGOTTEN:
                    (self.forgotten,) = _NUMBER.unpack(value)
                elif name.startswith(_PEER):
                    (self._peers[name[len(_PEER) :].decode()],) = _NUMBER.unpack(value)
                else:
                    at_s, number, learned = _VALUE.unpack(value)
                    self._records[_decode_name(name)] = _Record(at_s, number, learned)
        ordered = sorted(self._records.items(), key=lambda item: item[1].number)
        self._order = {record.number: name for name, record in ordered}

    @property
    def newest(self) -> int:
        """The number of the erasure that was recorded last."""
        return self._last

    def record(self, erasures: Iterable[Erasure], *, peer: str = "", seen: int = 0) -> None:
        """Record erasures, durably on return. With `peer` they were learned from that shard, whose erasures
        up to the number `seen` have been seen now."""
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
            added = sum((record is not None) - (name in self._records) for name, record in changes.items())
            for number in list(self._order)[: max(0, len(self._order) + added - ERASURES_MAX)]:
                changes.setdefault(self._order[number])
                self.forgotten = number
            self._write(changes, peer, seen)
            for name, record in changes.items():
                old = self._records.pop(name, None)
                if old is not None:
                    del self._order[old.number]
                if record is not None:
                    self._records[name] = record
            for name, record in changes.items():
                if record is not None:
                    self._order[record.number] = name
            if peer:
                self._peers[peer] = seen

    def _write(self, changes: dict[_Name, _Record | None], peer: str, seen: int) -> None:
        if self._env is None:
            return
        try:
            with self._env.begin(write=True) as transaction:
                for name, record in changes.items():
                    if record is None:
                        transaction.delete(_encode_name(name))
                    else:
                        value = _VALUE.pack(record.at_s, record.number, record.learned)
                        transaction.put(_encode_name(name), value)
                transaction.put(_FORGOTTEN, _NUMBER.pack(self.forgotten))
                if peer:
                    transaction.put(_PEER + peer.encode(), _NUMBER.pack(seen))
        except lmdb.Error as error:
            raise Unavailable(f"the erasure could not be recorded: {error}; erase again") from error

    def is_known(self, erasure: Erasure) -> bool:
        """Whether it was obeyed here: the same erasure or a later one of the same chunk is recorded."""
        with self._lock:
            names: tuple[_Name, ...] = ((erasure.namespace, erasure.key), (erasure.namespace, None))
            records = [self._records.get(name) for name in names]
        return any(record is not None and record.at_s >= erasure.at_s for record in records)

    def cover(self, address: Address, seen: int) -> bool:
        """Whether a chunk may have been erased after the erasure with the number `seen`."""
        with self._lock:
            found = (self._records.get(address), self._records.get((address[0], None)))
            return self.forgotten > seen or any(one is not None and one.number > seen for one in found)

    def seen_of(self, peer: str) -> int:
        """The number up to which another shard's erasures were obeyed here; 0: none were asked for."""
        with self._lock:
            return self._peers.get(peer, 0)

    def after(self, number: int, limit: int, learned: bool) -> ErasureRange:
        """At most `limit` records with higher numbers; without `learned` none that another shard told of."""
        with self._lock:
            if number >= self._last:
                return ErasureRange((), number)
            numbers = [one for one in self._order if one > number][:limit]
            found = [(self._order[one], self._records[self._order[one]]) for one in numbers]
            end = numbers[-1] if len(numbers) == limit else self._last
        erasures = [Erasure(*name, at_s=one.at_s) for name, one in found if learned or not one.learned]
        return ErasureRange(erasures, end)

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


def _encode_name(name: _Name) -> bytes:
    """The namespace, a zero byte, the chunk key or nothing."""
    namespace, key = name
    return namespace.encode() + b"\0" + (b"" if key is None else key.digest)


def _decode_name(name: bytes) -> _Name:
    namespace, _, digest = name.partition(b"\0")
    return namespace.decode(), ChunkKey(digest) if digest else None
