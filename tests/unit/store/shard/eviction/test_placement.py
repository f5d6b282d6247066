"""Where a put goes."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from kintsugi.store.shard.eviction.placement import cheapest_tier


@given(st.lists(st.floats(1e6, 1e10), min_size=1, max_size=5), st.integers(1, 10**9), st.floats(1e-3, 10))
def test_the_cheapest_tier_that_hides(speeds: list[float], num_bytes: int, hides_s: float) -> None:
    """The paper's second case; tiers come with the dearest, and so the fastest, first."""
    tiers = [(str(index), speed) for index, speed in enumerate(sorted(speeds, reverse=True))]
    assume(all(abs(speed * hides_s - num_bytes) > 1 for _, speed in tiers))
    chosen = cheapest_tier(tiers, num_bytes, hides_s)
    hiding = [name for name, speed in tiers if num_bytes / speed <= hides_s]
    assert chosen == (hiding[-1] if hiding else None)
