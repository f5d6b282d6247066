"""The chunk store's interface. Every implementation passes `tests/contracts/store_contract.py`.

Calls block, and any thread may make them. The engine makes them in loader threads, never in the scheduler's;
the gateway keeps its event loop free with `gateway.threaded_store`. A store never decodes frames. A chunk is
stored completely, or it is a miss."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kintsugi.core.errors import InvalidField
from kintsugi.core.exchange import ChunkLost as ChunkLost
from kintsugi.core.exchange import ErasedPlace as ErasedPlace
from kintsugi.core.exchange import LayerFrame as LayerFrame
from kintsugi.core.layout import ChunkManifest, HeadRange
from kintsugi.core.namespaces import EVERY_NAMESPACE
from kintsugi.core.plan import ChunkSource
from kintsugi.core.spaces import ChunkKey, ModelFingerprint

Buffer = bytes | bytearray | memoryview

DATA_KEYS = "data keys"
KEPT_KEYS = "data keys, not destroyed: this process cannot change them"

ANCHORED_MAX = 16_384
"""Maximum number of items that a lookup of anchors returns. It bounds the work that a hostile corpus can
cause."""
ANCHORED_KEYS_MAX = 16
"""Maximum number of keys in one item of a lookup of anchors."""


@dataclass(frozen=True)
class TierUse:
    """Usage of one tier of a shard."""

    name: str
    chunks: int
    bytes_used: int
    bytes_capacity: int
    evictions: int
    """Evictions since the shard started."""
    queue_bytes: int
    """Bytes waiting to be written to the tier."""
    failure: str
    """Error of the last write or read of the tier; empty: both succeeded."""


@dataclass(frozen=True)
class ShardUse:
    """Usage and counters of one shard."""

    address: str
    answers: bool = False
    """Whether the shard answered; if not, the fields below are meaningless."""
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
    """How bytes reach this client: `ram`, `grpc` or `shared-memory`."""
    durable: bool = False
    """Whether every shard that answers has a tier that outlives its process."""
    shards: tuple[ShardUse, ...] = ()
    """Every shard of the map. Empty for a store without shards."""


@dataclass(frozen=True)
class Found:
    """A chunk in a store, and the source that it would be read from."""

    manifest: ChunkManifest
    source: ChunkSource
    width: int = 0
    """How many shards share the reads of the chunk, as its first owner says; 0: only its owners have it."""


class Anchored(NamedTuple):
    """The stored chunks of one space and length with the same first and last anchor."""

    first: int
    last: int
    num_tokens: int
    keys: tuple[ChunkKey, ...]
    """At most `ANCHORED_KEYS_MAX`; if there are as many, there may be more chunks."""

    def may_hold(self, key: ChunkKey) -> bool:
        """Return whether the chunk `key` may be one of these."""
        return key in self.keys or len(self.keys) >= ANCHORED_KEYS_MAX


@dataclass(frozen=True)
class Erasure:
    """The erasure of a chunk or of a whole namespace."""

    namespace: str
    key: ChunkKey | None
    """None: the whole namespace."""
    at_s: float
    """When the erasure was requested, in Unix seconds."""
    within: str = EVERY_NAMESPACE
    """The pattern of namespaces that its caller may use, in which merged records may delete more chunks."""


@dataclass(frozen=True)
class ErasurePage:
    """One page of erasures, in the order in which a store recorded them."""

    erasures: Sequence[Erasure]
    cursor: str
    """Where the next page begins; the same as before if nothing more was recorded."""


@dataclass(frozen=True)
class ErasureMark:
    """The number of an erasure, and a time in Unix seconds."""

    number: int = 0
    at_s: float = -math.inf


@dataclass(frozen=True)
class ErasureRange:
    """A page of the erasures that one shard recorded, in their order."""

    erasures: Sequence[Erasure]
    next: int
    """The number up to which this page covers the erasures."""
    merged: Mapping[str, ErasureMark]
    """For each pattern of namespaces, the highest number and latest time of its merged erasures. Only numbers
    above the requested one are included."""
    shard_id: str = ""
    """The shard that sent the page; empty in that shard."""


@dataclass(frozen=True)
class PinLease:
    """The result of `pin`."""

    lease_id: str
    chunks: int
    """Number of the keys that were found and pinned."""


class ChunkStore(ABC):
    """Chunk KV by key.

    Invariants: `put` makes a chunk visible completely or not at all; no call finds a chunk of another
    namespace; all frames of a chunk that `stream` yields come from one `put`; `stream` yields `ChunkLost`
    instead of a frame that fails its digest, and the chunk is quarantined. Errors: `Unavailable`,
    `DeadlineExceeded`, `ResourceExhausted`, `InvalidField`, `VersionMismatch`."""

    def name_key(self, namespace: str) -> bytes:
        """Return the `ChunkSpace.name_key` of a namespace's spaces; empty if the namespace is not encrypted.
        Raises as `KeySource.find` does."""
        return b""

    @abstractmethod
    def lookup(self, namespace: str, keys: Sequence[ChunkKey]) -> list[ChunkManifest | None]:
        """Return the manifest of each key, None for a miss. A hit counts as a use of the chunk."""

    def find(self, namespace: str, keys: Sequence[ChunkKey]) -> list[Found | None]:
        """Like `lookup`, but also returns the source that each chunk would be read from now."""
        source = ChunkSource(tier=self.transport)
        return [None if m is None else Found(m, source) for m in self.lookup(namespace, keys)]

    def tiers(self, namespace: str, keys: Sequence[ChunkKey]) -> list[str | None]:
        """Return the fastest tier that holds each key, None for a miss.

        Use it where a miss leads to an action. Unlike `lookup`, raises `Unavailable` if a key was not found
        and a shard that owns it did not answer."""
        return [self.transport if manifest else None for manifest in self.lookup(namespace, keys)]

    @abstractmethod
    def lookup_anchors(self, namespace: str, space_digest: bytes, anchors: Sequence[int]) -> list[Anchored]:
        """Return the chunks of a chunk space whose first and last anchors are both among `anchors`, in any
        order; at most `ANCHORED_MAX` items for each call of a shard. The caller computes a chunk's key from
        its own tokens and looks that up."""

    @abstractmethod
    def put(
        self,
        manifest: ChunkManifest,
        frames: Sequence[Buffer],
        recompute_ms: float = 0.0,
        ttl_s: float = 0.0,
    ) -> bool:
        """Store one chunk. `frames` holds its side frames, if any, and then its layers in order. Returns
        whether the chunk was new; a stored chunk stays unchanged, and its lifetime is extended as by
        `retain`. `recompute_ms` is the time that its prefill took, which placement and eviction weigh; 0:
        unknown. `ttl_s` is its lifetime by the store's clock, which continues over restarts; 0: the client's
        default, which is unlimited unless it was set. Chunks with a lifetime are evicted before chunks
        without one. Raises `InvalidField` if frames and manifest disagree, `Corrupted` if a digest does not
        match, and `NotFound` for a chunk that was erased after its save was requested
        (`manifest.asked_at_s`)."""

    @abstractmethod
    def retain(self, namespace: str, keys: Sequence[ChunkKey], ttl_s: float = 0.0) -> list[bool]:
        """Keep stored chunks for at least `ttl_s` from now; 0: as in `put`. Returns for each key whether the
        chunk is stored. Never shortens a lifetime: delete a chunk to remove it earlier. An unlimited lifetime
        replaces a limited one. Raises `Unavailable` if a shard that may hold one of the chunks does not
        answer."""

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
        layer i + 1 of any. If `layers` begins below 0, the side frames of those kinds come first, of the
        chunks that have them. `heads` refers to the layer with the most heads; the same share of every other
        layer is read. Encrypted frames are verified when they are decrypted.

        Nothing is read before the iterator is advanced; closing it early frees what it holds. Raises
        `DeadlineExceeded` if a layer takes longer than `deadline_s`."""

    def prefetch(self, namespace: str, keys: Sequence[ChunkKey]) -> int:
        """Start to load chunks into RAM, without waiting. Returns how many are in RAM or being loaded."""
        return sum(manifest is not None for manifest in self.lookup(namespace, keys))

    def pin(self, namespace: str, keys: Sequence[ChunkKey], lease_s: float) -> PinLease:
        """Protect chunks from eviction for `lease_s`. Raises `ResourceExhausted` if more bytes would be
        pinned than allowed, and `InvalidField` for a store without pins."""
        raise InvalidField("store", "has no pins; use grpc://, shards:// or shardfile://")

    def unpin(self, lease_id: str) -> int:
        """End a lease early. Returns the number of chunks that it pinned. Raises as `pin` does."""
        raise InvalidField("store", "has no pins; use grpc://, shards:// or shardfile://")

    @abstractmethod
    def delete(self, namespace: str, keys: Sequence[ChunkKey]) -> int:
        """Delete chunks. Returns how many were stored. Open streams still yield every frame. Raises
        `Unavailable` if a shard that may hold some of them did not answer; the other shards have deleted
        theirs."""

    def erase(
        self, namespace: str, keys: Sequence[ChunkKey] | None, at_s: float, within: str = ""
    ) -> Sequence[ErasedPlace]:
        """Erase chunks whose saves were requested until `at_s` (Unix seconds; 0: now); `keys` None: all
        chunks of the namespace and its parts. No tier keeps any of their bytes, or any bytes of copies that
        it evicted earlier. Returns the places where they were stored; every shard is named. Waits for readers
        of the chunks. `within`: the pattern of namespaces that the caller may use; empty: that of this
        client's token. If a shard has too many records of erasures, it merges older records of one pattern.

        The erasure is recorded: puts requested until then are refused, caches apply it (`erasures`), and
        absent shards apply it when they return. Raises `Unavailable` if a shard that may hold some chunks did
        not answer or failed: erase again. Raises `InvalidField` for a store that cannot erase."""
        raise InvalidField("store", "cannot erase; use grpc://, shards:// or shardfile://")

    def destroy_keys(self, namespace: str) -> Sequence[ErasedPlace]:
        """Replace the data keys of a namespace, and of parts with their own keys, so that no copy encrypted
        with the old keys can be read. Returns the place `DATA_KEYS` with the number of destroyed keys,
        `KEPT_KEYS` if this process cannot change them, or nothing if the namespace is not encrypted."""
        return ()

    def erasures(self, cursor: str) -> ErasurePage:
        """Return the erasures recorded after `cursor`, which an earlier page contained. With an empty cursor,
        return no erasures, only the cursor after the latest."""
        return ErasurePage((), cursor)

    @abstractmethod
    def list(self, namespace: str, limit: int = 1000, after: ChunkKey | None = None) -> list[ChunkManifest]:
        """Return the next `limit` manifests after the key `after`, in key order. Raises `Unavailable` if a
        shard that may hold some of them did not answer."""

    @abstractmethod
    def put_report(self, fingerprint: ModelFingerprint, name: str, document: bytes) -> None:
        """Store a small document (a calibration report) by fingerprint and name, unless the stored one
        supersedes it (`core.report.replaces`). Raises `ResourceExhausted` if the document is larger than
        `core.report.REPORT_BYTES_MAX`, or if too many are stored, and `InvalidField` if it is dated more than
        a day ahead."""

    @abstractmethod
    def get_report(self, fingerprint: ModelFingerprint, name: str) -> bytes | None:
        """Return the stored document; None if there is none."""

    @property
    @abstractmethod
    def transport(self) -> str:
        """How bytes reach this client now, as in `StoreStats`. Makes no call."""

    @abstractmethod
    def stats(self) -> StoreStats:
        """Return the current usage."""

    @abstractmethod
    def close(self) -> None:
        """Release connections and threads; calls in progress fail. Idempotent."""
