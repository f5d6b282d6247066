"""Audits of stored chunks by a real engine: sound ones agree, damaged ones do not; nothing is overwritten."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from kintsugi.core.accounting import ChunkAudit
from kintsugi.core.exchange import ChunkLost
from kintsugi.core.layout import ChunkManifest, Codec, HeadRange, digests_of
from kintsugi.core.spaces import ChunkKey, ModelFingerprint
from kintsugi.engine.auditing import StoredCopy, find_stored_copies
from kintsugi.engine.local import LocalEngine, save_prompt
from kintsugi.fusor.audit import find_damage, tolerance_of
from kintsugi.fusor.codecs import decode_frame, encode_frame
from tests.integration.engine.conftest import (
    NAMESPACE,
    PREFIX,
    EngineSlot,
    ask_cold,
    chunks_of,
    rag,
    ram_store,
    random_tokens,
)

pytestmark = pytest.mark.engine("tiny-llama prepared bfloat16")

STORE = "audited"
CONTEXT = random_tokens(50, seed=5)
CHUNKS = chunks_of(96, 64, 40, seed=11)

Alter = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Layer, K before RoPE and V -> K and V."""


@pytest.fixture(scope="module")
def engine(engine_slot: EngineSlot) -> LocalEngine:
    config: dict[str, Any] = {"store": f"ram://{STORE}", "context_token_ids": CONTEXT}
    return engine_slot.get("tiny-llama", config)


@pytest.fixture
def chunks(engine: LocalEngine) -> list[StoredCopy]:
    """The copies that a blend of all chunks loads: the first chunk's plain one, and two prepared ones."""
    store = ram_store(STORE)
    store.delete(NAMESPACE, [manifest.key for manifest in store.list(NAMESPACE)])
    assert all(one.is_saved for one in engine.save(PREFIX, CHUNKS, NAMESPACE))
    prompt = rag(*CHUNKS)
    found = find_stored_copies(store, engine.space(NAMESPACE), prompt.token_ids, prompt.spans)
    assert [list(chunk.token_ids) for chunk in found] == CHUNKS
    return found


def audit(engine: LocalEngine, chunk: StoredCopy) -> ChunkAudit:
    (generation,) = engine.generate([chunk.prompt])
    accounting = generation.accounting
    assert accounting is not None
    assert accounting["outcome"] == "audited", accounting
    return ChunkAudit(**accounting["audit"])


def read(key: ChunkKey) -> tuple[ChunkManifest, list[bytes]]:
    store = ram_store(STORE)
    (manifest,) = store.lookup(NAMESPACE, [key])
    assert manifest is not None
    layers, heads = range(manifest.layout.num_layers), HeadRange(0, manifest.layout.num_kv_heads)
    frames = []
    for frame in store.stream(NAMESPACE, [key], layers, heads, 10.0):
        assert not isinstance(frame, ChunkLost)
        frames.append(bytes(frame.data))
    return manifest, frames


def rewrite(chunk: StoredCopy, alter: Alter, codec: Codec = Codec.RAW) -> None:
    """Replace what is stored, with right digests."""
    manifest, frames = read(chunk.key)
    layout, num_tokens = manifest.layout, manifest.num_tokens
    pairs = (decode_frame(memoryview(frame), layout, manifest.codec, num_tokens) for frame in frames)
    altered = [encode_frame(*alter(layer, *pair), codec) for layer, pair in enumerate(pairs)]
    digests = b"".join(digests_of(frame, layout.head_bytes(codec, num_tokens)) for frame in altered)
    store = ram_store(STORE)
    assert store.delete(NAMESPACE, [chunk.key]) == 1
    assert store.put(dataclasses.replace(manifest, codec=codec, digests=digests), altered)


def unaltered(layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return key, value


def test_a_chunk_that_was_just_saved_is_sound(engine: LocalEngine, chunks: list[StoredCopy]) -> None:
    for chunk in chunks:
        found = audit(engine, chunk)
        assert len(found.key_errors) == len(found.value_errors) == engine.num_layers
        assert max(*found.key_errors, *found.value_errors) < tolerance_of(Codec.RAW) / 5
        assert find_damage(found) is None


def test_many_audits_at_once_beside_a_save_are_all_sound(
    engine: LocalEngine, chunks: list[StoredCopy]
) -> None:
    saving = save_prompt(PREFIX, random_tokens(70, seed=8), NAMESPACE)
    answers = engine.generate([chunks[0].prompt, saving, *(chunk.prompt for chunk in chunks)])
    outcomes = [(answer.accounting or {})["outcome"] for answer in answers]
    assert outcomes == ["audited", "saved", "audited", "audited", "audited"]
    audits = [ChunkAudit(**answer.accounting["audit"]) for answer in answers if not answer.is_saved]  # type: ignore[index]
    assert [find_damage(one) for one in audits] == [None] * 4


DAMAGES: dict[str, tuple[Alter, str]] = {
    "layer zeroed": (
        lambda layer, key, value: (0 * key, 0 * value) if layer == 2 else (key, value),
        r"of layer 2 are off by 100%",
    ),
    "values x 1.5": (lambda layer, key, value: (key, 1.5 * value), r"the values of layer \d are off by 50%"),
    "tokens rolled": (lambda layer, key, value: (key.roll(1, 0), value.roll(1, 0)), r"off by 1\d\d%"),
    "heads rolled": (lambda layer, key, value: (key.roll(1, 1), value.roll(1, 1)), r"off by 1\d\d%"),
}


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("codec", [Codec.RAW, Codec.INT8])
def test_a_damaged_chunk_is_found_and_left_as_it_is(
    engine: LocalEngine, chunks: list[StoredCopy], name: str, codec: Codec
) -> None:
    alter, expected = DAMAGES[name]
    for chunk in chunks[:2]:
        rewrite(chunk, alter, codec)
        stored = read(chunk.key)
        damage = find_damage(audit(engine, chunk))
        assert damage is not None
        assert re.search(expected, damage), damage
        assert read(chunk.key) == stored, "an audit stores nothing"
    assert find_damage(audit(engine, chunks[2])) is None


def test_a_chunk_with_a_nan_is_damaged(engine: LocalEngine, chunks: list[StoredCopy]) -> None:
    rewrite(chunks[1], lambda layer, key, value: (key, value / 0 if layer == 1 else value))
    damage = find_damage(audit(engine, chunks[1]))
    assert damage is not None
    assert "values of layer 1 are off by" in damage


@pytest.mark.parametrize("codec", [codec for codec in Codec if codec is not Codec.RAW])
def test_what_a_codec_drops_is_no_damage(engine: LocalEngine, chunks: list[StoredCopy], codec: Codec) -> None:
    for chunk in chunks:
        rewrite(chunk, unaltered, codec)
        found = audit(engine, chunk)
        worst = max(*found.key_errors, *found.value_errors)
        assert 0.001 < worst < tolerance_of(codec) / 3
        assert (found.codec, find_damage(found)) == (codec.name.lower(), None)


def test_what_is_not_stored_is_not_judged(engine: LocalEngine, chunks: list[StoredCopy]) -> None:
    ram_store(STORE).delete(NAMESPACE, [chunks[1].key])
    (generation,) = engine.generate([chunks[1].prompt])
    assert generation.accounting is not None
    assert generation.accounting["outcome"] == "failed"
    assert "not stored" in generation.accounting["reason"]
    assert ram_store(STORE).lookup(NAMESPACE, [chunks[1].key]) == [None]


def test_an_audit_is_of_its_own_namespace(engine: LocalEngine, chunks: list[StoredCopy]) -> None:
    space = dataclasses.replace(chunks[1].space, namespace="other")
    elsewhere = dataclasses.replace(chunks[1], space=space)
    (generation,) = engine.generate([elsewhere.prompt])
    assert generation.accounting is not None
    assert generation.accounting["reason"].startswith("ForeignChunkKey")
    own = dataclasses.replace(elsewhere, key=ChunkKey.of(space, chunks[1].token_ids))
    (generation,) = engine.generate([own.prompt])
    assert generation.accounting is not None
    assert "not stored" in generation.accounting["reason"], "other tenants' chunks are not read"


def test_a_blend_after_an_audit_is_what_it_was_before(engine: LocalEngine, chunks: list[StoredCopy]) -> None:
    prompt = rag(*CHUNKS)
    before = ask_cold(engine, prompt.token_ids, prompt.params(0.0))
    for chunk in chunks:
        audit(engine, chunk)
    after = ask_cold(engine, prompt.token_ids, prompt.params(0.0))
    assert after.token_ids == before.token_ids
    assert after.accounting is not None
    assert after.accounting["chunks_hit"] == len(CHUNKS)


def test_chunks_are_found_by_content_too(engine: LocalEngine, chunks: list[StoredCopy]) -> None:
    store, space = ram_store(STORE), engine.space(NAMESPACE)
    assert find_stored_copies(store, space, rag(*CHUNKS).token_ids, None) == chunks
    foreign = dataclasses.replace(space, fingerprint=ModelFingerprint.of({"model": "another"}))
    assert find_stored_copies(store, foreign, rag(*CHUNKS).token_ids, None) == []
