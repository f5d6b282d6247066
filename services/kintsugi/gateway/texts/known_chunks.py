"""Chunks that a gateway has seen: a key's tokens, and known chunk texts inside a longer text.

The store knows chunks by key and holds neither text nor tokens. A request may name a chunk by its key alone,
and an unmodified RAG framework pastes chunk texts into a message; both need what only who put a chunk had.

This is a cache of what clients said, not a truth: what is missing here costs a hit, never an answer. So it
is bounded in all and for each namespace, loses a namespace's oldest entries first, and is written to LMDB by
a thread of its own, some milliseconds late. Without a folder it lives in memory. How texts are found:
`gateway.texts.known_texts`.
"""

from __future__ import annotations

import dataclasses
import logging
import struct
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from kintsugi.core.errors import Corrupted, Unavailable
from kintsugi.core.spaces import KEY_BYTES, ChunkKey, token_bytes
from kintsugi.core.tokens import TokenIds
from kintsugi.gateway.texts.known_texts import WINDOW_CHARS, ChunkText, TextIndex, disjoint, window_hashes
from kintsugi.gateway.texts.shares import Shares

log = logging.getLogger(__name__)

CHUNKS_MAX = 200_000
"""200 MB of memory for the index (101 MB measured for half as many), 740 MB where every chunk has a namespace
of its own (74 MB measured for a tenth), and 2 KiB of token ids a chunk of 512: on disk, or in memory too."""
TOKENS_MAX = 128 << 20
"""Of all chunks together, 512 MiB: chunks may be long."""
NAMESPACE_SHARE_MAX = 0.5
"""Of chunks and of tokens, one namespace's: two tenants never notice each other. Where more of them fill it,
the one that holds most gives way: who holds less than an even share loses nothing to others.
Shares are even between namespaces, not callers: one that may use a thousand of them has a thousand shares."""
PENDING_MAX = 10_000
"""Entries that wait to be written; beyond it they stay in memory only until they are evicted."""

Address = tuple[str, ChunkKey]


@dataclass(frozen=True)
class _Record:
    """A chunk as it is kept."""

    address: Address
    tokens: bytes
    """Little-endian u32."""
    text: ChunkText | None


@dataclass(frozen=True)
class _Entry:
    """A chunk in memory."""

    text: ChunkText | None
    tokens: bytes | None
    """None where they are on disk."""
    num_tokens: int


@dataclass
class _Tenant:
    """What is known of one namespace."""

    seen: OrderedDict[ChunkKey, _Entry] = field(default_factory=OrderedDict)
    """The oldest first."""
    num_tokens: int = 0
    texts: TextIndex = field(default_factory=TextIndex)
    text_users: dict[ChunkText, int] = field(default_factory=dict)
    """How many chunks have the text: each model's chunk of it has another key."""

    def insert(self, key: ChunkKey, entry: _Entry) -> None:
        """It must not be there."""
        self.seen[key] = entry
        self.num_tokens += entry.num_tokens
        if entry.text is not None:
            self.text_users[entry.text] = self.text_users.get(entry.text, 0) + 1
            self.texts.add(entry.text)

    def drop(self, key: ChunkKey) -> _Entry | None:
        entry = self.seen.pop(key, None)
        if entry is None:
            return None
        self.num_tokens -= entry.num_tokens
        if entry.text is not None:
            self.text_users[entry.text] -= 1
            if not self.text_users[entry.text]:
                del self.text_users[entry.text]
                self.texts.remove(entry.text)
        return entry


_NOBODY = _Tenant()
"""What is known of a namespace that holds nothing; never filled."""


class KnownChunks:
    """Thread-safe. Lookups take microseconds and never wait for the disk's commits."""

    def __init__(
        self, folder: Path | None = None, chunks_max: int = CHUNKS_MAX, tokens_max: int = TOKENS_MAX
    ) -> None:
        """Opens or makes the index in `folder`. Raises `Unavailable` and `Corrupted`."""
        self._lock = threading.Lock()
        self._chunks_max = chunks_max
        self._tokens_max = tokens_max
        self._num_chunks = self._num_tokens = 0
        self._tenants: dict[str, _Tenant] = {}
        """By namespace; those that hold something."""
        self._shares = Shares()
        self._disk = None if folder is None else _Disk(folder)
        if self._disk is not None:
            self._load(self._disk)
            self._writer = _Writer(self._disk, self._written)

    def _load(self, disk: _Disk) -> None:
        evicted = []
        for address, text, num_tokens in disk.entries():
            self._insert(address, _Entry(text, None, num_tokens))
            evicted += self._evict(address[0])
        disk.apply([], evicted)

    def __len__(self) -> int:
        return self._num_chunks

    @property
    def room(self) -> int:
        """Chunks that may come before others have to go; none once half of the tokens are there."""
        return 0 if self._num_tokens >= self._tokens_max // 2 else self._chunks_max - self._num_chunks

    def has_room(self, namespace: str) -> bool:
        """Whether a chunk may come before others of its namespace have to go; not once half of the tokens
        that it may have are there."""
        with self._lock:
            tenant = self._tenants.get(namespace, _NOBODY)
            few_tokens = 2 * tenant.num_tokens < NAMESPACE_SHARE_MAX * self._tokens_max
            return few_tokens and len(tenant.seen) + 1 <= NAMESPACE_SHARE_MAX * self._chunks_max

    def remember(
        self, namespace: str, key: ChunkKey, token_ids: Sequence[int], text: str | None = None
    ) -> None:
        """Keep a chunk, and its text where that is what it was tokenised from. The last text counts."""
        address, known = (namespace, key), None if text is None else ChunkText.of(text)
        with self._lock:
            before = self._entry(address)
            if before is not None and known in (None, before.text):
                self._tenants[namespace].seen.move_to_end(key)
                return
            tokens = token_bytes(token_ids)
            self._insert(address, _Entry(known, tokens, len(tokens) // 4))
            evicted = self._evict(namespace)
        if self._disk is not None:
            self._writer.take([_Record(address, tokens, known)], evicted)

    def _entry(self, address: Address) -> _Entry | None:
        namespace, key = address
        return self._tenants.get(namespace, _NOBODY).seen.get(key)

    def _insert(self, address: Address, entry: _Entry) -> None:
        self._drop(address)
        namespace, key = address
        self._tenants.setdefault(namespace, _Tenant()).insert(key, entry)
        self._num_chunks += 1
        self._num_tokens += entry.num_tokens
        self._shares.put(namespace, self._share(namespace))

    def _drop(self, address: Address) -> None:
        namespace, key = address
        entry = self._tenants.get(namespace, _NOBODY).drop(key)
        if entry is None:
            return
        self._num_chunks -= 1
        self._num_tokens -= entry.num_tokens
        self._shares.put(namespace, self._share(namespace))
        if not self._tenants[namespace].seen:
            del self._tenants[namespace]

    def _share(self, namespace: str) -> float:
        """Of all that there may be, by whichever the namespace takes more of: chunks or their tokens."""
        tenant = self._tenants.get(namespace, _NOBODY)
        return max(len(tenant.seen) / self._chunks_max, tenant.num_tokens / self._tokens_max)

    def _evict(self, namespace: str) -> list[Address]:
        """Make room after the namespace has got a chunk: in it first, then in the one that holds most."""
        evicted: list[Address] = []
        while True:
            if self._share(namespace) > NAMESPACE_SHARE_MAX:
                giving = namespace
            elif self._num_chunks > self._chunks_max or self._num_tokens > self._tokens_max:
                giving = self._shares.largest()
            else:
                return evicted
            address = (giving, next(iter(self._tenants[giving].seen)))
            self._drop(address)
            evicted.append(address)

    def _written(self, records: Iterable[_Record]) -> None:
        """Their tokens need not be in memory any more."""
        with self._lock:
            for record in records:
                entry = self._entry(record.address)
                if entry is not None and entry.tokens == record.tokens:
                    namespace, key = record.address
                    self._tenants[namespace].seen[key] = dataclasses.replace(entry, tokens=None)

    def token_ids(self, namespace: str, key: ChunkKey) -> TokenIds | None:
        """The chunk's tokens, None where it was never seen in this namespace, or too long ago."""
        address = (namespace, key)
        with self._lock:
            entry = self._entry(address)
            if entry is not None:
                self._tenants[namespace].seen.move_to_end(key)
        tokens = None if entry is None else entry.tokens
        if tokens is None and self._disk is not None:  # also what another gateway wrote there
            tokens = self._disk.tokens(address)
        return None if tokens is None else TokenIds(tokens)

    def knows(self, namespace: str, key: ChunkKey) -> bool:
        """Whether `token_ids` would give its tokens; not a use of it."""
        with self._lock:
            return self._entry((namespace, key)) is not None

    def used(self, namespace: str, key: ChunkKey) -> bool:
        """Whether it is known; a use of it, without its tokens."""
        with self._lock:
            if self._entry((namespace, key)) is None:
                return False
            self._tenants[namespace].seen.move_to_end(key)
            return True

    def find(self, namespace: str, text: str) -> list[tuple[int, int]]:
        """`[start, end)` of known chunk texts inside `text`, in characters: disjoint, in order, and of
        those that overlap the ones that cover most."""
        if len(text) < WINDOW_CHARS or namespace not in self._tenants:
            return []
        windows = window_hashes(text)  # most of the time, and others need the lock
        with self._lock:
            found = self._tenants.get(namespace, _NOBODY).texts.matches(text, windows)
        return disjoint(found)

    def forget(self, namespace: str, keys: Sequence[ChunkKey]) -> None:
        addresses = [(namespace, key) for key in keys]
        with self._lock:
            for address in addresses:
                self._drop(address)
        if self._disk is not None:
            self._writer.take([], addresses)

    def flush(self) -> None:
        """Return once everything is on disk."""
        if self._disk is not None:
            self._writer.flush()

    def close(self) -> None:
        """Write what waits. Idempotent."""
        if self._disk is not None:
            self._writer.close()
            self._disk.close()


class _Writer:
    """One thread that commits what has come since its last commit."""

    def __init__(self, disk: _Disk, written: Any) -> None:
        self._disk = disk
        self._written = written
        self._changed = threading.Condition()
        self._changes: OrderedDict[Address, _Record | None] = OrderedDict()
        """None: forget it."""
        self._busy = self._closed = False
        self._thread = threading.Thread(target=self._run, name="kintsugi-known-chunks", daemon=True)
        self._thread.start()

    def take(self, records: Iterable[_Record], forgotten: Iterable[Address]) -> None:
        with self._changed:
            changes = [
                *((record.address, record) for record in records),
                *((gone, None) for gone in forgotten),
            ]
            for address, record in changes:
                if record is None or len(self._changes) < PENDING_MAX:
                    self._changes[address] = record
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._changes or self._closed)
                if not self._changes:
                    return
                changes, self._changes, self._busy = self._changes, OrderedDict(), True
            records = [record for record in changes.values() if record is not None]
            try:
                self._disk.apply(records, [address for address, record in changes.items() if record is None])
            except Unavailable as error:
                log.warning("%d known chunks stay in memory only: %s", len(records), error)
            else:
                self._written(records)

    def flush(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not (self._changes or self._busy))

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()


_HEADERS = (struct.Struct("<8sQBQI16s"), struct.Struct("<8sQBQI16sQ"))
"""By version: xxh3-64 of key and the rest, its seed the version; sequence; whether there is a text, and what
is kept of it. Then the tokens, compressed. Version 0 knew no last window: it is read, never written, and who
knows it alone takes what is newer for damaged."""
_VERSION = len(_HEADERS) - 1
_MAP_BYTES_MIN = 64 << 20
_FILL_MAX = 0.9


class _Disk:
    """The LMDB file. One writer at a time; several processes may hold it."""

    def __init__(self, folder: Path) -> None:
        import lmdb  # of the extra `store`: a gateway without a folder does without

        self._lmdb = lmdb
        self._lock = threading.Lock()
        self._mapped = threading.Lock()
        """Held while the map is read or moved: LMDB must not move it below a reader."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._env = lmdb.open(str(folder), map_size=_MAP_BYTES_MIN, max_readers=64)
        except lmdb.Error as error:
            raise Corrupted(f"{folder} holds no index of chunks ({error}); remove the folder") from error
        except OSError as error:
            raise Unavailable(
                f"{folder} cannot be written ({error.strerror}); name another folder"
            ) from error
        self._sequence = 0

    def entries(self) -> Iterator[tuple[Address, ChunkText | None, int]]:
        """With their numbers of tokens, in the order in which they were written."""
        found = []
        with self._transaction(False) as transaction:
            for name, value in transaction.cursor():
                sequence, text, tokens = _decoded(name, value) or (0, None, b"")
                if sequence:
                    namespace = name[: -KEY_BYTES - 1].decode()
                    address = (namespace, ChunkKey(name[-KEY_BYTES:]))
                    found.append((sequence, address, text, len(tokens) // 4))
        found.sort(key=lambda entry: entry[0])
        self._sequence = found[-1][0] if found else 0
        for _, address, text, num_tokens in found:
            yield address, text, num_tokens

    def _transaction(self, write: bool) -> Any:
        try:
            return self._env.begin(write=write)
        except self._lmdb.MapResizedError:  # another process made it larger
            self._env.set_mapsize(0)
            return self._env.begin(write=write)

    def tokens(self, address: Address) -> bytes | None:
        name = _name(address)
        try:
            with self._mapped, self._transaction(False) as transaction:
                value = transaction.get(name)
        except self._lmdb.Error as error:
            log.warning("a known chunk cannot be read: %s", error)
            return None
        decoded = None if value is None else _decoded(name, value)
        return None if decoded is None else decoded[2]

    def apply(self, records: Sequence[_Record], forgotten: Sequence[Address]) -> None:
        """Both or neither. Raises `Unavailable`."""
        with self._lock:
            try:
                self._grow_if_full()
                try:
                    self._apply(records, forgotten)
                except self._lmdb.MapFullError:
                    self._grow()
                    self._apply(records, forgotten)
            except self._lmdb.Error as error:
                raise Unavailable(f"cannot be written: {error}") from error

    def _apply(self, records: Sequence[_Record], forgotten: Sequence[Address]) -> None:
        with self._transaction(True) as transaction:
            for address in forgotten:
                transaction.delete(_name(address))
            for record in records:
                self._sequence += 1
                transaction.put(_name(record.address), _encoded(record, self._sequence))

    def _grow_if_full(self) -> None:
        info, stat = self._env.info(), self._env.stat()
        if (info["last_pgno"] + 1) * stat["psize"] > _FILL_MAX * info["map_size"]:
            self._grow()

    def _grow(self) -> None:
        with self._mapped:
            self._env.set_mapsize(2 * self._env.info()["map_size"])

    def close(self) -> None:
        self._env.close()


def _name(address: Address) -> bytes:
    """Namespaces hold no zero byte."""
    return address[0].encode() + b"\0" + address[1].digest


def _encoded(record: _Record, sequence: int) -> bytes:
    text = record.text or ChunkText(0, 0, b"")
    fields = (sequence, record.text is not None, text.window, text.chars, text.digest, text.last_window)
    value = _HEADERS[_VERSION].pack(b"", *fields)[8:] + zlib.compress(record.tokens, 1)
    return xxhash.xxh3_64_digest(_name(record.address) + value, _VERSION) + value


def _decoded(name: bytes, value: bytes) -> tuple[int, ChunkText | None, bytes] | None:
    """Sequence, text and tokens; None for what is damaged, or not ours."""
    checked = name + value[8:]
    for version in (_VERSION, 0):
        header = _HEADERS[version]
        if len(value) >= header.size and xxhash.xxh3_64_digest(checked, version) == value[:8]:
            break
    else:
        return None
    if len(name) <= KEY_BYTES:
        return None
    _, sequence, has_text, *text = header.unpack_from(value)
    return sequence, ChunkText(*text) if has_text else None, zlib.decompress(value[header.size :])
