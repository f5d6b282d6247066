"""Finds the stored chunks of a prompt, and makes the requests that audit them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from kintsugi.core.request import Op
from kintsugi.core.spaces import ChunkKey, ChunkSpace, Span, TokenIds
from kintsugi.engine.local import Prompt, save_prompt
from kintsugi.engine.scheduler.matching import match_content, match_spans
from kintsugi.store.protocol.interface import ChunkStore


@dataclass(frozen=True)
class StoredCopy:
    """One copy of a chunk that a store holds."""

    space: ChunkSpace
    """The space of this copy: the prepared chunk's or the plain copy's."""
    key: ChunkKey
    token_ids: TokenIds

    @property
    def prompt(self) -> Prompt:
        """The request that audits this copy."""
        lead, namespace = self.space.lead_token_ids, self.space.namespace
        saving = save_prompt(lead, self.token_ids, namespace, self.key)
        assert saving.params is not None
        return dataclasses.replace(saving, params=dataclasses.replace(saving.params, op=Op.AUDIT))


def find_stored_copies(
    store: ChunkStore, space: ChunkSpace, token_ids: Sequence[int], spans: Sequence[Span] | None
) -> list[StoredCopy]:
    """Return the copies that a blend of this prompt would load now, in order, except chunks with a context of
    their own: its tokens are not stored. Without ``spans``, chunks are found by content. Blocks on the store
    and raises its lookups' errors."""
    prompt = TokenIds.of(token_ids)
    if spans is None:
        match = match_content(store, space, prompt)
    else:
        keys = [ChunkKey.of(space.space_at(s.start, prompt), prompt[s.start : s.end]) for s in spans]
        match = match_spans(
            store, space, [Span(s.start, s.end, key) for s, key in zip(spans, keys, strict=True)]
        )
    copies = ((s, space.space_at(s.start, prompt), match.manifests.get(s.key)) for s in match.spans if s.key)
    return [
        StoredCopy(copy, s.key, prompt[s.start : s.end])
        for s, copy, manifest in copies
        if s.key and manifest is not None and manifest.context_keys == copy.context_keys
    ]
