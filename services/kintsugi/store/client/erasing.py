"""Erasures in the answers of shards, and cursors into the erasures that shards recorded."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kintsugi.core.errors import InvalidField
from kintsugi.core.spaces import ChunkKey
from kintsugi.rpc.v1 import store_pb2 as pb
from kintsugi.store.protocol.interface import ErasedPlace, Erasure

ERASE_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class ShardErasures:
    """Erasures that one shard recorded."""

    shard_id: str
    erasures: Sequence[Erasure]
    next: int
    """The number of the last of them; the next page begins after it."""
    merged: Mapping[str, tuple[int, float]]
    """The shard's `ErasureRange.merged`."""


def erasures_of_wire(answer: pb.ListErasuresResponse) -> ShardErasures:
    erasures = [
        Erasure(one.namespace, ChunkKey(one.key) if one.key else None, one.at_s) for one in answer.erasures
    ]
    merged = {one.namespace: (one.number, one.at_s) for one in answer.merged}
    return ShardErasures(answer.shard_id, erasures, answer.next, merged)


def places_of(erased: pb.Erased) -> list[ErasedPlace]:
    """Return the tiers that held erased chunks, or the shard if none did."""
    shard = f"shard {erased.shard_id}"
    return [
        ErasedPlace(f"{shard}/{tier.tier}", tier.chunks, tier.size_bytes, erased.gone_at_s)
        for tier in erased.tiers
    ] or [ErasedPlace(shard, 0, 0, erased.gone_at_s)]


def join_places(places: Iterable[ErasedPlace]) -> list[ErasedPlace]:
    """Return one entry for each place, with the sums over all calls."""
    joined: dict[str, ErasedPlace] = {}
    for place in places:
        before = joined.get(place.place, ErasedPlace(place.place, 0, 0, 0.0))
        joined[place.place] = ErasedPlace(
            place.place,
            before.items + place.items,
            before.size_bytes + place.size_bytes,
            max(before.gone_at_s, place.gone_at_s),
        )
    return list(joined.values())


def read_cursor(cursor: str) -> dict[str, int]:
    """Return the numbers in a cursor by shard. Raises `InvalidField`."""
    try:
        seen = json.loads(cursor) if cursor else {}
        return {str(shard_id): int(number) for shard_id, number in seen.items()}
    except (ValueError, AttributeError, TypeError, OverflowError, RecursionError):
        raise InvalidField("cursor", "is not a cursor that `erasures` returned") from None


def write_cursor(seen: Mapping[str, int]) -> str:
    return json.dumps(dict(sorted(seen.items())))
