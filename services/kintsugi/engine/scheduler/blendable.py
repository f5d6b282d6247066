"""Which requests are not to be blended: whatever the store holds, and for what it holds."""

from __future__ import annotations

from vllm.v1.request import Request

from kintsugi.core.errors import NotBlendable
from kintsugi.core.plan import ChunkHit, apply_options, exact_end
from kintsugi.core.prompt import PromptShape
from kintsugi.core.spaces import Span
from kintsugi.engine.scheduler import hashing
from kintsugi.engine.scheduler.matching import Match, hits_of
from kintsugi.engine.scheduler.state import RequestState
from kintsugi.models.layers import DeclineReason


def check_request(request: Request, local_chunk: int | None) -> None:
    """Raise `NotBlendable` for a request that needs more than KV of token ids, or is too long for layers that
    attend within `local_chunk` positions. Beyond them, tokens of one chunk can stand on both sides of a
    border, and see less than where the chunk was prefilled."""
    if request.lora_request is not None:
        raise NotBlendable("lora", "chunk KV belongs to the base model")
    if request.mm_features:
        raise NotBlendable(
            DeclineReason.MULTIMODAL.value,
            "the prompt has inputs beside text, and chunk KV is over token ids; send text alone to blend",
        )
    if request.prompt_token_ids is None or getattr(request, "prompt_embeds", None) is not None:
        raise NotBlendable("prompt_embeds", "chunk KV is over token ids alone")
    if local_chunk is not None and request.num_prompt_tokens > local_chunk:
        raise NotBlendable(
            "attention_chunk",
            f"{request.num_prompt_tokens} tokens are more than the {local_chunk} within which this model's "
            "layers attend; send shorter prompts to blend",
        )
    if request.skip_reading_prefix_cache:
        raise NotBlendable("prompt_logprobs", "logprobs of prompt tokens need their full prefill")


def check_calibrated(state: RequestState, hits: tuple[ChunkHit, ...], num_tokens: int, exact: int) -> None:
    """Raise `NotBlendable` if a blend of `hits` is approximate, and the prompt, of `num_tokens`, unlike those
    that were calibrated."""
    is_approximate = any(hit.end > exact for hit in hits)
    ratio = apply_options(state.planner.selection, state.params.options).ratio
    if is_approximate and ratio != 1.0:
        state.gate.check_shape(PromptShape(num_tokens, tuple(hit.num_tokens for hit in hits)))


def take_beside_named(
    match: Match, state: RequestState, num_computed: int, num_ranks: int, has_windows: bool, plain_end: int
) -> tuple[Match, tuple[Span, ...]]:
    """The match of a request that names chunks, with those others that its blend takes, and the spans to name
    its blocks by; none where the names that they have will do. They allow for what is found behind the
    fork, and not for what is approximate before it. ``plain_end``: where what plain prompts may find ends.

    Where the calibration does not hold for all chunks together, those that vLLM's prefix cache holds
    included, none of the others is taken, and the names are such that no blend with others is found.
    """
    request, named = state.request, state.params.spans or ()
    if not _holds_for(match, state, num_ranks):
        state.takes_others = False
        return match.beside(frozenset(named), request.num_tokens), named
    # Models with windows blend nothing behind cached tokens.
    reached = request.num_tokens if has_windows and num_computed else num_computed
    match = match.beside(frozenset(named), reached)
    forked_at = min(hashing.exact_tokens(request) or 0, named[0].start)
    before = tuple(span for span in match.spans if plain_end <= span.start < forked_at)
    return match, (*before, *named) if before else ()


def _holds_for(match: Match, state: RequestState, num_ranks: int) -> bool:
    request = state.request
    hits = hits_of(match, request.num_tokens - 1, num_ranks)
    exact = exact_end(match.spans, state.space, request.all_token_ids)
    try:
        check_calibrated(state, hits, request.num_prompt_tokens, exact)
    except NotBlendable:
        return False
    return True
