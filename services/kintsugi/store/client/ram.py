"""A chunk store in the memory of this process, for a single engine and for tests."""

from __future__ import annotations

import builtins
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice

from kintsugi.core.documents import DOCUMENT_BYTES_MAX, replaces
from kintsugi.core.errors import Corrupted, InvalidField, NotFound, ResourceExhausted
from kintsugi.core.layout import ChunkManifest, HeadRange, check_frames
from kintsugi.core.namespaces import enclosing
from kintsugi.core.spaces import ChunkKey, ModelFingerprint
from kintsugi.store.protocol.content_index import ContentIndex
from kintsugi.store.protocol.interface import (
    ANCHORED_MAX,
    Anchored,
    Buffer,
    ChunkLost,
    ChunkStore,
    ErasedPlace,
    Erasure,
    ErasurePage,
    LayerFrame,
    StoreStats,
)
from kintsugi.store.protocol.wire import memory_bytes

REPORTS_MAX = 1024
ERASURES_MAX = 10_000

_Address = tuple[str, ChunkKey]


@dataclass(frozen=True)
class _Chunk:
    manifest: ChunkManifest
    frames: tuple[memoryview, ...]
    expires_at_s: float = math.inf
    """Time of the store's clock."""


def held_bytes(manifest: ChunkManifest) -> int:
    """Return the bytes that a chunk counts against the capacity: its frames and its manifest."""
    return manifest.chunk_bytes + memory_bytes(manifest)


class RamStore(ChunkStore):
    """Chunks in a dict. Chunks with a lifetime are evicted first, then the least recently used. `put` copies
    the frames, and `stream` yields views of the copies.

    Calls do not wait, except streams of a store with `bytes_per_s`."""

    def __init__(
        self,
        capacity_bytes: int = 4 << 30,
        bytes_per_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`bytes_per_s` is the maximum rate of each stream; measurements use it to simulate a slower tier.
        `clock` returns seconds."""
        self.capacity_bytes = capacity_bytes
        self.bytes_per_s = bytes_per_s
        self._clock = clock
        self._lock = threading.Lock()
        self._chunks: OrderedDict[_Address, _Chunk] = OrderedDict()
        self._expiring: OrderedDict[_Address, None] = OrderedDict()
        """The addresses of chunks with a lifetime, least recently used first."""
        self._by_content = ContentIndex()
        self._reports: dict[tuple[ModelFingerprint, str], bytes] = {}
        self._bytes_used = 0
        self._erasures: OrderedDict[tuple[str, ChunkKey | None], tuple[int, Erasure]] = OrderedDict()
        """The last `ERASURES_MAX` erasures with their numbers, the latest last."""
        self._erased = 0
        """Number of erasures so far."""

    def lookup(self, namespace: str, keys: Sequence[ChunkKey]) -> list[ChunkManifest | None]:
        with self._lock:
            return [self._touch((namespace, key)) for key in keys]

    def _touch(self, address: _Address) -> ChunkManifest | None:
        chunk = self._find(address)
        if chunk is None:
            return None
        self._chunks.move_to_end(address)
        if address in self._expiring:
            self._expiring.move_to_end(address)
        return chunk.manifest

    def _find(self, address: _Address) -> _Chunk | None:
        """Return the chunk; None if it is absent or its lifetime has ended."""
        chunk = self._chunks.get(address)
        if chunk is not None and chunk.expires_at_s <= self._clock():
            self._forget(address)
            return None
        return chunk

    def lookup_anchors(
        self, namespace: str, space_digest: bytes, anchors: Sequence[int]
    ) -> builtins.list[Anchored]:
        with self._lock:
            found = self._by_content.find(namespace, space_digest, anchors, frozenset(anchors))
            return builtins.list(islice(found, ANCHORED_MAX))

    def put(
        self,
        manifest: ChunkManifest,
        frames: Sequence[Buffer],
        recompute_ms: float = 0.0,
        ttl_s: float = 0.0,
    ) -> bool:
        if manifest.is_encrypted:
            raise InvalidField(
                "manifest.key_id", "must be empty: this store has no keys to verify an encrypted chunk"
            )
        _check_ttl(ttl_s)
        check_frames(manifest, [memoryview(frame).nbytes for frame in frames])
        size = held_bytes(manifest)
        if size > self.capacity_bytes:
            raise ResourceExhausted(
                f"a chunk of {size} bytes exceeds this store's {self.capacity_bytes}; "
                "raise its capacity or make chunks shorter"
            )
        every_head = HeadRange(0, manifest.layout.num_kv_heads)
        copies = tuple(memoryview(bytearray(memoryview(frame).cast("B"))) for frame in frames)
        for index, copy in enumerate(copies):
            if not manifest.frame_is_intact(manifest.layers[index], every_head, copy):
                raise Corrupted(f"frames[{index}] does not match the manifest's digest; send it again")
        address = (manifest.namespace, manifest.key)
        manifest = replace(manifest, asked_at_s=manifest.asked_at_s or time.time())
        with self._lock:
            if self._is_erased(manifest):
                raise NotFound(f"chunk {manifest.key} was erased after its save was requested")
            if self._retain(address, ttl_s):
                self._touch(address)
                return False
            while self._bytes_used + size > self.capacity_bytes:
                self._forget(next(iter(self._expiring or self._chunks)))
            self._chunks[address] = _Chunk(manifest, copies, self._clock() + (ttl_s or math.inf))
            if ttl_s:
                self._expiring[address] = None
            self._bytes_used += size
            self._by_content.add(manifest)
        return True

    def retain(self, namespace: str, keys: Sequence[ChunkKey], ttl_s: float = 0.0) -> builtins.list[bool]:
        _check_ttl(ttl_s)
        with self._lock:
            return [self._retain((namespace, key), ttl_s) for key in keys]

    def _retain(self, address: _Address, ttl_s: float) -> bool:
        chunk = self._find(address)
        if chunk is None:
            return False
        expires_at_s = max(chunk.expires_at_s, self._clock() + (ttl_s or math.inf))
        self._chunks[address] = replace(chunk, expires_at_s=expires_at_s)
        if math.isinf(expires_at_s):
            self._expiring.pop(address, None)
        return True

    def _forget(self, address: _Address) -> bool:
        chunk = self._chunks.pop(address, None)
        if chunk is None:
            return False
        self._expiring.pop(address, None)
        manifest = chunk.manifest
        self._bytes_used -= held_bytes(manifest)
        self._by_content.remove(manifest)
        return True

    def stream(
        self,
        namespace: str,
        keys: Sequence[ChunkKey],
        layers: range,
        heads: HeadRange,
        deadline_s: float,
    ) -> Generator[LayerFrame | ChunkLost, None, None]:
        with self._lock:
            chunks = [self._find((namespace, key)) for key in keys]
        due_s = time.perf_counter()
        lost: set[int] = set()
        for layer in layers:
            for index, chunk in enumerate(chunks):
                if index in lost or (chunk is not None and layer not in chunk.manifest.layers):
                    continue
                item = self._frame(index, chunk, layer, heads)
                if isinstance(item, ChunkLost):
                    lost.add(index)
                    self.delete(namespace, [keys[index]])
                elif self.bytes_per_s < math.inf:
                    due_s += len(item.data) / self.bytes_per_s
                    time.sleep(max(0.0, due_s - time.perf_counter()))
                yield item

    @staticmethod
    def _frame(index: int, chunk: _Chunk | None, layer: int, heads: HeadRange) -> LayerFrame | ChunkLost:
        if chunk is None:
            return ChunkLost(index, layer, "absent")
        start, stop = chunk.manifest.head_range_bytes(heads, layer)
        data = chunk.frames[chunk.manifest.place_of(layer)][start:stop]
        if not chunk.manifest.frame_is_intact(layer, heads, data):
            return ChunkLost(index, layer, "digest mismatch")
        return LayerFrame(index, layer, data)

    def delete(self, namespace: str, keys: Sequence[ChunkKey]) -> int:
        with self._lock:
            manifests = (chunk.manifest for (held, _), chunk in self._chunks.items() if held == namespace)
            gone = [one.key for one in manifests if not set(keys).isdisjoint(one.erased_by)]
            return sum(self._forget((namespace, key)) for key in gone)

    def erase(
        self, namespace: str, keys: Sequence[ChunkKey] | None, at_s: float, within: str = ""
    ) -> list[ErasedPlace]:
        """Frees the memory of the chunks, but does not overwrite it."""
        with self._lock:
            for key in [None] if keys is None else keys:
                self._erased += 1
                self._erasures[namespace, key] = (self._erased, Erasure(namespace, key, at_s or time.time()))
                self._erasures.move_to_end((namespace, key))
            while len(self._erasures) > ERASURES_MAX:
                self._erasures.popitem(last=False)
            gone = [chunk.manifest for chunk in self._chunks.values() if self._is_erased(chunk.manifest)]
            for manifest in gone:
                self._forget((manifest.namespace, manifest.key))
        return [ErasedPlace("ram", len(gone), sum(one.chunk_bytes for one in gone), time.time())]

    def _is_erased(self, manifest: ChunkManifest) -> bool:
        names = [
            *((manifest.namespace, key) for key in manifest.erased_by),
            *((name, None) for name in enclosing(manifest.namespace)),
        ]
        found = (self._erasures[name][1] for name in names if name in self._erasures)
        return any(erasure.at_s >= manifest.asked_at_s for erasure in found)

    def erasures(self, cursor: str) -> ErasurePage:
        with self._lock:
            after = int(cursor) if cursor else self._erased
            found = [erasure for number, erasure in self._erasures.values() if number > after]
            return ErasurePage(found, str(self._erased))

    def list(self, namespace: str, limit: int = 1000, after: ChunkKey | None = None) -> list[ChunkManifest]:
        with self._lock:
            addresses = [address for address in self._chunks if address[0] == namespace]
            mine = [chunk.manifest for address in addresses if (chunk := self._find(address)) is not None]
        mine.sort(key=lambda manifest: manifest.key)
        return [m for m in mine if after is None or m.key > after][:limit]

    def put_report(self, fingerprint: ModelFingerprint, name: str, document: bytes) -> None:
        if len(document) > DOCUMENT_BYTES_MAX:
            raise ResourceExhausted(
                f"the report has {len(document)} bytes; at most {DOCUMENT_BYTES_MAX} are allowed"
            )
        with self._lock:
            held = self._reports.get((fingerprint, name))
            if not replaces(document, held, datetime.now(UTC)):
                return
            if len(self._reports) >= REPORTS_MAX and held is None:
                raise ResourceExhausted(f"this store holds at most {REPORTS_MAX} reports")
            self._reports[fingerprint, name] = bytes(document)

    def get_report(self, fingerprint: ModelFingerprint, name: str) -> bytes | None:
        with self._lock:
            return self._reports.get((fingerprint, name))

    @property
    def transport(self) -> str:
        return "ram"

    def stats(self) -> StoreStats:
        with self._lock:
            return StoreStats(len(self._chunks), self._bytes_used, self.capacity_bytes, self.transport)

    def close(self) -> None:
        """Keeps the chunks, because other code in this process may use the store."""


def _check_ttl(ttl_s: float) -> None:
    if not ttl_s >= 0:
        raise InvalidField("ttl_s", f"{ttl_s} is not positive")
