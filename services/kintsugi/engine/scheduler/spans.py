"""Checks the spans of a request against its prompt and its chunk space. Pure."""

from __future__ import annotations

from kintsugi.core.errors import ForeignChunkKey, InvalidSpan
from kintsugi.core.request import KintsugiParams, Op, check_spans
from kintsugi.core.spaces import ChunkKey, ChunkSpace, Span, anchors_of
from kintsugi.core.tokens import TokenIds
from kintsugi.engine.protocol import JobTokens, SaveJob


def add_span_keys(spans: tuple[Span, ...], space: ChunkSpace, prompt: TokenIds) -> tuple[Span, ...]:
    """The spans with the keys of the copies that are used where they stand.

    A span may have the prepared chunk's key wherever it stands: that is the name that clients know. Raises
    `ForeignChunkKey` for a span with another key.
    """
    check_spans(spans, len(prompt))
    keyed = []
    for index, span in enumerate(spans):
        tokens = prompt[span.start : span.end]
        key = ChunkKey.of(space.space_at(span.start, prompt), tokens)
        if span.key is not None and span.key != key and span.key != ChunkKey.of(space, tokens):
            raise ForeignChunkKey(
                f"spans[{index}].key",
                f"{span.key} is not the key of these tokens in namespace {space.namespace!r} for this "
                f"model, prefix and context ({key}); put the chunk again, or correct the span",
            )
        keyed.append(Span(span.start, span.end, key))
    return tuple(keyed)


def saved_copy(params: KintsugiParams, space: ChunkSpace, prompt: TokenIds) -> ChunkSpace:
    """The space of the copy that a save makes, by what stands before the chunk."""
    assert params.spans is not None
    before = tuple(prompt[: params.spans[0].start])
    return next((copy for copy in space.copies() if copy.lead_token_ids == before), space)


def save_job(
    params: KintsugiParams,
    space: ChunkSpace,
    prompt: TokenIds,
    tokens: JobTokens,
) -> SaveJob:
    """What the worker does for a save or an audit that `check_save` accepted."""
    assert params.spans is not None
    (span,) = params.spans
    assert span.key is not None
    return SaveJob(
        tokens,
        space,
        span.key,
        anchors_of(prompt[span.start : span.end], space.name_key),
        span.start,
        span.end,
        params.tier,
        is_audit=params.op is Op.AUDIT,
        ttl_s=params.ttl_s or 0.0,
        asked_at_s=params.asked_at_s,
    )


def check_save(params: KintsugiParams, space: ChunkSpace, prompt: TokenIds) -> None:
    assert params.spans is not None
    (span,) = params.spans
    if span.end >= len(prompt):
        raise InvalidSpan(
            "spans[0]", f"op={params.op} needs one token behind the chunk; its own KV is not kept"
        )
    if tuple(prompt[: span.start]) != space.lead_token_ids:
        behind = f"prefix of {len(space.prefix_token_ids)} tokens"
        if space.context_token_ids:
            behind += f", with or without its context of {len(space.context_token_ids)} tokens"
        raise InvalidSpan(
            "spans[0]",
            f"op={params.op} needs the chunk directly behind the space's {behind}; "
            "behind other text it would be another chunk",
        )
