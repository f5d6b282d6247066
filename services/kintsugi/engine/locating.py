"""Which stored chunks prompts hold, for callers outside the engine's core: matched as for a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kintsugi.core.exchange import MatchedChunk, PromptMatch
from kintsugi.core.request import KintsugiParams
from kintsugi.core.spaces import ChunkSpace
from kintsugi.core.tokens import TokenIds
from kintsugi.store.protocol.interface import ChunkStore


def match_prompts(
    store: ChunkStore,
    space_of: Callable[[str], ChunkSpace],
    params: KintsugiParams,
    prompts: Sequence[TokenIds],
) -> PromptMatch:
    """``space_of``: the chunk space of a namespace. Asks the store, so call it on a thread."""
    # It imports torch, and a service starts without.
    from kintsugi.engine.scheduler.matching import match_content

    space = space_of(params.namespace)
    shared = space_of(params.shared) if params.shared else None
    found: dict[MatchedChunk, None] = {}
    for prompt in prompts:
        match = match_content(store, space, prompt, shared)
        manifests = (match.manifests[span.key] for span in match.spans if span.key in match.manifests)
        found |= {MatchedChunk(one.namespace, one.key, one.num_tokens): None for one in manifests}
    return PromptMatch(sum(map(len, prompts)), tuple(found))
