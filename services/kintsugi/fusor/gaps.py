"""What the question's pass leaves out: the inside of long gaps between loaded chunks. Pure.

The blend computes a missed chunk. To compute it for the question as well costs most of that again, so that a
prompt with a few missed chunks would gain nothing. What the question attends to among loaded tokens depends
on the missed ones little. A gap keeps its beginning: at the prompt's, that is where attention sinks; and
separators between chunks, which calibrations measure with, are shorter.
"""

from __future__ import annotations

from collections.abc import Sequence

from kintsugi.core.plan import ChunkHit

GAP_TOKENS_MAX = 64
"""Tokens at the beginning of a gap that pass with the question."""


def find_left_out(hits: Sequence[ChunkHit], start: int) -> list[range]:
    """The positions from `start` on that are left out, ascending, each range directly in front of a hit."""
    left_out, reached = [], start
    for hit in hits:
        if reached + GAP_TOKENS_MAX < hit.start:
            left_out.append(range(reached + GAP_TOKENS_MAX, hit.start))
        reached = max(reached, hit.end)
    return left_out
