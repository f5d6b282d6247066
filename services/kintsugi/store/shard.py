"""A shard: the decisions about which bytes are where. No network; thread-safe.

One lock guards the index, the tiers' free space and every reader count; no I/O and no copy of chunk KV
happens under it.
"""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kintsugi.client.interface import ANCHOR_CANDIDATES_MAX
from kintsugi.core.errors import InvalidField, ResourceExhausted
from kintsugi.core.layout import ChunkManifest, HeadRange
from kintsugi.core.spaces import ChunkKey, ModelFingerprint, checked_namespace
from kintsugi.store.entry import Address, Entry
from kintsugi.store.index import Index
from kintsugi.store.put import ChunkPut
from kintsugi.store.ram_tier import RamTier
from kintsugi.store.reading import HeldChunk, Reading

REPORTS_MAX = 1024
REPORT_BYTES_MAX = 1 << 20


@dataclass(frozen=True)
class PutOptions:
    """What a put may ask for beside its bytes."""

    ttl_s: float = math.inf
    recompute_ms: float = 0.0


class Shard:
    """Chunk KV in this process's arena."""

    def __init__(
        self, ram: RamTier, shard_id: str | None = None, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self.shard_id = shard_id or str(uuid.uuid4())
        self.ram = ram
        self.hits = 0
        self.misses = 0
        self.quarantined = 0
        self._lock = threading.RLock()
        self._index = Index()
        self._reports: dict[tuple[ModelFingerprint, str], bytes] = {}
        self._wall_clock = wall_clock

    # Finding

    def lookup(self, namespace: str, keys: Sequence[ChunkKey]) -> list[Entry | None]:
        """The entry of each key; a hit counts as a use."""
        checked_namespace(namespace)
        with self._lock:
            return [self._used((namespace, key)) for key in keys]

    def _used(self, address: Address) -> Entry | None:
        entry = self._living(address)
        if entry is None:
            self.misses += 1
            return None
        self.hits += 1
        if entry.ram is not None:
            self.ram.policy.touch(entry)
        return entry

    def _living(self, address: Address) -> Entry | None:
        """The entry, unless it is absent or its time is over."""
        entry = self._index.get(address)
        if entry is not None and entry.expires_at_s <= self._wall_clock():
            self._forget(entry)
            return None
        return entry

    def lookup_anchors(
        self, namespace: str, space_digest: bytes, anchors: Sequence[int]
    ) -> dict[int, list[ChunkManifest]]:
        """As `ChunkStore.lookup_anchors`."""
        checked_namespace(namespace)
        found: dict[int, list[ChunkManifest]] = {}
        with self._lock:
            for anchor in set(anchors):
                entries = self._index.candidates(namespace, space_digest, anchor)
                manifests = sorted((entry.manifest for entry in entries), key=lambda m: -m.num_tokens)
                if manifests:
                    found[anchor] = manifests[:ANCHOR_CANDIDATES_MAX]
        return found

    def list(self, namespace: str, limit: int, after: ChunkKey | None) -> list[Entry]:
        """Entries in key order."""
        checked_namespace(namespace)
        with self._lock:
            return self._index.page(namespace, limit, after)

    # Writing

    def begin_put(self, manifest: ChunkManifest, options: PutOptions | None = None) -> ChunkPut | None:
        """Room for a chunk, or None where the key is there already.

        Raises `ResourceExhausted` where it cannot fit: end every put with `commit` or `abort`.
        """
        options = options or PutOptions()
        if not options.ttl_s > 0:
            raise InvalidField("ttl_s", f"{options.ttl_s} is not positive")
        if manifest.chunk_bytes > self.ram.capacity_bytes:
            raise ResourceExhausted(
                f"a chunk of {manifest.chunk_bytes} bytes exceeds the RAM tier's {self.ram.capacity_bytes}; "
                "raise its capacity or make chunks shorter"
            )
        with self._lock:
            if self._living((manifest.namespace, manifest.key)) is not None:
                return None
            residence = self.ram.allocate(manifest)
            while residence is None:
                if self._evict_one() is None:
                    raise ResourceExhausted(
                        f"{manifest.chunk_bytes} bytes do not fit beside chunks that are pinned or being "
                        f"read ({self.ram.allocator.free_bytes} of {self.ram.capacity_bytes} bytes are free)"
                    )
                residence = self.ram.allocate(manifest)
            residence.acquire()
        expires_at_s = self._wall_clock() + options.ttl_s
        return ChunkPut(Entry(manifest, expires_at_s, options.recompute_ms), residence, self.ram)

    def _evict_one(self) -> Entry | None:
        victim = self.ram.evict(_may_leave)
        if victim is not None:
            self._index.remove(victim)
        return victim

    def commit(self, put: ChunkPut) -> bool:
        """Make the chunk visible. False where another put of the key was faster."""
        if not put.complete:
            self.abort(put)
            raise InvalidField("frames", "the put was committed before its last layer")
        with self._lock:
            inserted = self._living(put.entry.address) is None
            if inserted:
                self._index.add(put.entry)
                self.ram.adopt(put.entry, put.residence)
                put.residence.release()
        if not inserted:
            self.abort(put)
        return inserted

    def abort(self, put: ChunkPut) -> None:
        """Give the room back."""
        with self._lock:
            put.residence.condemn()
            put.residence.release()

    def delete(self, namespace: str, keys: Sequence[ChunkKey]) -> int:
        """Forget chunks; the number that was there."""
        checked_namespace(namespace)
        with self._lock:
            entries = [self._living((namespace, key)) for key in keys]
            present = {entry.address: entry for entry in entries if entry is not None}
            for entry in present.values():
                self._forget(entry)
        return len(present)

    def clear(self, namespace: str) -> int:
        """Forget a namespace's chunks; their number."""
        checked_namespace(namespace)
        with self._lock:
            entries = self._index.page(namespace, len(self._index), None)
            for entry in entries:
                self._forget(entry)
        return len(entries)

    def _forget(self, entry: Entry) -> None:
        self._index.remove(entry)
        self.ram.drop(entry)

    # Reading

    def open(self, namespace: str, keys: Sequence[ChunkKey], layers: range, heads: HeadRange) -> Reading:
        """Hold chunks in place; end with `close`. Raises `InvalidField` for a range that a chunk lacks."""
        checked_namespace(namespace)
        with self._lock:
            entries = [self._living((namespace, key)) for key in keys]
            for entry in entries:
                if entry is not None:
                    checked_range(entry.manifest, layers, heads)
            chunks = [None if entry is None else self._hold(entry, heads) for entry in entries]
        return Reading(chunks)

    def _hold(self, entry: Entry, heads: HeadRange) -> HeldChunk:
        assert entry.ram is not None
        entry.ram.acquire()
        return HeldChunk(entry.manifest, entry.ram, heads, self.ram)

    def close_reading(self, reading: Reading) -> None:
        """Let the chunks go."""
        with self._lock:
            for chunk in reading.chunks:
                if chunk is not None:
                    chunk.residence.release()

    def verify(self, namespace: str, keys: Sequence[ChunkKey]) -> dict[ChunkKey, bool]:
        """Read chunks; those whose digests are wrong are quarantined. Key -> whether intact; absent ones
        are left out. Cost: one xxh3 pass over them; holds no lock meanwhile."""
        intact: dict[ChunkKey, bool] = {}
        for key in keys:
            with self._lock:
                entry = self._living((namespace, key))
                held = None if entry is None else self._hold(entry, every_head(entry.manifest))
            if entry is None or held is None:
                continue
            layers = range(entry.manifest.layout.num_layers)
            intact[key] = all(
                entry.manifest.frame_is_intact(layer, held.heads, held.frame(layer)) for layer in layers
            )
            self.close_reading(Reading([held]))
            if not intact[key]:
                self._quarantine(entry)
        return intact

    def _quarantine(self, entry: Entry) -> None:
        with self._lock:
            self.quarantined += 1
            if self._index.get(entry.address) is entry:
                self._forget(entry)

    # Reports and numbers

    def put_report(self, fingerprint: ModelFingerprint, name: str, document: bytes) -> None:
        """As `ChunkStore.put_report`. Raises `ResourceExhausted` past a megabyte or `REPORTS_MAX`."""
        if len(document) > REPORT_BYTES_MAX:
            raise ResourceExhausted(f"a report of {len(document)} bytes; at most {REPORT_BYTES_MAX} are kept")
        with self._lock:
            if len(self._reports) >= REPORTS_MAX and (fingerprint, name) not in self._reports:
                raise ResourceExhausted(f"this store keeps at most {REPORTS_MAX} reports; delete some first")
            self._reports[fingerprint, name] = bytes(document)

    def get_report(self, fingerprint: ModelFingerprint, name: str) -> bytes | None:
        with self._lock:
            return self._reports.get((fingerprint, name))

    def __len__(self) -> int:
        return len(self._index)


def _may_leave(entry: Entry) -> bool:
    return not entry.pins and entry.ram is not None and not entry.ram.readers


def every_head(manifest: ChunkManifest) -> HeadRange:
    return HeadRange(0, manifest.layout.num_kv_heads)


def checked_range(manifest: ChunkManifest, layers: range, heads: HeadRange) -> None:
    """Raise `InvalidField` unless the chunk has these layers and heads."""
    layout = manifest.layout
    if not 0 <= layers.start < layers.stop <= layout.num_layers or layers.step != 1:
        raise InvalidField("layers", f"[{layers.start}, {layers.stop}) is outside [0, {layout.num_layers})")
    if not 0 <= heads.start < heads.stop <= layout.num_kv_heads:
        raise InvalidField("heads", f"[{heads.start}, {heads.stop}) is outside [0, {layout.num_kv_heads})")
