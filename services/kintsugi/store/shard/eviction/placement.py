"""Chooses the tier of a chunk: when it is put, and again when it is read often. Pure.

A tier is fast enough for a chunk if loading it hides behind what a blend computes meanwhile: the ratio of the
chunk's prefill, not all of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from kintsugi.core.errors import InvalidField

AUTO = "auto"
RAM = "ram"
READS_OFTEN = 4
"""Uses from which on a chunk is placed again when it has been read from an SSD tier."""
SPEED_GAIN_MIN = 1.5
"""How much faster another tier must be to move a chunk there: measured speeds waver."""
LIFETIME_S_MIN = 60.0
"""A chunk that is kept for less is not worth an upload."""
NO_SSD_TIER = "durable needs an SSD tier; ask for ram, or start the shard with --ssd"


def choose_tier(
    wanted: str, tiers: Sequence[tuple[str, float]], chunk_bytes: int, hides_s: float, durable: bool
) -> str:
    """The tier that a chunk is written to: `ram`, or the name of one of `tiers`.

    `tiers` are the SSD tiers, fastest first: names and the bytes per second measured on recent loads.
    `hides_s` is what a load of the chunk may take, 0 if unknown.

    `auto` takes the cheapest, that is the last, that is fast enough; the fastest where `hides_s` is unknown
    or a disk is asked for; RAM where no disk is fast enough.
    Raises `InvalidField` for a tier that this shard lacks.
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
    """The tier that a chunk read often moves to from tier `held`; None where it stays.

    It stays where it is held fast enough, or where nobody knows what is. Otherwise it moves to the cheapest
    tier that is, or to the fastest, if that gains enough.
    """
    speeds = dict(tiers)
    if not hides_s or chunk_bytes <= speeds[held] * hides_s:
        return None
    target = cheapest_tier(tiers, chunk_bytes, hides_s) or max(speeds, key=speeds.__getitem__)
    return target if speeds[target] >= SPEED_GAIN_MIN * speeds[held] else None


def pays_to_keep(chunk_bytes: int, bytes_per_s: float, recompute_ms: float, left_s: float) -> bool:
    """Whether a chunk that leaves the SSD tiers is worth a place in a bucket: loading it from there takes
    less time than computing it again, where that is known, and it is kept for much longer than both.

    `bytes_per_s`: of the bucket, measured. `left_s`: how long the chunk may be kept, inf for good."""
    load_s = chunk_bytes / bytes_per_s
    return (not recompute_ms or load_s < recompute_ms / 1e3) and left_s > LIFETIME_S_MIN + load_s


def cheapest_tier(tiers: Sequence[tuple[str, float]], num_bytes: int, hides_s: float) -> str | None:
    """The loading controller's second question (paper, section 5): the last of `tiers`, pairs of name and
    bytes per second with the dearest first, from which `num_bytes` load within `hides_s`. None if no tier is
    fast enough."""
    hiding = [name for name, bytes_per_s in tiers if num_bytes <= bytes_per_s * hides_s]
    return hiding[-1] if hiding else None
