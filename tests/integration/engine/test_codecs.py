"""Chunks stored in 8 or 4 bits: exact where everything is recomputed, close where nothing is."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from vllm.distributed.kv_transfer import get_kv_transfer_group

from kintsugi.core.layout import ELEMENT_BYTES, Codec
from kintsugi.core.request import SelectorName
from kintsugi.engine.local import LocalEngine
from tests.integration.engine.conftest import (
    NAMESPACE,
    PREFIX,
    EngineSlot,
    ask_cold,
    chunks_of,
    engine_dtype,
    max_dlogprob,
    rag,
    ram_store,
)

pytestmark = pytest.mark.engine

SIZES = (1, 33, 100, 257, 64)
LOSSY = [codec for codec in Codec if codec is not Codec.RAW]
STORE = "tiny-llama-codecs"
StoresAs = Callable[[Codec], None]
RAW_BYTES_PER_TOKEN = 4 * 2 * 2 * 32 * ELEMENT_BYTES[engine_dtype()]
"""tiny-llama: layers, K and V, heads, head_dim, element."""


@pytest.fixture(scope="module")
def engine(engine_slot: EngineSlot) -> LocalEngine:
    return engine_slot.get("tiny-llama", {"store": f"ram://{STORE}", "codec": "int8"})


@pytest.fixture
def stores_as(engine: LocalEngine) -> Iterator[StoresAs]:
    """Sets what the engine stores chunks as: a setting, changed between requests to keep one engine."""
    worker = get_kv_transfer_group()._worker

    def use(codec: Codec) -> None:
        worker._codec = codec

    yield use
    use(Codec.INT8)


def saved(engine: LocalEngine, codec: Codec) -> list[list[int]]:
    chunks = chunks_of(*SIZES, seed=40 + codec)
    for generation in engine.save(PREFIX, chunks, NAMESPACE):
        assert generation.accounting is not None
        assert generation.accounting["outcome"] == "saved", generation.accounting
    return chunks


def test_the_configured_codec_is_what_is_stored(engine: LocalEngine) -> None:
    chunks = saved(engine, Codec.INT8)
    lengths = [
        chunk.manifest.num_tokens
        for chunk in ram_store(STORE)._chunks.values()
        if chunk.manifest.codec is Codec.INT8
    ]
    assert sorted(lengths) == sorted(map(len, chunks))


@pytest.mark.parametrize("codec", list(Codec))
def test_every_codec_end_to_end(engine: LocalEngine, stores_as: StoresAs, codec: Codec) -> None:
    stores_as(codec)
    chunks = saved(engine, codec)
    prompt = rag(*chunks)
    full = ask_cold(engine, prompt.token_ids, max_tokens=32)
    exact = ask_cold(engine, prompt.token_ids, prompt.params(1.0), max_tokens=32)
    assert exact.token_ids == full.token_ids
    assert max_dlogprob(full, exact) <= 0.01
    accounting = exact.accounting
    assert accounting is not None
    assert accounting["outcome"] == "blended"
    share = accounting["bytes_loaded"] / (sum(SIZES) * RAW_BYTES_PER_TOKEN)
    smallest = (0.5 if codec is Codec.INT4 else 1) / ELEMENT_BYTES[engine_dtype()]
    assert share == 1 if codec is Codec.RAW else smallest < share < smallest + 0.06
    alone = rag(chunks[3])
    plain = ask_cold(engine, alone.token_ids)
    reused = ask_cold(engine, alone.token_ids, alone.params(0.0))
    lost = max_dlogprob(plain, reused)
    assert lost <= 0.01 if codec is Codec.RAW else 0 < lost <= (1.0 if codec is Codec.INT4 else 0.15)
    for selector in (SelectorName.HKVD, SelectorName.HYBRID):
        some = ask_cold(engine, prompt.token_ids, prompt.params(0.2, selector)).accounting
        assert some is not None
        assert some["outcome"] == "blended", some
        assert some["tokens_recomputed"] == round(0.2 * sum(SIZES[1:]))


def test_chunks_of_several_codecs_in_one_prompt(engine: LocalEngine, stores_as: StoresAs) -> None:
    kept = []
    for codec in (Codec.RAW, Codec.INT8, Codec.FP8):
        stores_as(codec)
        kept.append(saved(engine, codec)[2])
    prompt = rag(*kept)
    full = ask_cold(engine, prompt.token_ids)
    blended = ask_cold(engine, prompt.token_ids, prompt.params(1.0))
    assert blended.accounting is not None
    assert blended.accounting["chunks_hit"] == 3
    assert blended.token_ids == full.token_ids


def test_a_chunk_that_is_stored_keeps_its_codec(engine: LocalEngine, stores_as: StoresAs) -> None:
    """The key names what the KV is of, not how it is written: the first copy stays."""
    chunks = saved(engine, Codec.INT8)
    key_count = len(ram_store(STORE)._chunks)
    stores_as(Codec.RAW)
    saved(engine, Codec.INT8)
    assert len(ram_store(STORE)._chunks) == key_count
    prompt = rag(*chunks)
    accounting = ask_cold(engine, prompt.token_ids, prompt.params(0.0)).accounting
    assert accounting is not None
    assert (
        accounting["bytes_loaded"]
        < (1 / ELEMENT_BYTES[engine_dtype()] + 0.06) * sum(SIZES) * RAW_BYTES_PER_TOKEN
    )
