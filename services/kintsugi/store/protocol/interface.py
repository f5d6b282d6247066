"""The chunk store's interface. Every implementation passes `tests/contracts/store_contract.py`.

Calls block, and any thread may make them. The engine makes them in loader threads, never in the scheduler's;
the gateway keeps its event loop free with `gateway.threaded_store`. A store never decodes frames. A chunk is
there whole, or it is a miss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from kintsugi.core.errors import InvalidField
from kintsugi.core.exchange import ErasedPlace as ErasedPlace
from kintsugi.core.layout import ChunkLost as ChunkLost
from kintsugi.core.layout import ChunkManifest, HeadRange
from kintsugi.core.layout import LayerFrame as LayerFrame
from kintsugi.core.plan import ChunkSource
from kintsugi.core.spaces import ChunkKey, ModelFingerprint
from kintsugi.store.protocol.chunk_events import EventPage

Buffer = bytes | bytearray | memoryview

DATA_KEYS = "data keys"
KEPT_KEYS = "data keys, not destroyed: this process cannot change them"

ANCHOR_CANDIDATES_MAX = 16
"""Manifests returned for one anchor, longest first: a bound on what a hostile corpus can make us try."""


@dataclass(frozen=True)
class TierUse:
    """What one tier of a shard holds."""

    name: str
    chunks: int
    bytes_used: int
    bytes_capacity: int
    evictions: int
    """Since the shard started, as all counts."""
    queue_bytes: int
    """Bytes that wait to be written to it."""
    failure: str
    """Why the last write to it or read from it failed; empty: neither did."""


@dataclass(frozen=True)
class ShardUse:
    """What one shard holds and has counted."""

    address: str
    answers: bool = False
    """Whether it answered; where not, nothing below counts."""
    draining: bool = False
    chunks: int = 0
    hits: int = 0
    misses: int = 0
    quarantined: int = 0
    tiers: tuple[TierUse, ...] = ()


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
    shards: tuple[ShardUse, ...] = ()
    """Every shard of the map. Empty for a store without shards."""


@dataclass(frozen=True)
class Found:
    """A chunk in a store, and where it would be read from."""

    manifest: ChunkManifest
    source: ChunkSource


@dataclass(frozen=True)
class Erasure:
    """A chunk, or a whole namespace, of which nothing was to be left."""

    namespace: str
    key: ChunkKey | None
    """None: the whole namespace."""
    at_s: float
    """When that was asked for, in Unix seconds."""


@dataclass(frozen=True)
class ErasurePage:
    """Some erasures in the order in which a store recorded them."""

    erasures: Sequence[Erasure]
    cursor: str
    """Where the next page begins. As it was: nothing more has been recorded."""


@dataclass(frozen=True)
class PinLease:
    """The result of `pin`."""

    lease_id: str
    chunks: int
    """How many of the keys were found in the store, and pinned."""


class ChunkStore(ABC):
    """Chunk KV by key.

    Invariants: `put` makes a chunk visible whole or not at all; no call finds a chunk of another namespace;
    all frames of a chunk that `stream` yields were written by one `put`; instead of a frame that fails its
    digest, `stream` yields `ChunkLost`, and the chunk is quarantined.
    Errors: `Unavailable`, `DeadlineExceeded`, `ResourceExhausted`, `InvalidField`, `VersionMismatch`.
    """

    def name_key(self, namespace: str) -> bytes:
        """`ChunkSpace.name_key` of a namespace's spaces: empty where it is not encrypted. Raises what
        `KeySource.find` raises."""
        return b""

    @abstractmethod
    def lookup(self, namespace: str, keys: Sequence[ChunkKey]) -> list[ChunkManifest | None]:
        """The manifest of each key, None for a miss. A hit counts as a use of the chunk."""

    def find(self, namespace: str, keys: Sequence[ChunkKey]) -> list[Found | None]:
        """Like `lookup`, and in the same call the source that each chunk would be read from now."""
        source = ChunkSource(tier=self.transport)
        return [None if m is None else Found(m, source) for m in self.lookup(namespace, keys)]

    def tiers(self, namespace: str, keys: Sequence[ChunkKey]) -> list[str | None]:
        """The fastest tier that holds each key, None for a miss.

        For callers that act on misses: unlike `lookup`, it raises `Unavailable` if a key was not found and a
        shard that owns it did not answer."""
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
        self,
        manifest: ChunkManifest,
        frames: Sequence[Buffer],
        recompute_ms: float = 0.0,
        tier: str = "",
        ttl_s: float = 0.0,
    ) -> bool:
        """Store one chunk: `frames` holds its layers in order, behind its side frames where it has some.
        Returns whether it was new; one that is there stays as it is, and is kept as by `retain`.
        `recompute_ms` is the time that computing it took, which placement and eviction weigh; 0: unknown.
        `tier` is where to keep it: `auto`, `ram` or an SSD tier; empty: the client's default. `ttl_s` is its
        lifetime by the store's clock, also over restarts; 0: the client's default, which is none unless it
        was set. Where room is short, chunks with a lifetime leave before those without. Raises `InvalidField`
        if frames and manifest disagree or the tier does not exist, `Corrupted` if a digest does not match,
        and `NotFound` for a chunk that was erased since its save was asked for (`manifest.asked_at_s`)."""

    @abstractmethod
    def retain(self, namespace: str, keys: Sequence[ChunkKey], ttl_s: float = 0.0) -> list[bool]:
        """Keep chunks that are there for `ttl_s` from now at least; 0: as in `put`. Returns whether each is.
        No lifetime gets shorter: delete a chunk that is to go earlier. One that gets none leaves with those
        that never had one. Raises `Unavailable` where a shard that may hold one does not answer."""

    @abstractmethod
    def stream(
        self,
        namespace: str,
        keys: Sequence[ChunkKey],
        layers: range,
        heads: HeadRange,
        deadline_s: float,
    ) -> Generator[LayerFrame | ChunkLost, None, None]:
        """Yield frames, verified against their digests, layer by layer: layer i of every chunk comes before
        layer i + 1 of any. With `layers` from below 0, the side frames of those kinds come first, of the
        chunks that have some. `heads` are those of the layer that has most; of the others, the same share is
        read. Encrypted frames are verified by whoever decrypts them.

        Nothing is read before the iterator is advanced; closing it early frees what it holds. Raises
        `DeadlineExceeded` if a layer takes longer than `deadline_s`."""

    def prefetch(self, namespace: str, keys: Sequence[ChunkKey]) -> int:
        """Start to bring chunks into RAM, without waiting. Returns how many are there or on their way."""
        return sum(manifest is not None for manifest in self.lookup(namespace, keys))

    def pin(self, namespace: str, keys: Sequence[ChunkKey], lease_s: float) -> PinLease:
        """Protect chunks from eviction for `lease_s`. Raises `ResourceExhausted` if more would be pinned than
        is allowed, and `InvalidField` for a store that has no pins."""
        raise InvalidField("store", "has no pins; use grpc://, shards:// or shardfile://")

    def unpin(self, lease_id: str) -> int:
        """End a lease early. Returns the number of chunks that it held. Raises as `pin` does."""
        raise InvalidField("store", "has no pins; use grpc://, shards:// or shardfile://")

    @abstractmethod
    def delete(self, namespace: str, keys: Sequence[ChunkKey]) -> int:
        """Delete chunks. Returns how many were there. Open streams still yield every frame. Raises
        `Unavailable` if a shard that may hold some did not answer; the other shards have deleted theirs."""

    def erase(self, namespace: str, keys: Sequence[ChunkKey] | None, at_s: float) -> Sequence[ErasedPlace]:
        """Delete chunks whose saves were asked for until `at_s` (Unix seconds; 0: now), all of the namespace
        and its parts for None, and leave nothing of their bytes in any tier, nor of what those tiers evicted
        before. Returns where they were; every shard is named. Waits for readers of the chunks.

        The erasure is recorded: a put that was asked for until then is refused, caches follow it
        (`erasures`), and shards that are away apply it when they return. Raises `Unavailable` if a shard that
        may hold some did not answer, or could not do it: erase again. Raises `InvalidField` for a store that
        cannot erase."""
        raise InvalidField("store", "cannot erase; use grpc://, shards:// or shardfile://")

    def destroy_keys(self, namespace: str) -> Sequence[ErasedPlace]:
        """Replace the data keys of a namespace, and of parts that have their own, by new ones, so that nobody
        can read what was encrypted with them, wherever it lies. Returns the place `DATA_KEYS` with how many
        were destroyed, or `KEPT_KEYS` where this process cannot; nothing where there are none."""
        return ()

    def erasures(self, cursor: str) -> ErasurePage:
        """The erasures recorded after `cursor`, which an earlier page gave; empty: none, only the cursor
        behind the latest."""
        return ErasurePage((), cursor)

    @abstractmethod
    def events(self, namespace: str, cursor: str, limit: int) -> EventPage:
        """What the store got and gave up of a namespace after `cursor`, which an earlier page gave; empty:
        nothing, only the cursor behind the latest. At most `limit` events, or one of each shard. No use is
        counted. Raises `Unavailable` if no shard answers, `InvalidField` for what is no cursor, and
        `ResourceExhausted` where events of too many other namespaces are read."""

    @abstractmethod
    def list(self, namespace: str, limit: int = 1000, after: ChunkKey | None = None) -> list[ChunkManifest]:
        """The next `limit` manifests after the key `after`, in key order. Raises `Unavailable` if a shard
        that may hold some did not answer."""

    @abstractmethod
    def put_report(self, fingerprint: ModelFingerprint, name: str, document: bytes) -> None:
        """Keep a small document (a calibration report) by fingerprint and name, unless the stored one
        supersedes it (`core.report.replaces`). Raises `ResourceExhausted` if the document is larger than
        `core.report.REPORT_BYTES_MAX`, or if too many are stored, and `InvalidField` if it is dated more than
        a day ahead."""

    @abstractmethod
    def get_report(self, fingerprint: ModelFingerprint, name: str) -> bytes | None:
        """The stored document; None if there is none."""

    @property
    @abstractmethod
    def transport(self) -> str:
        """Name of the path that bytes take to this client now, as in `StoreStats`. Makes no call."""

    @abstractmethod
    def stats(self) -> StoreStats:
        """The current usage."""

    @abstractmethod
    def close(self) -> None:
        """Release connections and threads; calls in progress fail. Idempotent."""
