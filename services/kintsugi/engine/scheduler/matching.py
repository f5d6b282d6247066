"""Finds the chunks of a prompt that the store holds: by explicit spans, or by content at any offset.

Runs on the connector's lookup threads, never on the scheduler's thread.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from kintsugi.core.accounting import Accounting
from kintsugi.core.exchange import MatchedChunk, PromptMatch
from kintsugi.core.layout import ChunkManifest, Codec
from kintsugi.core.plan import ChunkHit, ChunkSource, exact_end
from kintsugi.core.request import KintsugiParams
from kintsugi.core.spaces import (
    ANCHOR_TOKENS,
    ChunkKey,
    ChunkSpace,
    Span,
    TokenIds,
    anchors_at_every_offset,
)
from kintsugi.store.protocol.interface import Anchored, ChunkStore, Found

if TYPE_CHECKING:
    from kintsugi.engine.protocol import JobTokens, ProbeJob  # imports vLLM, which audits do without

COMPARISONS_MAX = 1 << 17
"""Maximum number of comparisons of stored lengths with one prompt."""
CANDIDATES_MAX = 4096
"""Maximum number of one prompt's candidates whose keys are computed. A prompt holds fewer chunks, unless it
repeats itself."""


@dataclass(frozen=True)
class Match:
    """The spans of a prompt with their keys, and the manifests of the stored chunks by span key. The manifest
    of a shared chunk has another key and namespace than its span."""

    spans: tuple[Span, ...]
    manifests: dict[ChunkKey, ChunkManifest]
    sources: dict[ChunkKey, ChunkSource] = field(default_factory=dict)
    """The source from which each chunk would be read."""
    segments: tuple[Span, ...] = ()
    """Segments without a stored chunk, to be counted by discovery, with the keys that they would have as
    chunks."""
    asks_behind: bool = False
    """Whether the question follows the last segment. Otherwise the last segment may be the question."""
    num_in_prefix: int = 0
    """Number of chunks left out because vLLM's prefix cache holds their tokens (`without_prefix`)."""
    segments_counted: int = 0
    segments_queued: int = 0
    """Segments queued for saving; this and `segments_counted` are as in `Accounting`."""
    segments_refused: int = 0
    """Recurring segments that the full backlog refused."""

    @cached_property
    def stored(self) -> dict[ChunkKey, ChunkManifest]:
        """The manifests by their own keys."""
        return {manifest.key: manifest for manifest in self.manifests.values()}

    @cached_property
    def num_bytes(self) -> int:
        """Approximate memory: a chunk's digests and one kilobyte; half a kilobyte per segment."""
        chunks = sum(len(manifest.digests) + 1024 for manifest in self.manifests.values())
        return chunks + 512 * len(self.segments)

    def with_others(self, other: Match) -> Match:
        """Return this match with the spans of the ``other`` that overlap none of its own."""
        others = outside(other.spans, self.spans)
        return replace(
            self,
            spans=tuple(sorted((*self.spans, *others), key=lambda span: span.start)),
            manifests={**other.manifests, **self.manifests},
            sources={**other.sources, **self.sources},
        )

    def beside(self, named: frozenset[Span], num_computed: int) -> Match:
        """Return the match without the spans that the request has not ``named`` and that either begin within
        the ``num_computed`` tokens of vLLM's prefix cache or are not stored. Segments are dropped: tokens
        outside the spans are then not part of a chunk, as for a request without discovery."""
        kept = (
            span
            for span in self.spans
            if span in named or (span.start >= num_computed and span.key in self.manifests)
        )
        return replace(self, spans=tuple(kept), segments=())


def outside(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """Return the spans that overlap none of ``others``. Both lists are ascending and disjoint."""
    ends = [span.end for span in others]
    free = []
    for span in spans:
        # The first other span that ends after this span's start.
        at = bisect_right(ends, span.start)
        if at == len(others) or others[at].start >= span.end:
            free.append(span)
    return free


def in_codecs(match: Match, codecs: frozenset[Codec] | None) -> Match:
    """Return the match without chunks in codecs other than ``codecs`` (None: all are accepted): a calibration
    covers one codec, and `raw` is lossless.
    """
    if codecs is None:
        return match
    return replace(match, manifests={key: m for key, m in match.manifests.items() if m.codec in codecs})


def match_spans(
    store: ChunkStore,
    space: ChunkSpace,
    spans: Sequence[Span],
    prompt_token_ids: Sequence[int] = (),
    shared: ChunkSpace | None = None,
) -> Match:
    """Look up spans whose keys are known. Spans that ``space`` lacks are looked up in the space that it
    shares, by the prompt's tokens."""
    keys = list(dict.fromkeys(span.key for span in spans if span.key is not None))
    found = {
        key: entry
        for key, entry in zip(keys, store.find(space.namespace, keys), strict=True)
        if entry is not None
    }
    match = Match(
        tuple(spans),
        {key: entry.manifest for key, entry in found.items()},
        {key: entry.source for key, entry in found.items()},
    )
    if shared is not None and len(match.manifests) < len(keys):
        _add_shared(store, space, match, prompt_token_ids, shared)
    return match


def _add_shared(
    store: ChunkStore, space: ChunkSpace, match: Match, prompt_token_ids: Sequence[int], shared: ChunkSpace
) -> None:
    """Add shared chunks for spans that the request's own space lacks, by the spans' keys."""
    own_keys: dict[ChunkKey, ChunkKey] = {}
    for span in match.spans:
        if span.key is not None and span.key not in match.manifests:
            copy = _same_copy(space.space_at(span.start, prompt_token_ids), shared)
            own_keys[ChunkKey.of(copy, prompt_token_ids[span.start : span.end])] = span.key
    for own_key, entry in zip(own_keys.values(), store.find(shared.namespace, list(own_keys)), strict=True):
        if entry is not None:
            match.manifests[own_key] = entry.manifest
            match.sources[own_key] = entry.source


def _same_copy(copy: ChunkSpace, shared: ChunkSpace) -> ChunkSpace:
    """Return the shared space whose chunks are prefilled after the same text as those of ``copy``."""
    return shared if copy.context_token_ids else shared.plain


def match_content(
    store: ChunkStore,
    space: ChunkSpace,
    prompt_token_ids: Sequence[int],
    shared: ChunkSpace | None = None,
    places: Mapping[int, int] | None = None,
) -> Match:
    """Find stored chunks at any offset, from left to right, longest candidate first: plain copies directly
    after the prefix, prepared chunks elsewhere; shared chunks where the request's own space has none.
    ``places`` limits the offsets; each maps to the end of the text in which its chunk must lie.

    Cost: one anchor per offset, one batched lookup per copy and space, one blake3 per candidate (two
    anchors that are a stored length apart), and one lookup of keys per namespace. Anchors only propose
    candidates: a candidate matches if the store can deliver the key of the prompt's tokens now.
    """
    anchors = anchors_at_every_offset(prompt_token_ids, space.name_key)
    if places is None:
        places = dict.fromkeys(range(len(anchors)), len(prompt_token_ids))
    first = space.first_place(prompt_token_ids)
    found = _find_candidates(store, space, prompt_token_ids, anchors, places, first)
    if shared is not None:
        if shared.name_key != space.name_key:
            anchors = anchors_at_every_offset(prompt_token_ids, shared.name_key)
        found += _find_candidates(store, shared, prompt_token_ids, anchors, places, first)
    # At one offset, own chunks come first, then longer ones.
    found.sort(key=lambda one: (one.start, one.entry.manifest.namespace != space.namespace, -one.end))
    match, end = Match((), {}), 0
    spans: list[Span] = []
    for one in found:
        if one.start < end:
            continue
        end, manifest = one.end, one.entry.manifest
        is_own = manifest.namespace == space.namespace
        copy = space.plain if one.start == first else space
        key = manifest.key if is_own else ChunkKey.of(copy, prompt_token_ids[one.start : end])
        spans.append(Span(one.start, end, key))
        match.manifests[key], match.sources[key] = manifest, one.entry.source
    return replace(match, spans=tuple(spans))


class _Candidate(NamedTuple):
    """A stored chunk whose tokens are those of the prompt from ``start`` to ``end``."""

    start: int
    end: int
    entry: Found


def _find_candidates(
    store: ChunkStore,
    space: ChunkSpace,
    prompt_token_ids: Sequence[int],
    anchors: Sequence[int],
    places: Mapping[int, int],
    first: int | None,
) -> list[_Candidate]:
    """Return the stored chunks of a space at ``places``: plain copies only directly after the prefix, at
    offset ``first``, prepared chunks only elsewhere. ``anchors``: of every window of the prompt."""
    places = {start: end for start, end in places.items() if start < len(anchors)}
    copies = {space: places}
    if space.context_token_ids:
        copies = {space.plain: {first: places.pop(first)} if first in places else {}, space: places}
    proposed: dict[tuple[int, int], ChunkKey] = {}
    for copy, ends in copies.items():
        if not ends:
            continue
        by_first: dict[int, list[Anchored]] = {}
        for one in store.lookup_anchors(copy.namespace, copy.digest, anchors):
            by_first.setdefault(one.first, []).append(one)
        for start, one in islice(_anchored(by_first, ends, anchors), CANDIDATES_MAX):
            end = start + one.num_tokens
            key = ChunkKey.of(copy, prompt_token_ids[start:end])
            if one.may_hold(key):
                proposed[start, end] = key
    keys = list(dict.fromkeys(proposed.values()))
    found = dict(zip(keys, store.find(space.namespace, keys), strict=True)) if keys else {}
    return [
        _Candidate(start, end, entry)
        for (start, end), key in proposed.items()
        if (entry := found[key]) is not None
    ]


def _anchored(
    by_first: Mapping[int, Sequence[Anchored]], ends: Mapping[int, int], anchors: Sequence[int]
) -> Iterator[tuple[int, Anchored]]:
    """Yield where stored lengths fit between a first and a last anchor of the prompt."""
    pairs = ((start, one) for start in ends for one in by_first.get(anchors[start], ()))
    for start, one in islice(pairs, COMPARISONS_MAX):
        last = start + one.num_tokens - ANCHOR_TOKENS
        if start <= last <= ends[start] - ANCHOR_TOKENS and anchors[last] == one.last:
            yield start, one


def without_prefix(
    match: Match, space: ChunkSpace, prompt_token_ids: Sequence[int], num_computed: int, is_behind: bool
) -> Match:
    """Return the match without the chunks that begin within the ``num_computed`` tokens of vLLM's prefix
    cache, if the cache reaches farther than the exact KV that a blend of all chunks would leave. The rest of
    the prompt is then blended after exact KV. ``is_behind``: whether blends may follow cached tokens;
    otherwise the cache is used if it holds more than half of the prompt.

    At this point the prefix cache has been searched for exact KV only. If a blend of all chunks is cached,
    its exact KV ends where its own block names begin, so the next request finds that blend again.
    """
    if num_computed <= exact_end(match.spans, space, prompt_token_ids):
        return match
    if not is_behind and 2 * num_computed <= len(prompt_token_ids):
        return match
    kept = tuple(span for span in match.spans if is_behind and span.start >= num_computed)
    return replace(match, spans=kept, num_in_prefix=len(match.spans) - len(kept))


def hits_of(match: Match, last: int, num_ranks: int) -> tuple[ChunkHit, ...]:
    """Return the chunks that can be loaded for the tokens before position ``last``."""
    return tuple(
        ChunkHit(
            span.start,
            min(span.end, last),
            match.manifests[span.key].key,
            match.manifests[span.key].chunk_bytes // num_ranks,
            match.sources.get(span.key, ChunkSource()),
        )
        for span in match.spans
        if span.key in match.manifests and span.start < last
    )


def probe_of(hits: Sequence[ChunkHit], match: Match) -> ProbeJob:
    """Make a job that reads one chunk from every source."""
    by_source = {hit.source: hit for hit in hits}
    from kintsugi.engine.protocol import ProbeJob

    return ProbeJob(tuple(by_source.values()), {hit.key: match.stored[hit.key] for hit in by_source.values()})


def chunks_of(match: Match, num_tokens: int) -> tuple[range, ...]:
    """Return `BlendPlan.chunks` of a prompt of ``num_tokens``. A last segment that may be the question is
    left out if it follows all spans."""
    spans = {(span.start, span.end) for span in match.spans}
    last = max((end for _, end in spans), default=0)
    segments = [(span.start, span.end) for span in match.segments]
    if segments and segments[-1][0] >= last and not match.asks_behind:
        segments.pop()
    return tuple(range(start, end) for start, end in sorted(spans.union(segments)) if end < num_tokens)


def count_match(
    accounting: Accounting,
    match: Match,
    job: JobTokens | None,
    named: frozenset[Span],
    computed: frozenset[int],
) -> Accounting:
    """Return the accounting with the match's counts: hit and missed spans, and the job's tokens outside them.
    ``named``: the spans that the request named; ``computed``: starts of hits that were recomputed."""
    hit = [span for span in match.spans if span.key in match.manifests]
    missed = [span for span in match.spans if span.key not in match.manifests]
    question = 0
    if job is not None:
        inside = sum(max(0, span.end - max(span.start, job.start)) for span in match.spans)
        question = max(0, len(job.token_ids) - inside)
    found = (span for span in hit if span not in named and span.start not in computed)
    tokens_hit = accounting.tokens_hit or sum(span.num_tokens for span in hit)
    return replace(
        accounting,
        chunks_hit=len(hit),
        chunks_missed=len(missed),
        tokens_hit=tokens_hit,
        tokens_missed=sum(span.num_tokens for span in missed),
        tokens_question=question,
        tokens_discovered=min(tokens_hit, sum(span.num_tokens for span in found)),
        segments_counted=match.segments_counted,
        segments_queued=match.segments_queued,
    )


def match_prompts(
    store: ChunkStore,
    space_of: Callable[[str], ChunkSpace],
    params: KintsugiParams,
    prompts: Sequence[TokenIds],
) -> PromptMatch:
    """Return the stored chunks of prompts, matched as for a request, for callers outside the engine's core.
    ``space_of`` returns the chunk space of a namespace. Blocks on the store."""
    space = space_of(params.namespace)
    shared = space_of(params.shared) if params.shared else None
    found: dict[MatchedChunk, None] = {}
    for prompt in prompts:
        match = match_content(store, space, prompt, shared)
        manifests = (match.manifests[span.key] for span in match.spans if span.key in match.manifests)
        found |= {MatchedChunk(one.namespace, one.key, one.num_tokens): None for one in manifests}
    return PromptMatch(sum(map(len, prompts)), tuple(found))
