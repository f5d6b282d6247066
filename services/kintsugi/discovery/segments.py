"""Cuts token ids into segments at content-defined boundaries.

Whether a position is a boundary depends only on the tokens within `REACH_TOKENS` of it. So a passage is cut
in the same way in every prompt, and an insertion moves no distant boundary. Only text without a boundary for
`TOKENS_MAX` tokens is cut at fixed distances. The rules:

1. Two neighbouring *separators* (`token_classes`) that are at least `BLOCK_TOKENS_MIN` apart enclose a block.
   Both ends of a block are boundaries.
2. Candidates are the positions inside blocks of more than `WHOLE_TOKENS_MAX` tokens, and the separators that
   enclose no block. No candidate is nearer than `TOKENS_MIN` to a boundary of the first rule.
3. A candidate is a boundary if its gear hash (FastCDC's, over the `HASH_TOKENS` tokens before it) exceeds
   that of every other candidate within `RADIUS_TOKENS`. With a radius of 127, cuts inside a block are 257
   tokens apart on average, and never less than 128.

Cost: about sixty numpy operations over the ids, which take 100 µs plus 20 µs per 1,000 tokens (one x86 core,
100 to 32,000 ids).
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kintsugi.core.plan import PromptChunk, RagPrompt
from kintsugi.core.spaces import Span, TokenIds
from kintsugi.discovery.token_classes import TokenClasses

TOKENS_MIN = 64
TOKENS_MAX = 1024
BLOCK_TOKENS_MIN = 128
WHOLE_TOKENS_MAX = 384
"""A block of up to this many tokens is one segment, so that passages of usual size stay whole."""
RADIUS_TOKENS = 127
"""Less than `2 * TOKENS_MIN`. Candidates of two blocks are each at least `TOKENS_MIN` from the boundary
between them, so they never compete, and a block's cuts depend on the block alone."""
HASH_TOKENS = 16
REACH_TOKENS = 560
"""Maximum distance of the tokens that a boundary depends on. They include the other candidates within the
radius, the separators around these, and the tokens that determine their hashes and classes."""

_Positions = npt.NDArray[np.intp]
_Hashes = npt.NDArray[np.uint64]


def find_segments(
    token_ids: TokenIds, classes: TokenClasses, offset: int = 0, end: int | None = None
) -> list[Span]:
    """Return the segments of a prompt from `offset` on, in order, as if the prompt ended at `end`. Each has
    `TOKENS_MIN` to `TOKENS_MAX` tokens. Shorter pieces, at the ends or between blocks, belong to no
    segment."""
    ids = token_ids.to_array()[offset:end]
    if len(ids) < TOKENS_MIN:
        return []
    edges: list[int] = [0, *find_boundaries(ids, classes).tolist(), len(ids)]
    return [
        Span(offset + first, offset + last) for first, last in pairwise(edges) if last - first >= TOKENS_MIN
    ]


def cut_chunks(prompt: RagPrompt, classes: TokenClasses) -> RagPrompt:
    """Return the prompt with the segments of each chunk as its chunks. The token ids stay the same. Each
    chunk is cut alone, as if blank lines surrounded it. Tokens outside segments are computed before the next
    segment, or with the question."""
    chunks: list[PromptChunk] = []
    computed: tuple[int, ...] = ()
    for chunk in prompt.chunks:
        computed += chunk.separator
        end = 0
        for span in find_segments(TokenIds.of(chunk.token_ids), classes):
            before = computed + chunk.token_ids[end : span.start]
            chunks.append(PromptChunk(chunk.title, chunk.token_ids[span.start : span.end], before))
            computed, end = (), span.end
        computed += chunk.token_ids[end:]
    return RagPrompt(prompt.prefix, tuple(chunks), computed + prompt.question)


def find_boundaries(ids: npt.NDArray[np.uint32], classes: TokenClasses) -> _Positions:
    """The boundaries between segments: ascending positions within `[1, len)`."""
    edges = np.concatenate(([0], classes.find_separators(ids), [len(ids)]))
    gaps = np.diff(edges)
    is_block = gaps >= BLOCK_TOKENS_MIN
    is_fixed = np.zeros(len(edges), np.bool_)
    is_fixed[[0, -1]] = True
    is_fixed[:-1] |= is_block
    is_fixed[1:] |= is_block
    fixed = edges[is_fixed]
    may_end = np.append(np.repeat(gaps > WHOLE_TOKENS_MAX, gaps), False)
    may_end[edges[~is_fixed]] = True
    may_end[_near(fixed, len(ids))] = False
    peaks = _peaks(np.where(may_end[:-1], _hashes(ids), np.uint64(0)))
    return _split_long(np.union1d(fixed, peaks))[1:-1]


def _near(fixed: _Positions, num_tokens: int) -> npt.NDArray[np.bool_]:
    """Mask of the positions `[0, num_tokens]` that are nearer than `TOKENS_MIN` to a fixed boundary."""
    steps = np.zeros(num_tokens + 2, np.intp)
    np.add.at(steps, np.maximum(fixed - TOKENS_MIN + 1, 0), 1)
    np.add.at(steps, np.minimum(fixed + TOKENS_MIN, num_tokens + 1), -1)
    return np.cumsum(steps[:-1]) > 0


def _hashes(ids: npt.NDArray[np.uint32]) -> _Hashes:
    """At each position, the gear hash of the `HASH_TOKENS` tokens before it; never 0."""
    gear = np.concatenate((np.zeros(HASH_TOKENS, np.uint64), _mix(ids)))
    width = 1
    while width < HASH_TOKENS:
        # Join each window of `width` tokens with the window before it.
        gear[width:] += gear[:-width] << np.uint64(width)
        width *= 2
    return gear[HASH_TOKENS - 1 : -1] | np.uint64(1)


def _mix(ids: npt.NDArray[np.uint32]) -> _Hashes:
    """64 pseudo-random bits for each token id (splitmix64), without a table per vocabulary."""
    mixed = (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _peaks(scores: _Hashes) -> _Positions:
    """Positions whose score is above 0 and above all others within `RADIUS_TOKENS`."""
    padding = np.zeros(RADIUS_TOKENS, np.uint64)
    highest = np.concatenate((padding, scores, padding))
    width = 1
    while 2 * width <= RADIUS_TOKENS:
        highest = np.maximum(highest[:-width], highest[width:])
        width *= 2
    rest = RADIUS_TOKENS - width
    highest = np.maximum(highest[: len(highest) - rest], highest[rest:])
    # `highest[i]` is the maximum of the `RADIUS_TOKENS` scores that end before position i.
    before, behind = highest[: len(scores)], highest[RADIUS_TOKENS + 1 :]
    return np.flatnonzero((scores > before) & (scores > behind))


def _split_long(edges: _Positions) -> _Positions:
    """The edges, with further edges between two that are more than `TOKENS_MAX` apart."""
    sizes = np.diff(edges)
    if not len(sizes) or sizes.max() <= TOKENS_MAX:
        return edges
    parts = [np.arange(start, end, TOKENS_MAX) for start, end in pairwise(edges)]
    return np.concatenate((*parts, edges[-1:]))
