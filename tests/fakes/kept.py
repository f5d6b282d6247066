"""What processes keep for their callers beside chunks, kind by kind, and what it takes of the heap.

The shapes are those that cost most beside what they seem to hold: small items, each in a namespace of its
own with the longest name, or all in one. A kind of which a number is kept, not bytes, is charged its part of
the bytes that docs/operate/size.md states for it.
"""

from __future__ import annotations

import gc
import random
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

from kintsugi.core.held import Held
from kintsugi.core.namespaces import NO_RULES
from kintsugi.core.spaces import ChunkKey, ChunkSpace, ModelFingerprint, TokenIds
from kintsugi.discovery.sightings import Sightings
from kintsugi.gateway.fill import FillQueue
from kintsugi.gateway.texts.known_chunks import RECENT_BYTES_MAX
from kintsugi.gateway.texts.segments import SegmentResolver, _cut_chunk, _name_of
from kintsugi.store.client.grpc_store import _RecentManifests
from kintsugi.store.client.sharing import SharedReads
from kintsugi.store.protocol import wire
from kintsugi.store.protocol.interface import Erasure
from kintsugi.store.shard.entry import ChunkEntry
from kintsugi.store.shard.erasure import DELETIONS_MAX, ERASURES_MAX, Deletions, Erasures
from kintsugi.store.shard.eviction.policy import GHOSTS_MAX, S3Fifo
from kintsugi.store.shard.eviction.room import ReuseGaps
from kintsugi.store.shard.heat import READS_NOTED, Heat
from kintsugi.store.shard.pins import PINS_MAX, Leases
from tests.contracts.store_contract import make_chunk

NAMES = {"one namespace": lambda number: "n" * 128, "many": lambda number: f"{number:n>128}"}
MB = 1_000_000
TRIP_TESTS = "trip tests of namespaces"
"""Need torch."""
SLACK_BYTES = 4096
"""What the measurement itself may leave."""
Keep = Callable[[str, int], None]
"""Keeps one more item for a namespace."""


@dataclass(frozen=True)
class Kept:
    """One kind, empty at first."""

    keep: Keep
    charged: Callable[[], float]
    """Bytes charged so far."""


def _key(number: int) -> ChunkKey:
    return ChunkKey(random.Random(number).randbytes(32))


def _held(held: Held[Any, Any], keep: Keep) -> Kept:
    return Kept(keep, lambda: held.num_bytes)


def _counted(number_max: int, bytes_max: int, size: Callable[[], int], keep: Keep) -> Kept:
    return Kept(keep, lambda: size() * bytes_max / number_max)


def _evicted() -> Kept:
    gaps = ReuseGaps(time.monotonic)
    return _held(gaps.evicted, lambda namespace, number: gaps.record_eviction((namespace, _key(number))))


def _recent() -> Kept:
    held: Held[ChunkKey, float] = Held(RECENT_BYTES_MAX)
    return _held(held, lambda namespace, number: held.put(namespace, _key(number), time.time()))


def _salts() -> Kept:
    held: Held[bool, int] = Held(1 << 30)
    return _held(held, lambda namespace, number: held.put(namespace, bool(number % 2), 1000 + number))


def _missed() -> Kept:
    queue, tokens = FillQueue(), TokenIds.of(range(40))

    def keep(namespace: str, number: int) -> None:
        queue.record_miss((namespace, _key(number)), tokens, 0.5 + number)

    return _held(queue.sighted, keep)


def _texts() -> Kept:
    resolver = SegmentResolver(lambda text: [], cast(Any, None), None)

    def keep(namespace: str, number: int) -> None:
        space = ChunkSpace(ModelFingerprint(bytes(32)), namespace)
        piece = _cut_chunk(space, TokenIds.of([1000 + number]), 1)
        resolver._keep(namespace, _name_of(space, str(number), 1), piece)

    return _held(resolver.cached, keep)


def _manifests() -> Kept:
    seen, (manifest, _) = _RecentManifests(), make_chunk(range(8))

    def keep(namespace: str, number: int) -> None:
        sent = wire.manifest_to_wire(manifest)
        sent.key, sent.namespace = _key(number).digest, namespace
        seen.remember(wire.manifest_from_wire(type(sent).FromString(sent.SerializeToString())))

    return _held(seen._seen, keep)


def _sightings() -> Kept:
    sightings = Sightings(60.0, lambda: 0.0)
    return Kept(
        lambda namespace, number: cast(None, sightings.count(namespace, namespace, [_key(number).digest])),
        lambda: sightings.num_bytes,
    )


def _trip_tests() -> Kept:
    from kintsugi.quality.stream import WATCHED_BYTES_MAX, _Watched

    held: Held[int, _Watched] = Held(WATCHED_BYTES_MAX)

    def keep(namespace: str, number: int) -> None:
        held.put(namespace, 1000 + number, _Watched())

    return _held(held, keep)


def _hot_chunks() -> Kept:
    heat, (manifest, _) = Heat(time.monotonic), make_chunk(range(8))

    def keep(namespace: str, number: int) -> None:
        named = replace(manifest, key=_key(number), namespace=namespace)
        heat.note_use(ChunkEntry(named, uses=READS_NOTED))

    return _held(heat._watched, keep)


def _shared_reads() -> Kept:
    reads = SharedReads()
    return _held(
        reads._drawn, lambda namespace, number: reads.learn(namespace, _key(number), 2 + number % 60)
    )


def _erasures() -> Kept:
    erasures = Erasures(None)

    def keep(namespace: str, number: int) -> None:
        erasures.record([Erasure(namespace, _key(number), 1.5 + number, namespace)])

    return _counted(ERASURES_MAX, 150 * MB, lambda: len(erasures), keep)


def _deletions() -> Kept:
    deletions, numbers = Deletions(lambda: time.time()), []

    def keep(namespace: str, number: int) -> None:
        numbers.append(number)
        deletions.note([(namespace, _key(number))], namespace)

    return _counted(DELETIONS_MAX, 80 * MB, lambda: len(numbers), keep)


def _leases() -> Kept:
    leases, entry = Leases(1 << 40, time.monotonic), cast(Any, SimpleNamespace(charged_bytes=1, pins=0))
    return _counted(
        PINS_MAX,
        40 * MB,
        lambda: len(leases),
        lambda namespace, number: cast(None, leases.grant(namespace, [entry], 60.0 + number, NO_RULES)),
    )


def _ghosts() -> Kept:
    fifo: S3Fifo[tuple[str, ChunkKey]] = S3Fifo(1 << 40)

    def keep(namespace: str, number: int) -> None:
        fifo.admit((namespace, _key(number)), 4096 + number, 0.0)
        fifo.evict(lambda item: True)

    return _counted(GHOSTS_MAX, 110 * MB, lambda: len(fifo._ghost), keep)


KINDS: dict[str, Callable[[], Kept]] = {
    "keys of evicted chunks": _evicted,
    "times of known texts": _recent,
    "times of erasures": _salts,
    "missed chunks": _missed,
    "tokenised texts": _texts,
    "manifests of clients": _manifests,
    "sightings": _sightings,
    TRIP_TESTS: _trip_tests,
    "hot chunks": _hot_chunks,
    "shards of hot chunks": _shared_reads,
    "erasures": _erasures,
    "deletions": _deletions,
    "leases": _leases,
    "keys of chunks that left": _ghosts,
}


def measure_heap(kind: str, shape: str, count: int) -> tuple[int, float]:
    """Return the bytes that `count` items take of the heap, and the bytes charged for them."""
    kept, name_of = KINDS[kind](), NAMES[shape]

    def keep(numbers: Iterator[int]) -> None:
        for number in numbers:
            kept.keep(name_of(number), number)

    keep(iter(range(8)))
    tracemalloc.start()
    try:
        charged, before = kept.charged(), tracemalloc.get_traced_memory()[0]
        keep(iter(range(8, 8 + count)))
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - before
        return max(0, taken - SLACK_BYTES), kept.charged() - charged
    finally:
        tracemalloc.stop()
