"""What the question's pass leaves out: the inside of the prompt's chunks that are not loaded. Pure.

The blend computes a missed chunk. To compute it for the question as well costs most of that again, so that a
prompt with a few missed chunks would gain nothing. What the question attends to among loaded tokens depends
on the missed ones little (ADR 6). A chunk keeps its beginning: at the prompt's, that is where attention
sinks. Text that is no chunk passes whole: instructions, a conversation, separators.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from kintsugi.core.plan import ChunkHit

KEPT_TOKENS = 64
"""Tokens at the beginning of a missed chunk that pass with the question."""
COPIED_PER_PASSED = 32
"""Tokens whose K and V are written into a cache of its own in the time in which one passes a layer, in the
smallest model measured; larger ones take longer to pass."""


def find_left_out(
    hits: Sequence[ChunkHit], chunks: Sequence[range], start: int, exact_end: int
) -> list[range]:
    """The positions from `start` on that are left out, in ascending ranges. `chunks`, `exact_end`: as in
    `BlendPlan`. Empty where a cache without them would cost more than they do."""
    loaded = [hit.start for hit in hits]
    left_out = []
    for chunk in chunks:
        place = bisect_left(loaded, chunk.start)
        is_missed = place == len(loaded) or loaded[place] >= chunk.stop
        inside = range(max(chunk.start + KEPT_TOKENS, start), chunk.stop)
        if is_missed and inside:
            left_out.append(inside)
    copied = exact_end + sum(hit.end - max(hit.start, exact_end) for hit in hits if hit.end > exact_end)
    return left_out if COPIED_PER_PASSED * sum(map(len, left_out)) >= copied else []


def find_question(hits: Sequence[ChunkHit], chunks: Sequence[range]) -> int:
    """Where the question begins: behind the last chunk, loaded or not."""
    return max(hits[-1].end, chunks[-1].stop if chunks else 0)
