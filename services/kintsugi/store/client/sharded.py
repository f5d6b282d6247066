"""The shards of a directory as one store: placement, replicas and failures.

If a shard fails, only its own chunks become misses. Shards are called in parallel, each call is retried at
most once, and a circuit breaker keeps later requests from waiting for a failing shard."""

from __future__ import annotations

import builtins
import random
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TypeVar

from kintsugi.core.documents import supersedes
from kintsugi.core.errors import (
    InvalidField,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
)
from kintsugi.core.layout import ChunkManifest, HeadRange, check_frames
from kintsugi.core.spaces import ChunkKey, ModelFingerprint
from kintsugi.store.client.chunk_cipher import encrypt_chunk
from kintsugi.store.client.directory import SEE_SHARDS, ShardAddress, ShardDirectory, ShardMap
from kintsugi.store.client.erasures import follow
from kintsugi.store.client.grpc_store import (
    SHARD_FAILURES,
    GrpcStore,
    LeftAlone,
    counted,
)
from kintsugi.store.client.merge import ShardStream, merge_streams
from kintsugi.store.client.options import GrpcOptions
from kintsugi.store.client.sharing import SharedReads, order_owners
from kintsugi.store.protocol.breaker import CircuitBreaker
from kintsugi.store.protocol.interface import (
    ANCHORED_KEYS_MAX,
    Anchored,
    Buffer,
    ChunkLost,
    ChunkStore,
    ErasedPlace,
    ErasurePage,
    ErasureRange,
    Found,
    LayerFrame,
    PinLease,
    ShardUse,
    StoreStats,
)

CALLS_MAX = 64
"""Maximum number of calls to shards at a time, over all requests."""
RETRIES_MAX = 1
RETRY_WAIT_S = 0.02
"""Mean of the jittered wait before a retry."""

READ_FAILURES = (*SHARD_FAILURES, ResourceExhausted, NotFound)
"""Errors after which a stream tries the next owner. A shard that has too many streams, or whose stream was
cut by an erasure, is healthy, but a replica may still have the chunks."""

Answer = TypeVar("Answer")
Part = TypeVar("Part")


@dataclass
class _Shard:
    store: GrpcStore
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)


class ShardedStore(ChunkStore):
    """The shards of a directory. Thread-safe."""

    def __init__(self, directory: ShardDirectory, options: GrpcOptions | None = None) -> None:
        self._directory = directory
        self._options = options or GrpcOptions()
        self._pool = ThreadPoolExecutor(CALLS_MAX, "kintsugi-shards")
        self._lock = threading.Lock()
        self._shards: dict[ShardAddress, _Shard] = {}
        self._reads = SharedReads()
        self._is_closed = False

    def shard_map(self) -> ShardMap:
        """Return the current map. Waits until the first map is known, and closes the clients of shards that
        left."""
        shards = self._directory.current()
        with self._lock:
            left = [address for address in self._shards if address not in shards.shards]
            gone = [self._shards.pop(address) for address in left]
        for shard in gone:
            shard.store.close()
        return shards

    def _shard(self, address: ShardAddress) -> _Shard:
        with self._lock:
            if self._is_closed:
                raise Unavailable(_CLOSED)
            if address not in self._shards:
                self._shards[address] = _Shard(GrpcStore(address.address, self._options))
            return self._shards[address]

    def _run_side_by_side(self, calls: Sequence[Callable[[], Answer]]) -> builtins.list[Answer]:
        """Run calls in parallel and return their results in order. A single call runs in the caller's
        thread."""
        if len(calls) == 1:
            return [calls[0]()]
        try:
            results = [self._pool.submit(call) for call in calls]
        except RuntimeError:
            raise Unavailable(_CLOSED) from None
        wait(results)
        return [result.result() for result in results]

    def _ask(self, address: ShardAddress, call: Callable[[GrpcStore], Answer]) -> Answer | None:
        """Return a shard's answer, after at most one retry; None if it does not answer."""
        shard = self._shard(address)
        for attempt in range(RETRIES_MAX + 1):
            try:
                with counted(shard.breaker, address.address, is_refusal_counted=False):
                    return call(shard.store)
            except LeftAlone:
                return None
            except SHARD_FAILURES as error:
                if not isinstance(error, Unavailable) or attempt == RETRIES_MAX:
                    return None
                time.sleep(RETRY_WAIT_S * random.uniform(0.5, 1.5))
        return None

    def _ask_all(
        self, addresses: Iterable[ShardAddress], call: Callable[[GrpcStore], Answer]
    ) -> builtins.list[Answer | None]:
        """Return the shards' answers in order, None for a shard that does not answer."""
        return self._run_side_by_side([partial(self._ask, address, call) for address in addresses])

    def _ask_parts(
        self, parts: Mapping[ShardAddress, Part], call: Callable[[GrpcStore, Part], Answer]
    ) -> builtins.list[Answer | None]:
        """Like `_ask_all`, but each shard is asked about its own part."""

        def ask(address: ShardAddress, part: Part) -> Answer | None:
            return self._ask(address, lambda store: call(store, part))

        return self._run_side_by_side([partial(ask, *item) for item in parts.items()])

    def name_key(self, namespace: str) -> bytes:
        return self._options.name_key(namespace)

    def lookup(self, namespace: str, keys: Sequence[ChunkKey]) -> builtins.list[ChunkManifest | None]:
        return [None if found is None else found.manifest for found in self.find(namespace, keys)]

    def find(self, namespace: str, keys: Sequence[ChunkKey]) -> builtins.list[Found | None]:
        return self._find(namespace, keys, GrpcStore.find)

    def _find(
        self,
        namespace: str,
        keys: Sequence[ChunkKey],
        ask: Callable[[GrpcStore, str, Sequence[ChunkKey]], builtins.list[Found | None]],
    ) -> builtins.list[Found | None]:
        owners = self._order_owners(namespace, keys, self._reads.rank_to_ask)
        found: list[Found | None] = [None] * len(keys)
        for rank in range(max(map(len, owners), default=0)):
            missing: dict[ShardAddress, list[int]] = {}
            for index, ranked in enumerate(owners):
                if found[index] is None and rank < len(ranked):
                    missing.setdefault(ranked[rank], []).append(index)
            answers = self._ask_parts(missing, lambda store, part: ask(store, namespace, _pick(keys, part)))
            for indices, answer in zip(missing.values(), answers, strict=True):
                for index, entry in zip(indices, answer or [], strict=False):
                    found[index] = entry
        for key, entry, order in zip(keys, found, owners, strict=True):
            if entry is None or entry.width or entry.source.shard != order[0].address:
                self._reads.learn(namespace, key, 0 if entry is None else entry.width)
        return found

    def _order_owners(
        self, namespace: str, keys: Sequence[ChunkKey], rank_of: Callable[[str, ChunkKey], int]
    ) -> builtins.list[builtins.list[ShardAddress]]:
        """Return the shards to read each chunk from, in order."""
        return order_owners(self.shard_map(), keys, [rank_of(namespace, key) for key in keys])

    def tiers(self, namespace: str, keys: Sequence[ChunkKey]) -> builtins.list[str | None]:
        return self._ask_owners(keys, lambda store, part: store.tiers(namespace, part))

    def retain(self, namespace: str, keys: Sequence[ChunkKey], ttl_s: float = 0.0) -> builtins.list[bool]:
        """Extends the lifetime at every owner. An owner that does not answer receives a new copy later, if
        its own has expired."""
        held = self._ask_owners(
            keys, lambda store, part: [one or None for one in store.retain(namespace, part, ttl_s)]
        )
        return [one is not None for one in held]

    def _ask_owners(
        self,
        keys: Sequence[ChunkKey],
        ask: Callable[[GrpcStore, Sequence[ChunkKey]], Sequence[Answer | None]],
    ) -> builtins.list[Answer | None]:
        """Call all owners of the keys, and return for each key the first answer that is not None. Raises
        `Unavailable` if a key has no such answer and one of its owners did not answer."""
        shards = self.shard_map()
        if not shards.shards and keys:
            raise Unavailable(_NO_SHARDS)
        asked = _split_by_owner(shards.owners_of_each(keys))
        answers = self._ask_parts(asked, lambda store, part: ask(store, _pick(keys, part)))
        found: list[Answer | None] = [None] * len(keys)
        silent: dict[int, ShardAddress] = {}
        for (address, indices), answer in zip(asked.items(), answers, strict=True):
            for index, one in zip(indices, answer or [None] * len(indices), strict=True):
                found[index] = found[index] or one
            if answer is None:
                silent.update(dict.fromkeys(indices, address))
        for index, address in silent.items():
            if found[index] is None:
                raise Unavailable(
                    f"{address.address} owns chunk {keys[index]} and does not answer; {SEE_SHARDS}"
                )
        return found

    def lookup_anchors(
        self, namespace: str, space_digest: bytes, anchors: Sequence[int]
    ) -> builtins.list[Anchored]:
        shards = self.shard_map()
        answers = self._ask_all(
            shards.shards, lambda store: store.lookup_anchors(namespace, space_digest, anchors)
        )
        found: dict[tuple[int, int, int], dict[ChunkKey, None]] = {}
        for one in chain.from_iterable(answer or () for answer in answers):
            found.setdefault(one[:3], {}).update(dict.fromkeys(one.keys))
        return [Anchored(*alike, tuple(keys)[:ANCHORED_KEYS_MAX]) for alike, keys in found.items()]

    def put(
        self,
        manifest: ChunkManifest,
        frames: Sequence[Buffer],
        recompute_ms: float = 0.0,
        ttl_s: float = 0.0,
    ) -> bool:
        def put(store: GrpcStore) -> bool:
            return store.put(manifest, frames, recompute_ms, ttl_s)

        owners = self.shard_map().owners(manifest.key)
        keys = self._options.find_keys(manifest.namespace)
        if keys is not None and not manifest.is_encrypted:
            check_frames(manifest, [memoryview(frame).nbytes for frame in frames])
            manifest, frames = encrypt_chunk(keys, manifest, frames)  # once for all replicas
        answers = [answer for answer in self._ask_all(owners, put) if answer is not None]
        if not answers:
            raise Unavailable(
                f"none of the {len(owners)} shards that own chunk {manifest.key} answers; {SEE_SHARDS}"
            )
        return any(answers)

    def stream(
        self,
        namespace: str,
        keys: Sequence[ChunkKey],
        layers: range,
        heads: HeadRange,
        deadline_s: float,
    ) -> Generator[LayerFrame | ChunkLost, None, None]:
        if not layers or not keys:
            return
        owners = self._order_owners(namespace, keys, self._reads.rank)

        def open_parts(
            by_owner: Mapping[ShardAddress, Sequence[int]], first_layer: int
        ) -> builtins.list[ShardStream]:
            rest = range(first_layer, layers.stop)
            parts = [
                ShardStream(
                    chunks,
                    self._read(owner, namespace, _pick(keys, chunks), rest, heads, deadline_s),
                )
                for owner, chunks in by_owner.items()
            ]
            self._run_side_by_side([part.prime for part in parts])
            return parts

        yield from merge_streams(owners, layers, open_parts, READ_FAILURES)

    def _read(
        self,
        address: ShardAddress,
        namespace: str,
        keys: Sequence[ChunkKey],
        layers: range,
        heads: HeadRange,
        deadline_s: float,
    ) -> Generator[LayerFrame | ChunkLost, None, None]:
        """Yield the items of a shard's stream, and record in its breaker whether the shard answered."""
        shard = self._shard(address)
        with counted(shard.breaker, address.address, is_refusal_counted=False):
            yield from shard.store.stream(namespace, keys, layers, heads, deadline_s)

    def prefetch(self, namespace: str, keys: Sequence[ChunkKey]) -> int:
        read = _split_by_owner(self._order_owners(namespace, keys, self._reads.rank), first=1)
        asked = self._ask_parts(read, lambda store, part: store.prefetch(namespace, _pick(keys, part)))
        return sum(filter(None, asked))

    def pin(self, namespace: str, keys: Sequence[ChunkKey], lease_s: float) -> PinLease:
        """Pins every replica, and counts each chunk once. A shard that does not answer pins nothing."""
        shards = self.shard_map()
        owned = _split_by_owner(shards.owners_of_each(keys))
        answers = self._ask_parts(owned, lambda store, part: store.pin(namespace, _pick(keys, part), lease_s))
        pins = [(owner.shard_id, pin) for owner, pin in zip(owned, answers, strict=True) if pin is not None]
        lease_id = _SHARDS.join(f"{shard_id}{_LEASE}{pin.lease_id}" for shard_id, pin in pins)
        held = self.lookup(namespace, keys)
        return PinLease(lease_id, sum(manifest is not None for manifest in held))

    def unpin(self, lease_id: str) -> int:
        shards = {shard.shard_id: shard for shard in self.shard_map().shards}
        leases: dict[ShardAddress, str] = {}
        for part in filter(None, lease_id.split(_SHARDS)):
            shard_id, separator, lease = part.partition(_LEASE)
            if not separator:
                raise InvalidField("lease_id", f"{part!r} names no shard; use what pin returned")
            if shard_id in shards:
                leases[shards[shard_id]] = lease
        return sum(filter(None, self._ask_parts(leases, lambda store, lease: store.unpin(lease))))

    def delete(self, namespace: str, keys: Sequence[ChunkKey]) -> int:
        found = self._find(namespace, keys, GrpcStore.find_stored)
        present = sum(one is not None for one in found)
        # Every shard, not only the owners: a shard that owned a chunk under an earlier map may hold it.
        shards = self.shard_map()
        answers = self._ask_all(shards.shards, lambda store: store.delete(namespace, keys))
        _require_all(shards, answers, "it may still hold the chunks, the others do not; delete them again")
        return present

    def erase(
        self, namespace: str, keys: Sequence[ChunkKey] | None, at_s: float, within: str = ""
    ) -> builtins.list[ErasedPlace]:
        shards = self.shard_map()
        answers = self._ask_all(shards.shards, lambda store: store.erase(namespace, keys, at_s, within))
        _require_all(shards, answers, "it may still hold the chunks, the others do not; erase them again")
        return [place for answer in answers if answer is not None for place in answer]

    def destroy_keys(self, namespace: str) -> builtins.list[ErasedPlace]:
        return self._options.destroy_keys(namespace)

    def erasures(self, cursor: str) -> ErasurePage:
        shards = {shard.shard_id: shard for shard in self.shard_map().shards}

        def ask(after: Mapping[str, int | None]) -> builtins.list[ErasureRange]:
            parts = {shards[shard_id]: (shard_id, number) for shard_id, number in after.items()}
            answers = self._ask_parts(parts, lambda store, part: store.list_erasures(*part))
            return [answer for answer in answers if answer is not None]

        return follow(cursor, list(shards), ask)

    def list(
        self, namespace: str, limit: int = 1000, after: ChunkKey | None = None
    ) -> builtins.list[ChunkManifest]:
        """Lists only chunks that a lookup by key finds: a shard may still hold chunks that another shard owns
        now. Raises `Unavailable` if a shard does not answer, even with replicas, because it may hold the only
        copy of a chunk."""
        shards = self.shard_map()
        found: dict[ChunkKey, ChunkManifest] = {}
        while len(found) < limit:
            ask = partial(GrpcStore.list, namespace=namespace, limit=limit, after=after)
            answers = self._ask_all(shards.shards, ask)
            pages = _require_all(shards, answers, "the list would lack its chunks; list again")
            # A shard with a full page may hold more chunks, which precede the other shards' later keys.
            ends = [page[-1].key for page in pages if len(page) >= limit]
            end = min(ends, default=None)
            for shard, page in zip(shards.shards, pages, strict=True):
                near = [manifest for manifest in page if end is None or manifest.key <= end]
                owners = shards.owners_of_each([one.key for one in near])
                found.update((m.key, m) for m, its in zip(near, owners, strict=True) if shard in its)
            if end is None:
                break
            after = end
        return [found[key] for key in sorted(found)[:limit]]

    def put_report(self, fingerprint: ModelFingerprint, name: str, document: bytes) -> None:
        def put(store: GrpcStore) -> bool:
            store.put_report(fingerprint, name, document)
            return True

        if not any(self._ask_all(self.shard_map().shards, put)):
            raise Unavailable(f"no shard took the report; {SEE_SHARDS}")

    def get_report(self, fingerprint: ModelFingerprint, name: str) -> bytes | None:
        shards = self.shard_map().shards
        answers = self._ask_all(shards, lambda store: (store.get_report(fingerprint, name),))
        held = {shard: answer[0] for shard, answer in zip(shards, answers, strict=True) if answer is not None}
        if not held:
            raise Unavailable(f"no shard answers; {SEE_SHARDS}")
        newest: bytes | None = None
        for document in held.values():
            if document is not None and supersedes(document, newest):
                newest = document
        if newest is not None:
            self._repair_report(held, fingerprint, name, newest)
        return newest

    def _repair_report(
        self,
        held: Mapping[ShardAddress, bytes | None],
        fingerprint: ModelFingerprint,
        name: str,
        newest: bytes,
    ) -> None:
        """Put the newest report into the shards that hold an older one or none. Otherwise a shard that missed
        a trip of the gate would undo it when it is the only one to answer."""

        def put(store: GrpcStore) -> None:
            # A read must not fail because a shard has no room, its clock differs, or the reader may not write
            # reports.
            with suppress(ResourceExhausted, InvalidField, PermissionDenied):
                store.put_report(fingerprint, name, newest)

        self._ask_all([shard for shard, document in held.items() if supersedes(newest, document)], put)

    @property
    def transport(self) -> str:
        with self._lock:
            return "+".join(sorted({shard.store.transport for shard in self._shards.values()})) or "none"

    def stats(self) -> StoreStats:
        shards = self.shard_map().shards
        answers = self._ask_all(shards, GrpcStore.stats)
        parts = [answer for answer in answers if answer is not None]
        transports = sorted({part.transport for part in parts})
        return StoreStats(
            chunks=sum(part.chunks for part in parts),
            bytes_used=sum(part.bytes_used for part in parts),
            bytes_capacity=sum(part.bytes_capacity for part in parts),
            transport="+".join(transports) or "none",
            durable=bool(parts) and all(part.durable for part in parts),
            shards=tuple(
                use
                for shard, answer in zip(shards, answers, strict=True)
                for use in ((ShardUse(shard.address),) if answer is None else answer.shards)
            ),
        )

    def close(self) -> None:
        self._directory.close()
        with self._lock:
            self._is_closed = True
            shards = list(self._shards.values())
            self._shards.clear()
        for shard in shards:  # before the pool, which waits for calls in progress; closing ends them
            shard.store.close()
        self._pool.shutdown()


_CLOSED = "this client is closed"
_NO_SHARDS = "the shard map is empty; start a shard (kintsugi store serve --help says how)"
_SHARDS, _LEASE = ",", "="
"""Separators in the id of a lease at several shards: `SHARD=LEASE,SHARD=LEASE`."""


def _split_by_owner(
    owners_of_each: Sequence[Sequence[ShardAddress]], first: int | None = None
) -> dict[ShardAddress, list[int]]:
    """For each shard, return the indices of the keys for which it is one of the `first` owners (None: any
    owner)."""
    owned: dict[ShardAddress, list[int]] = {}
    for index, owners in enumerate(owners_of_each):
        for owner in owners[:first]:
            owned.setdefault(owner, []).append(index)
    return owned


def _pick(keys: Sequence[ChunkKey], indices: Sequence[int]) -> list[ChunkKey]:
    return [keys[index] for index in indices]


def _require_all(shards: ShardMap, answers: Sequence[Answer | None], otherwise: str) -> list[Answer]:
    """Return the answers of all shards of the map. Raises `Unavailable` if one does not answer."""
    if not shards.shards:
        raise Unavailable(_NO_SHARDS)
    silent = [shard for shard, answer in zip(shards.shards, answers, strict=True) if answer is None]
    if silent:
        counted = f"{len(silent)} of {len(answers)} shards"
        raise Unavailable(f"{silent[0].address} does not answer ({counted}): {otherwise}; {SEE_SHARDS}")
    return [answer for answer in answers if answer is not None]
