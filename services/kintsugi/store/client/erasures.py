"""What shards answer about erasures, and the cursors of clients that follow them."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from kintsugi.core.errors import InvalidField, Unavailable
from kintsugi.core.namespaces import check_namespace_pattern
from kintsugi.core.spaces import ChunkKey, check_namespace
from kintsugi.rpc.v1 import store_pb2 as pb
from kintsugi.store.client.directory import SEE_SHARDS
from kintsugi.store.protocol.interface import ErasedPlace, Erasure, ErasureMark, ErasurePage, ErasureRange
from kintsugi.store.protocol.save_times import CLOCKS_DIFFER_S

FOLLOWED_SHARDS = 2
"""Number of shards that a client asks for erasures. Each shard has all erasures of the store, or learns them
from the other shards."""


def erasures_of_wire(answer: pb.ListErasuresResponse) -> ErasureRange:
    """Raises `InvalidField`. Times ahead of this machine's clock are reduced to it: an erasure dated far in
    the future would cover all later chunks."""
    latest_s = time.time() + CLOCKS_DIFFER_S

    def read_time(at_s: float) -> float:
        if not 0.0 <= at_s < math.inf:
            raise InvalidField("at_s", f"{at_s} is not a time in Unix seconds")
        return min(at_s, latest_s)

    erasures = [
        Erasure(
            check_namespace(one.namespace),
            ChunkKey(one.key) if one.key else None,
            read_time(one.at_s),
            check_namespace_pattern(one.within, "within"),
        )
        for one in answer.erasures
    ]
    merged = {
        check_namespace_pattern(one.pattern, "pattern"): ErasureMark(one.number, read_time(one.at_s))
        for one in answer.merged
    }
    return ErasureRange(erasures, answer.next, merged, answer.shard_id)


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


def follow(
    cursor: str,
    shard_ids: Sequence[str],
    ask: Callable[[Mapping[str, int | None]], Iterable[ErasureRange]],
) -> ErasurePage:
    """Return the next page of a store's erasures, from the shards that the cursor names.

    ``ask`` calls each shard with the number after which to list erasures (None: the shard returns only its
    newest number), and returns the answers that it receives. A shard that left or does not answer is replaced
    by another one, from its newest erasure on, as soon as a shard of the cursor has no more erasures; if no
    shard of the cursor answers, from its first erasure on. Raises `Unavailable` if no shard answers,
    `InvalidField` for an invalid cursor."""
    seen = read_cursor(cursor)
    known = {one: seen[one] for one in shard_ids if one in seen}
    others = [one for one in shard_ids if one not in known]

    def draw(count: int) -> list[str]:
        return random.sample(others, max(0, min(count, len(others))))

    # Called first, so that a shard of the cursor lists the erasures that are recorded between both calls.
    joined = list(ask(dict.fromkeys(draw(FOLLOWED_SHARDS - len(known)))))
    parts = list(ask(known))
    if cursor and not parts:
        joined = []
        parts = list(ask(dict.fromkeys(draw(FOLLOWED_SHARDS), 0)))
    if not (parts or joined):
        raise Unavailable(f"no shard answers; {SEE_SHARDS}")
    erasures = list(dict.fromkeys(erasure for part in parts for erasure in part.erasures))
    if all(part.erasures for part in parts) and cursor:
        joined = []
    return ErasurePage(erasures, write_cursor({part.shard_id: part.next for part in (*parts, *joined)}))


def read_cursor(cursor: str) -> dict[str, int]:
    """Return the numbers in a cursor by shard. Raises `InvalidField`."""
    try:
        seen = json.loads(cursor) if cursor else {}
        return {str(shard_id): int(number) for shard_id, number in seen.items()}
    except (ValueError, AttributeError, TypeError, OverflowError, RecursionError):
        raise InvalidField("cursor", "is not a cursor that `erasures` returned") from None


def write_cursor(seen: Mapping[str, int]) -> str:
    return json.dumps(dict(sorted(seen.items())))
