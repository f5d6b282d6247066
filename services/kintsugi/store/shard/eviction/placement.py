"""Chooses the tier of a put. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kintsugi.core.errors import InvalidField

AUTO = "auto"
RAM = "ram"
NO_SSD_TIER = "durable needs an SSD tier; ask for ram, or start the shard with --ssd"


def choose_tier(
    wanted: str, tiers: Sequence[tuple[str, float]], chunk_bytes: int, recompute_ms: float, durable: bool
) -> str:
    """The tier that a chunk is written to: `ram`, or the name of one of `tiers`.

    `tiers` are the SSD tiers, fastest first: names and the bytes per second measured on recent loads.

    `auto` takes the cheapest, that is the last, whose load still hides behind computing the chunk again;
    the fastest where that cost is unknown or a disk is asked for; RAM where no disk is fast enough.
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
    if not recompute_ms:
        return names[0]
    return cheapest_tier(tiers, chunk_bytes, recompute_ms / 1e3) or (names[0] if durable else RAM)


def cheapest_tier(tiers: Sequence[tuple[str, float]], num_bytes: int, hides_s: float) -> str | None:
    """The loading controller's second question (paper, section 5): the last of `tiers`, pairs of name and
    bytes per second with the dearest first, from which `num_bytes` load within `hides_s`. None if no tier is
    fast enough."""
    hiding = [name for name, bytes_per_s in tiers if num_bytes <= bytes_per_s * hides_s]
    return hiding[-1] if hiding else None
