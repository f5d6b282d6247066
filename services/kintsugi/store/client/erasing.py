"""Erasures over the wire: what shards answer, and cursors into what they have recorded."""

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
    """Erasures that one shard has recorded."""

    shard_id: str
    erasures: Sequence[Erasure]
    next: int
    """The number after which the next ones come."""
    merged: Mapping[str, tuple[int, float]]
    """As `ErasureRange.merged` of the shard."""


def erasures_of_wire(answer: pb.ListErasuresResponse) -> ShardErasures:
    erasures = [
        Erasure(one.namespace, ChunkKey(one.key) if one.key else None, one.at_s) for one in answer.erasures
    ]
    merged = {one.namespace: (one.number, one.at_s) for one in answer.merged}
    return ShardErasures(answer.shard_id, erasures, answer.next, merged)


def places_of(erased: pb.Erased) -> list[ErasedPlace]:
    """The tiers that held something, or else the shard."""
    shard = f"shard {erased.shard_id}"
    return [
        ErasedPlace(f"{shard}/{tier.tier}", tier.chunks, tier.size_bytes, erased.gone_at_s)
        for tier in erased.tiers
    ] or [ErasedPlace(shard, 0, 0, erased.gone_at_s)]


def join_places(places: Iterable[ErasedPlace]) -> list[ErasedPlace]:
    """One entry for each place, with what all calls removed there."""
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
    """Numbers by shard. Raises `InvalidField`."""
    try:
        seen = json.loads(cursor) if cursor else {}
        return {str(shard_id): int(number) for shard_id, number in seen.items()}
    except (ValueError, AttributeError, TypeError, OverflowError, RecursionError):
        raise InvalidField("cursor", "is none that `erasures` gave") from None


def write_cursor(seen: Mapping[str, int]) -> str:
    return json.dumps(dict(sorted(seen.items())))
