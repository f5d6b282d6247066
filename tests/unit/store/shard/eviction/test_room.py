"""Where a put goes, and where a chunk that is read often moves to."""

from __future__ import annotations

import math

from hypothesis import assume, given
from hypothesis import strategies as st

from kintsugi.store.shard.eviction.room import (
    LIFETIME_S_MIN,
    SPEED_GAIN_MIN,
    cheapest_tier,
    faster_tier,
    pays_to_keep,
)


@given(st.lists(st.floats(1e6, 1e10), min_size=1, max_size=5), st.integers(1, 10**9), st.floats(1e-3, 10))
def test_the_cheapest_tier_that_hides(speeds: list[float], num_bytes: int, hides_s: float) -> None:
    """The paper's second case; tiers come with the dearest, and so the fastest, first."""
    tiers = [(str(index), speed) for index, speed in enumerate(sorted(speeds, reverse=True))]
    assume(all(abs(speed * hides_s - num_bytes) > 1 for _, speed in tiers))
    chosen = cheapest_tier(tiers, num_bytes, hides_s)
    hiding = [name for name, speed in tiers if num_bytes / speed <= hides_s]
    assert chosen == (hiding[-1] if hiding else None)


FAST, SLOW = ("ssd0", 1e9), ("ssd1", 1e8)
SIZE = 2_000_000
"""2 ms from the fast tier, 20 ms from the slow one."""


def test_a_chunk_stays_where_its_load_hides() -> None:
    assert faster_tier("ssd1", [FAST, SLOW], SIZE, hides_s=0.03) is None
    assert faster_tier("ssd0", [FAST, SLOW], SIZE, hides_s=0.03) is None


def test_a_chunk_moves_from_a_tier_that_is_too_slow() -> None:
    assert faster_tier("ssd1", [FAST, SLOW], SIZE, hides_s=0.01) == "ssd0"
    # The tier that was configured as the fastest may be slow today.
    assert faster_tier("ssd0", [("ssd0", 1e7), SLOW], SIZE, hides_s=0.03) == "ssd1"


def test_a_chunk_moves_to_the_fastest_where_none_is_fast_enough() -> None:
    assert faster_tier("ssd1", [FAST, SLOW], SIZE, hides_s=0.001) == "ssd0"
    assert faster_tier("ssd0", [FAST, SLOW], SIZE, hides_s=0.001) is None


def test_a_chunk_stays_where_nobody_knows_what_it_costs() -> None:
    assert faster_tier("ssd1", [FAST, SLOW], SIZE, hides_s=0.0) is None


@given(st.lists(st.floats(1e6, 1e10), min_size=1, max_size=5), st.integers(1, 10**9), st.floats(1e-3, 10))
def test_no_chunk_moves_back_and_forth(speeds: list[float], num_bytes: int, hides_s: float) -> None:
    tiers = [(str(index), speed) for index, speed in enumerate(speeds)]
    for held, speed in tiers:
        target = faster_tier(held, tiers, num_bytes, hides_s)
        if target is not None:
            assert dict(tiers)[target] >= SPEED_GAIN_MIN * speed
            assert faster_tier(target, tiers, num_bytes, hides_s) is None or not any(
                num_bytes <= one * hides_s for _, one in tiers
            )


def test_a_bucket_gets_what_is_loaded_sooner_than_computed() -> None:
    assert pays_to_keep(SIZE, 1e8, recompute_ms=21.0, left_s=math.inf)
    assert not pays_to_keep(SIZE, 1e8, recompute_ms=19.0, left_s=math.inf)
    assert pays_to_keep(SIZE, 1e8, recompute_ms=0.0, left_s=math.inf), "nobody said what it costs"
    assert not pays_to_keep(SIZE, 1e8, recompute_ms=0.0, left_s=LIFETIME_S_MIN)
