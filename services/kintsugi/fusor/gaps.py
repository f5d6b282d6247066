"""What the question's pass leaves out: the inside of long gaps between loaded chunks. Pure.

The blend computes a missed chunk. To compute it for the question as well costs most of that again, so that a
prompt with a few missed chunks would gain nothing. What the question attends to among loaded tokens depends
on the missed ones little (ADR 6). A gap keeps its beginning, so that separators between chunks, which
calibrations measure with, pass whole. So does everything before the first approximate token: it may be in the
engine's prefix cache, and whether it is must not change what is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence

from kintsugi.core.plan import ChunkHit

GAP_TOKENS_MAX = 64
"""Tokens at the beginning of a gap that pass with the question."""
COPIED_PER_PASSED = 32
"""Cached tokens that are copied into a cache of its own in the time in which one passes a layer, in the
smallest model measured; larger ones take longer to pass."""


def find_left_out(hits: Sequence[ChunkHit], start: int, exact_end: int) -> list[range]:
    """The positions from `start` on that are left out, ascending, each range directly in front of a hit.
    `exact_end`: as in `BlendPlan`. Empty where a cache without them would cost more than they do."""
    left_out, reached = [], max(start, exact_end)
    for hit in hits:
        if reached + GAP_TOKENS_MAX < hit.start:
            left_out.append(range(reached + GAP_TOKENS_MAX, hit.start))
        reached = max(reached, hit.end)
    return left_out if COPIED_PER_PASSED * sum(map(len, left_out)) >= exact_end else []
