"""The chunk store as its users see it. Every implementation passes `tests/contracts/store_contract.py`.

Blocking and thread-safe: the engine calls it from its loader threads, never from the scheduler's.
A store never decodes and never guesses: a chunk is there whole, or it is a miss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass

from kintsugi.core.layout import ChunkManifest, HeadRange
from kintsugi.core.plan import ChunkSource
from kintsugi.core.spaces import ChunkKey, ModelFingerprint
from kintsugi.core.stream import ChunkLost as ChunkLost
from kintsugi.core.stream import LayerFrame as LayerFrame

Buffer = bytes | bytearray | memoryview
BufferFor = Callable[[int, int, int], memoryview]
"""Chunk, layer and size in bytes to a buffer of bytes."""

ANCHOR_CANDIDATES_MAX = 16
"""Manifests returned for one anchor, longest first: a bound on what a hostile corpus can make us try."""


@dataclass(frozen=True)
class StoreStats:
    """A snapshot of one store."""

    chunks: int
    bytes_used: int
    bytes_capacity: int
    transport: str
    """Name of the path that bytes take to this client: `ram`, `grpc`, `shared-memory`."""
    durable: bool = False
    """Whether every shard that answers has a tier that outlives its process."""


@dataclass(frozen=True)
class Found:
    """A chunk that a store has, and where."""

    manifest: ChunkManifest
    source: ChunkSource


@dataclass(frozen=True)
class PinLease:
    """What a pin holds."""

    lease_id: str
    chunks: int
    """How many of the keys are there."""


class ChunkStore(ABC):
    """Chunk KV by key.

    Invariants: `put` makes a chunk visible whole or not at all; a chunk of another namespace is found
    by no call; what `stream` yields was written by one `put`; bytes that fail their digest are a
    `ChunkLost`, never a frame, and the chunk is quarantined.
    Errors: `Unavailable`, `DeadlineExceeded`, `ResourceExhausted`, `InvalidField`, `VersionMismatch`.
    """

    @abstractmethod
    def lookup(self, namespace: str, keys: Sequence[ChunkKey]) -> list[ChunkManifest | None]:
        """The manifest of each key, None for a miss; a hit counts as a use."""

    def find(self, namespace: str, keys: Sequence[ChunkKey]) -> list[Found | None]:
        """As `lookup`, with where each chunk would be read from now: one call to the store for both."""
        source = ChunkSource(tier=self.transport)
        return [None if m is None else Found(m, source) for m in self.lookup(namespace, keys)]

    def tiers(self, namespace: str, keys: Sequence[ChunkKey]) -> list[str | None]:
        """The fastest tier that holds each key, None where no one does.

        For those who act on what is missing: unlike `lookup` it raises `Unavailable` where a key was not
        found and one who should hold it did not answer."""
        return [self.transport if manifest else None for manifest in self.lookup(namespace, keys)]

    @abstractmethod
    def lookup_anchors(
        self, namespace: str, space_digest: bytes, anchors: Sequence[int]
    ) -> dict[int, list[ChunkManifest]]:
        """Chunks of a chunk space whose first tokens hash to an anchor: at most
        `ANCHOR_CANDIDATES_MAX` each, longest first; anchors without any are left out. The caller
        recomputes a candidate's key from its own tokens before using it."""

    @abstractmethod
    def put(
        self, manifest: ChunkManifest, frames: Sequence[Buffer], recompute_ms: float = 0.0, tier: str = ""
    ) -> bool:
        """Store one chunk: `frames[layer]` holds that layer. True if it was new; a key that is already
        there is left alone. `recompute_ms` is what computing it took, which placement and eviction weigh; 0:
        unknown. `tier` is where it is kept: `auto`, `ram` or an SSD tier; empty: the client's default.
        Raises `InvalidField` where frames and manifest disagree or the tier is none, and `Corrupted` where
        a digest does."""

    @abstractmethod
    def stream(
        self,
        namespace: str,
        keys: Sequence[ChunkKey],
        layers: range,
        heads: HeadRange,
        deadline_s: float,
    ) -> Iterator[LayerFrame | ChunkLost]:
        """Frames layer-major: layer i of every chunk comes before layer i + 1 of any.

        Verified against the digests. Nothing is read before the iterator is advanced; closing it early
        frees what it holds. `deadline_s` bounds the wait for each layer; passing it raises
        `DeadlineExceeded`."""

    def stream_into(
        self,
        namespace: str,
        keys: Sequence[ChunkKey],
        layers: range,
        heads: HeadRange,
        deadline_s: float,
        buffer_for: BufferFor,
    ) -> Iterator[LayerFrame | ChunkLost]:
        """As `stream`, with each frame in memory of the caller's, such as a pinned tensor.

        `buffer_for(chunk, layer, size_bytes)` gives at least `size_bytes` writable bytes; a frame's data is
        the part of them that it fills, verified there. The buffer of a lost chunk may hold anything. A store
        that can write into them directly overrides this; here it costs one copy."""
        for item in self.stream(namespace, keys, layers, heads, deadline_s):
            if isinstance(item, LayerFrame):
                target = buffer_for(item.chunk, item.layer, len(item.data))[: len(item.data)]
                target[:] = item.data
                yield LayerFrame(item.chunk, item.layer, target)
            else:
                yield item

    @abstractmethod
    def delete(self, namespace: str, keys: Sequence[ChunkKey]) -> int:
        """Forget chunks; the number that was there. Streams already open stay whole. Raises `Unavailable`
        where one who may hold them did not answer; all others have forgotten them then."""

    @abstractmethod
    def list(self, namespace: str, limit: int = 1000, after: ChunkKey | None = None) -> list[ChunkManifest]:
        """Manifests in key order, for paging. Raises `Unavailable` where one who may hold some did not
        answer."""

    @abstractmethod
    def put_report(self, fingerprint: ModelFingerprint, name: str, document: bytes) -> None:
        """Keep a small document (a calibration report) by fingerprint and name, unless the one that is kept
        supersedes it (`core.report.supersedes`). Raises `ResourceExhausted` beyond
        `core.report.REPORT_BYTES_MAX`, or where too many are kept."""

    @abstractmethod
    def get_report(self, fingerprint: ModelFingerprint, name: str) -> bytes | None:
        """The document, or None."""

    @property
    @abstractmethod
    def transport(self) -> str:
        """Name of the path that bytes take to this client now, as in `StoreStats`. Never asks the store."""

    @abstractmethod
    def stats(self) -> StoreStats:
        """What is used now."""

    @abstractmethod
    def close(self) -> None:
        """Release everything; idempotent."""


class AsyncChunkStore(ABC):
    """A store beyond this process, as coroutines. Methods that `ChunkStore` has too are described there."""

    @abstractmethod
    async def lookup(self, namespace: str, keys: Sequence[ChunkKey]) -> list[ChunkManifest | None]:
        """As `ChunkStore.lookup`."""

    async def find(self, namespace: str, keys: Sequence[ChunkKey]) -> list[Found | None]:
        """As `ChunkStore.find`."""
        source = ChunkSource(tier=self.transport)
        return [None if m is None else Found(m, source) for m in await self.lookup(namespace, keys)]

    @abstractmethod
    async def tiers(self, namespace: str, keys: Sequence[ChunkKey]) -> list[str | None]:
        """As `ChunkStore.tiers`."""

    @abstractmethod
    async def lookup_anchors(
        self, namespace: str, space_digest: bytes, anchors: Sequence[int]
    ) -> dict[int, list[ChunkManifest]]:
        """As `ChunkStore.lookup_anchors`."""

    @abstractmethod
    async def put(
        self, manifest: ChunkManifest, frames: Sequence[Buffer], recompute_ms: float = 0.0, tier: str = ""
    ) -> bool:
        """As `ChunkStore.put`."""

    @abstractmethod
    def stream(
        self,
        namespace: str,
        keys: Sequence[ChunkKey],
        layers: range,
        heads: HeadRange,
        deadline_s: float,
        buffer_for: BufferFor | None = None,
    ) -> AsyncGenerator[LayerFrame | ChunkLost, None]:
        """As `ChunkStore.stream`, and as `stream_into` where `buffer_for` is given. Close it if you leave it
        early (`contextlib.aclosing`)."""

    @abstractmethod
    async def prefetch(self, namespace: str, keys: Sequence[ChunkKey]) -> int:
        """Start to bring chunks into RAM; how many are there or on their way. Returns at once."""

    @abstractmethod
    async def pin(self, namespace: str, keys: Sequence[ChunkKey], lease_s: float) -> PinLease:
        """Keep chunks from leaving for `lease_s`. Raises `ResourceExhausted` past what may be pinned."""

    @abstractmethod
    async def unpin(self, lease_id: str) -> int:
        """End a lease early; how many chunks it held."""

    @abstractmethod
    async def delete(self, namespace: str, keys: Sequence[ChunkKey]) -> int:
        """As `ChunkStore.delete`."""

    @abstractmethod
    async def list(
        self, namespace: str, limit: int = 1000, after: ChunkKey | None = None
    ) -> list[ChunkManifest]:
        """As `ChunkStore.list`."""

    @abstractmethod
    async def put_report(self, fingerprint: ModelFingerprint, name: str, document: bytes) -> None:
        """As `ChunkStore.put_report`."""

    @abstractmethod
    async def get_report(self, fingerprint: ModelFingerprint, name: str) -> bytes | None:
        """As `ChunkStore.get_report`."""

    @property
    @abstractmethod
    def transport(self) -> str:
        """As `ChunkStore.transport`."""

    @abstractmethod
    async def stats(self) -> StoreStats:
        """As `ChunkStore.stats`."""

    @abstractmethod
    async def close(self) -> None:
        """As `ChunkStore.close`."""
