"""Where to keep what is put: the paper's second question to a loading controller. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def cheapest_tier(tiers: Sequence[tuple[str, float]], num_bytes: int, hides_s: float) -> str | None:
    """The last of `tiers`, (name, bytes per second) with the dearest first, from which `num_bytes` load
    within `hides_s`; None where no tier is fast enough."""
    hiding = [name for name, bytes_per_s in tiers if num_bytes <= bytes_per_s * hides_s]
    return hiding[-1] if hiding else None
