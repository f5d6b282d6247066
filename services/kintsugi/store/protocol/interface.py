"""The chunk store's interface. Every implementation passes `tests/contracts/store_contract.py`.

Calls block, and any thread may make them. The engine makes them in loader threads, never in the scheduler's;
the gateway keeps its event loop free with `gateway.threaded_store`. A store never decodes and never guesses:
a chunk is there whole, or it is a miss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from kintsugi.core.errors import InvalidField
from kintsugi.core.layout import ChunkManifest, HeadRange
from kintsugi.core.plan import ChunkSource
from kintsugi.core.spaces import ChunkKey, ModelFingerprint
from kintsugi.core.stream import ChunkLost as ChunkLost
from kintsugi.core.stream import LayerFrame as LayerFrame

Buffer = bytes | bytearray | memoryview

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
    """A chunk in a store, and where it would be read from."""

    manifest: ChunkManifest
    source: ChunkSource


@dataclass(frozen=True)
class PinLease:
    """The result of `pin`."""

    lease_id: str
    chunks: int
    """Number of the keys that are in the store, and pinned."""


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
        """As `lookup`, with the source that each chunk would be read from now, in one call."""
        source = ChunkSource(tier=self.transport)
        return [None if m is None else Found(m, source) for m in self.lookup(namespace, keys)]

    def tiers(self, namespace: str, keys: Sequence[ChunkKey]) -> list[str | None]:
        """The fastest tier that holds each key, None where none does.

        For callers that act on what is missing: unlike `lookup` it raises `Unavailable` where a key was not
        found and a shard that owns it did not answer."""
        return [self.transport if manifest else None for manifest in self.lookup(namespace, keys)]

    @abstractmethod
    def lookup_anchors(
        self, namespace: str, space_digest: bytes, anchors: Sequence[int]
    ) -> dict[int, list[ChunkManifest]]:
        """Chunks of a chunk space whose first tokens hash to an anchor: at most
        `ANCHOR_CANDIDATES_MAX` each, longest first; anchors without candidates are left out. The
        caller recomputes a candidate's key from its own tokens before using it."""

    @abstractmethod
    def put(
        self, manifest: ChunkManifest, frames: Sequence[Buffer], recompute_ms: float = 0.0, tier: str = ""
    ) -> bool:
        """Store one chunk: `frames[layer]` holds that layer. True if it was new; a key that is already
        there is left alone. `recompute_ms` is the time that computing it took, which placement and eviction
        weigh; 0: unknown. `tier` is where to keep it: `auto`, `ram` or an SSD tier; empty: the client's
        default. Raises `InvalidField` where frames and manifest disagree or the tier does not exist, and
        `Corrupted` where a digest does not match."""

    @abstractmethod
    def stream(
        self,
        namespace: str,
        keys: Sequence[ChunkKey],
        layers: range,
        heads: HeadRange,
        deadline_s: float,
    ) -> Generator[LayerFrame | ChunkLost, None, None]:
        """Frames layer-major: layer i of every chunk comes before layer i + 1 of any.

        Verified against the digests. Nothing is read before the iterator is advanced; closing it early
        frees what it holds. `deadline_s` bounds the wait for each layer; passing it raises
        `DeadlineExceeded`."""

    def prefetch(self, namespace: str, keys: Sequence[ChunkKey]) -> int:
        """Start to bring chunks into RAM without waiting; the number that are there or on their way."""
        return sum(manifest is not None for manifest in self.lookup(namespace, keys))

    def pin(self, namespace: str, keys: Sequence[ChunkKey], lease_s: float) -> PinLease:
        """Keep chunks from being evicted for `lease_s`. Raises `ResourceExhausted` beyond what may be pinned,
        and `InvalidField` for a store that has no pins."""
        raise InvalidField("store", "has no pins; use grpc://, shards:// or shardfile://")

    def unpin(self, lease_id: str) -> int:
        """End a lease early; the number of chunks that it held. Raises as `pin` does."""
        raise InvalidField("store", "has no pins; use grpc://, shards:// or shardfile://")

    @abstractmethod
    def delete(self, namespace: str, keys: Sequence[ChunkKey]) -> int:
        """Delete chunks; the number that was there. Streams already open stay whole. Raises `Unavailable`
        where a shard that may hold some did not answer; all others have deleted them then."""

    @abstractmethod
    def list(self, namespace: str, limit: int = 1000, after: ChunkKey | None = None) -> list[ChunkManifest]:
        """The first `limit` manifests behind `after`, in key order. Raises `Unavailable` where a shard that
        may hold some did not answer."""

    @abstractmethod
    def put_report(self, fingerprint: ModelFingerprint, name: str, document: bytes) -> None:
        """Keep a small document (a calibration report) by fingerprint and name, unless the stored one
        supersedes it (`core.report.supersedes`). Raises `ResourceExhausted` beyond
        `core.report.REPORT_BYTES_MAX`, or where too many are kept."""

    @abstractmethod
    def get_report(self, fingerprint: ModelFingerprint, name: str) -> bytes | None:
        """The document, or None."""

    @property
    @abstractmethod
    def transport(self) -> str:
        """Name of the path that bytes take to this client now, as in `StoreStats`. Makes no call."""

    @abstractmethod
    def stats(self) -> StoreStats:
        """The current usage."""

    @abstractmethod
    def close(self) -> None:
        """Release connections and threads; calls under way fail. Idempotent."""
