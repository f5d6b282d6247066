"""The tokens that the question's pass leaves out: the inside of chunks that are not loaded. Pure.

The blend computes missed chunks. Computing them for the question, too, would cost almost as much again, so a
prompt with a few missed chunks would gain nothing; the question's attention to loaded tokens depends little
on missed ones (ADR 6). The beginning of a chunk is kept, because attention sinks lie at the beginning of the
prompt. All text outside chunks (instructions, a conversation, separators) is computed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from kintsugi.core.plan import ChunkHit

KEPT_TOKENS = 64
"""Number of tokens at the beginning of a missed chunk that the question's pass computes."""
COPIED_PER_PASSED = 32
"""Number of tokens whose K and V can be copied into the pass's own cache in the time that a layer takes for
one token, on the smallest model measured. In larger models, a token takes longer."""


def find_left_out(
    hits: Sequence[ChunkHit], chunks: Sequence[range], start: int, exact_end: int
) -> list[range]:
    """Return the positions from `start` on that are left out, in ascending ranges. Empty if a cache without
    them would cost more than computing them. `chunks`, `exact_end`: as in `BlendPlan`."""
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
    """Return the position at which the question begins: after the last chunk, loaded or not."""
    return max(hits[-1].end, chunks[-1].stop if chunks else 0)
