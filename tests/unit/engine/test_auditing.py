"""Which stored chunks a prompt's audit may be of, and what it asks of the engine."""

from __future__ import annotations

import dataclasses

import pytest

from kintsugi.core.layout import ChunkManifest, Codec, KVLayout
from kintsugi.core.request import Op
from kintsugi.core.spaces import ChunkKey, ChunkSpace, ModelFingerprint, Span, TokenIds, anchors_of
from kintsugi.engine.auditing import StoredCopy, find_stored_copies
from kintsugi.store.client.ram import RamStore

PREFIX, CONTEXT = (0, 9), (7, 7, 7)
SPACE = ChunkSpace(ModelFingerprint.of({"model": "toy"}), "acme", PREFIX, True, CONTEXT)
CHUNKS = [tuple(range(100 * n, 100 * n + 40)) for n in (1, 2, 3)]
PROMPT = [*PREFIX, *CHUNKS[0], *CHUNKS[1], 5, *CHUNKS[2], 6]
SPANS = (Span(2, 42), Span(42, 82), Span(83, 123))
LAYOUT = KVLayout.uniform(1, 1, 2, "float32")


def put(store: RamStore, space: ChunkSpace, chunk: tuple[int, ...]) -> None:
    frames = [bytes(LAYOUT.frame_bytes(Codec.RAW, len(chunk)))]
    key, anchor = ChunkKey.of(space, chunk), anchors_of(chunk)
    store.put(ChunkManifest.of(space, key, anchor, len(chunk), LAYOUT, Codec.RAW, frames), frames)


@pytest.fixture
def store() -> RamStore:
    store = RamStore()
    for space in SPACE.copies():
        for chunk in CHUNKS:
            put(store, space, chunk)
    return store


@pytest.mark.parametrize("spans", [SPANS, None])
def test_the_copies_are_those_that_a_blend_loads(store: RamStore, spans: tuple[Span, ...] | None) -> None:
    found = find_stored_copies(store, SPACE, PROMPT, spans)
    assert [chunk.space for chunk in found] == [SPACE.plain, SPACE, SPACE]
    assert [tuple(chunk.token_ids) for chunk in found] == CHUNKS
    assert [chunk.key for chunk in found] == [ChunkKey.of(one.space, one.token_ids) for one in found]


def test_what_the_namespace_does_not_hold_is_not_found(store: RamStore) -> None:
    store.delete("acme", [ChunkKey.of(SPACE, CHUNKS[1])])
    found = find_stored_copies(store, SPACE, PROMPT, SPANS)
    assert [tuple(chunk.token_ids) for chunk in found] == [CHUNKS[0], CHUNKS[2]]
    assert find_stored_copies(store, dataclasses.replace(SPACE, namespace="other"), PROMPT, SPANS) == []


@pytest.mark.parametrize("space", SPACE.copies())
def test_a_chunk_is_prefilled_behind_what_it_was_saved_behind(space: ChunkSpace) -> None:
    chunk = StoredCopy(space, ChunkKey.of(space, CHUNKS[0]), TokenIds.of(CHUNKS[0]))
    prompt, lead = chunk.prompt, space.lead_token_ids
    assert tuple(prompt.token_ids[:-1]) == (*lead, *CHUNKS[0])
    assert prompt.params is not None
    assert (prompt.params.op, prompt.params.namespace, prompt.max_tokens) == (Op.AUDIT, "acme", 1)
    assert prompt.params.spans == (Span(len(lead), len(lead) + 40, chunk.key),)
