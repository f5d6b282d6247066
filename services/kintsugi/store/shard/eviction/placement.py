"""Chooses the tier of a chunk: when it is put, and again when it is read often. Pure.

A tier is fast enough for a chunk if loading it takes no longer than the computation of its blend: the ratio
times the chunk's prefill.
"""

from __future__ import annotations

from collections.abc import Sequence

from kintsugi.core.errors import InvalidField

AUTO = "auto"
RAM = "ram"
READS_OFTEN = 4
"""A chunk with at least this many uses is placed again when it is read from an SSD tier."""
SPEED_GAIN_MIN = 1.5
"""A chunk moves only to a tier that is faster by this factor, because measured speeds vary."""
LIFETIME_S_MIN = 60.0
"""A chunk with a shorter lifetime is not uploaded."""
NO_SSD_TIER = "durable needs an SSD tier; put to ram, or start the shard with --ssd"


def choose_tier(
    wanted: str, tiers: Sequence[tuple[str, float]], chunk_bytes: int, hides_s: float, durable: bool
) -> str:
    """Return the tier that a chunk is written to: `ram` or the name of one of `tiers`.

    `tiers`: the SSD tiers, fastest first, as names and the bytes per second of recent loads. `hides_s`: how
    long a load of the chunk may take so that its blend hides it; 0: unknown.

    `auto` takes the last tier (the cheapest) that is fast enough. If none is, it takes RAM, or for a durable
    put the first tier; if `hides_s` is unknown, the first tier. Raises `InvalidField` for a tier that this
    shard lacks.
    """
    wanted = wanted or AUTO
    names = [name for name, _ in tiers]
    if wanted not in (AUTO, RAM, *names):
        raise InvalidField("tier", f"{wanted!r} is not one of {', '.join((AUTO, RAM, *names))}")
    if durable and (not tiers or wanted == RAM):
        raise InvalidField("ack", NO_SSD_TIER)
    if wanted != AUTO:
        return wanted
    if not tiers:
        return RAM
    if not hides_s:
        return names[0]
    return cheapest_tier(tiers, chunk_bytes, hides_s) or (names[0] if durable else RAM)


def faster_tier(
    held: str, tiers: Sequence[tuple[str, float]], chunk_bytes: int, hides_s: float
) -> str | None:
    """Return the tier that a chunk read often moves to from tier `held`; None if it stays.

    It stays if `held` is fast enough, or if `hides_s` is unknown. Otherwise it moves to the cheapest tier
    that is fast enough, or else to the fastest, if that tier is faster by `SPEED_GAIN_MIN`.
    """
    speeds = dict(tiers)
    if not hides_s or chunk_bytes <= speeds[held] * hides_s:
        return None
    target = cheapest_tier(tiers, chunk_bytes, hides_s) or max(speeds, key=speeds.__getitem__)
    return target if speeds[target] >= SPEED_GAIN_MIN * speeds[held] else None


def pays_to_keep(chunk_bytes: int, bytes_per_s: float, recompute_ms: float, left_s: float) -> bool:
    """Return whether a chunk that leaves the SSD tiers is worth uploading: loading it takes less time than
    computing it again, if that time is known, and its remaining lifetime is much longer. `bytes_per_s`:
    measured on the bucket. `left_s`: the remaining lifetime, inf for a lasting chunk."""
    load_s = chunk_bytes / bytes_per_s
    return (not recompute_ms or load_s < recompute_ms / 1e3) and left_s > LIFETIME_S_MIN + load_s


def cheapest_tier(tiers: Sequence[tuple[str, float]], num_bytes: int, hides_s: float) -> str | None:
    """Return the last of `tiers`, ordered from the most to the least expensive, from which `num_bytes` load
    within `hides_s` (paper, section 5: the loading controller's choice of a storage device). None if no tier
    is fast enough."""
    hiding = [name for name, bytes_per_s in tiers if num_bytes <= bytes_per_s * hides_s]
    return hiding[-1] if hiding else None
