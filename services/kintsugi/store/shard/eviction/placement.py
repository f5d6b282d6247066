"""Chooses the tier of a put. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kintsugi.core.errors import InvalidField

AUTO = "auto"
RAM = "ram"
NO_SSD_TIER = "durable needs an SSD tier; ask for ram, or start the shard with --ssd"


@dataclass(frozen=True)
class TierSpeed:
    """An SSD tier as placement sees it."""

    name: str
    read_bytes_per_s: float
    """Measured on recent loads."""


def choose_tier(
    wanted: str, tiers: Sequence[TierSpeed], chunk_bytes: int, recompute_ms: float, durable: bool
) -> str:
    """The tier that a chunk is written to: `ram`, or the name of one of `tiers` (fastest first).

    `auto` takes the cheapest, that is the last, whose load still hides behind computing the chunk again;
    the fastest where that cost is unknown or a disk is asked for; RAM where no disk is fast enough.
    Raises `InvalidField` for a tier that this shard lacks.
    """
    wanted = wanted or AUTO
    names = [tier.name for tier in tiers]
    if wanted not in (AUTO, RAM, *names):
        raise InvalidField("tier", f"{wanted!r} is not one of {', '.join((AUTO, RAM, *names))}")
    if durable and (not tiers or wanted == RAM):
        raise InvalidField("ack", NO_SSD_TIER)
    if wanted != AUTO:
        return wanted
    if not tiers:
        return RAM
    if not recompute_ms:
        return names[0]
    speeds = [(tier.name, tier.read_bytes_per_s) for tier in tiers]
    return cheapest_tier(speeds, chunk_bytes, recompute_ms / 1e3) or (names[0] if durable else RAM)


def cheapest_tier(tiers: Sequence[tuple[str, float]], num_bytes: int, hides_s: float) -> str | None:
    """The loading controller's second question (paper, section 5): the last of `tiers`, pairs of name and
    bytes per second with the dearest first, from which `num_bytes` load within `hides_s`. None if no tier is
    fast enough."""
    hiding = [name for name, bytes_per_s in tiers if num_bytes <= bytes_per_s * hides_s]
    return hiding[-1] if hiding else None
