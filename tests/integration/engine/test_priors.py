"""The selector `prior` in a real engine: what a save stores, what a blend chooses, and chunks without any."""

from __future__ import annotations

import pytest
import torch

from kintsugi.core.layout import FORMAT, PRIOR_LAYER, HeadRange, LayerFrame
from kintsugi.core.request import SelectorName
from kintsugi.core.spaces import ChunkKey
from kintsugi.engine.local import LocalEngine
from kintsugi.fusor.priors import PRIOR, encode_scores, read_scores
from kintsugi.models.context import encode_prior_text
from kintsugi.models.factory import make_checkpoint_once
from tests.integration.engine.conftest import (
    NAMESPACE,
    PREFIX,
    EngineSlot,
    ask_cold,
    chunks_of,
    max_dlogprob,
    rag,
    ram_store,
)
from tests.oracle import Oracle, measured_layers

pytestmark = pytest.mark.engine("{shape} priors float32")

SIZES = (40, 33, 100, 257, 64)
CANDIDATES = sum(SIZES[1:])
"""The first chunk stands where it was prefilled."""


@pytest.fixture(scope="module", params=["tiny-llama", pytest.param("tiny-gemma3", marks=pytest.mark.full)])
def shape(request: pytest.FixtureRequest) -> str:
    """One cache group, and several with windows."""
    return str(request.param)


@pytest.fixture(scope="module")
def chunks() -> list[list[int]]:
    return chunks_of(*SIZES, seed=7)


@pytest.fixture(scope="module")
def oracle(shape: str) -> Oracle:
    return Oracle(make_checkpoint_once(shape))


@pytest.fixture(scope="module")
def engine(engine_slot: EngineSlot, shape: str, chunks: list[list[int]]) -> LocalEngine:
    config: dict[str, object] = {"store": "ram://priors", "priors": True}
    engine = engine_slot.get(shape, config, dtype="float32")
    for generation in engine.save(PREFIX, chunks, NAMESPACE):
        assert generation.accounting is not None
        assert generation.accounting["outcome"] == "saved", generation.accounting
    return engine


def stored_scores(engine: LocalEngine, chunk: list[int]) -> torch.Tensor:
    """uint8 `[tokens]`: the prior of a chunk, as the store holds it."""
    store = ram_store("priors")
    key = ChunkKey.of(engine.space(NAMESPACE), chunk)
    (manifest,) = store.lookup(NAMESPACE, [key])
    assert manifest is not None
    assert (manifest.format, manifest.priors) == (FORMAT, (PRIOR,))
    heads = HeadRange(0, manifest.layout.num_kv_heads)
    (frame,) = store.stream(NAMESPACE, [key], range(PRIOR_LAYER, 0), heads, 60.0)
    assert isinstance(frame, LayerFrame)
    return read_scores(frame.data, manifest)


def test_a_save_stores_what_the_oracle_says(
    engine: LocalEngine, oracle: Oracle, chunks: list[list[int]]
) -> None:
    text = encode_prior_text(engine.tokenizer)
    for chunk in chunks:
        expected = encode_scores(oracle.prior(PREFIX, [*PREFIX, *text], chunk))
        assert len({*expected.tolist()}) > 8, "else any score would do"
        assert int((stored_scores(engine, chunk).int() - expected.int()).abs().max()) <= 1


def test_full_ratio_is_full_prefill(engine: LocalEngine, chunks: list[list[int]]) -> None:
    prompt = rag(*chunks)
    full = ask_cold(engine, prompt.token_ids, max_tokens=32)
    params = prompt.params(1.0, SelectorName.PRIOR)
    blended = ask_cold(engine, prompt.token_ids, params, max_tokens=32)
    assert blended.accounting is not None
    assert blended.accounting["outcome"] == "blended", blended.accounting
    assert blended.token_ids == full.token_ids
    assert max_dlogprob(full, blended) <= 1e-3


def test_a_blend_recomputes_the_highest_priors_and_is_what_the_oracle_says(
    engine: LocalEngine, oracle: Oracle, chunks: list[list[int]]
) -> None:
    prompt, ratio = rag(*chunks), 0.2
    params = prompt.params(ratio, SelectorName.PRIOR, explain=True)
    got = ask_cold(engine, prompt.token_ids, params, max_tokens=1)
    accounting = got.accounting
    assert accounting is not None
    assert (accounting["outcome"], accounting["selector"]) == ("blended", "prior")
    scores = {
        position: int(score)
        for span, chunk in list(zip(prompt.spans, chunks, strict=True))[1:]
        for position, score in zip(range(span.start, span.end), stored_scores(engine, chunk), strict=True)
    }
    count = round(ratio * CANDIDATES)
    best = sorted(scores, key=lambda position: (-scores[position], position))[:count]
    active = {int(layer): positions for layer, positions in accounting["recomputed_positions"].items()}
    for positions in active.values():
        assert {*positions} & {*scores} == {*best}
    # No layer at full width, no projection, no pass of the question.
    others = len(prompt.token_ids) - 1 - sum(SIZES)
    assert accounting["token_layers_computed"] == oracle.num_layers * (count + others)
    hits = [(span.start, span.end) for span in prompt.spans]
    measured = measured_layers("prior", 1, ratio, oracle.num_layers)
    expected = oracle.blended(prompt.token_ids, PREFIX, hits, active, measured).logprobs[0]
    for token, logprob in got.top_logprobs[0].items():
        assert float(expected[token]) == pytest.approx(logprob, abs=1e-3)


def drop_priors(engine: LocalEngine, chunks: list[list[int]]) -> None:
    """Store the chunks as an engine stores them that saves no priors."""
    store, space = ram_store("priors"), engine.space(NAMESPACE)
    for chunk in chunks:
        key = ChunkKey.of(space, chunk)
        (manifest,) = store.lookup(NAMESPACE, [key])
        assert manifest is not None
        plain = manifest.as_plain()
        assert plain is not None
        layout = manifest.layout
        heads, layers = HeadRange(0, layout.num_kv_heads), range(layout.num_layers)
        stream = store.stream(NAMESPACE, [key], layers, heads, 60.0)
        frames = [bytes(frame.data) for frame in stream if isinstance(frame, LayerFrame)]
        store.delete(NAMESPACE, [key])
        store.put(plain, frames)


@pytest.mark.parametrize("without", [[2], [0, 1, 2, 3, 4]])
def test_a_chunk_without_a_prior_is_computed(engine: LocalEngine, without: list[int]) -> None:
    """Except the first chunk, which is exact as loaded."""
    chunks = chunks_of(*SIZES, seed=8 + len(without))
    engine.save(PREFIX, chunks, NAMESPACE)
    drop_priors(engine, [chunks[index] for index in without])
    prompt = rag(*chunks)
    params = prompt.params(0.2, SelectorName.PRIOR, explain=True)
    accounting = ask_cold(engine, prompt.token_ids, params).accounting
    assert accounting is not None
    assert accounting["outcome"] == "blended", accounting
    computed = [prompt.spans[index] for index in without if index]
    assert accounting["chunks_recomputed"] == len(computed)
    for positions in accounting["recomputed_positions"].values():
        assert all({*range(span.start, span.end)} <= {*positions} for span in computed)


def test_without_any_prior_the_blend_is_declined_and_says_why(engine: LocalEngine) -> None:
    chunks = chunks_of(*SIZES, seed=20)
    engine.save(PREFIX, chunks, NAMESPACE)
    drop_priors(engine, chunks)
    prompt = rag(*chunks)
    prompt.prefix = (*PREFIX, 5)  # so no chunk is exact
    refused = ask_cold(engine, prompt.token_ids, prompt.params(0.2, SelectorName.PRIOR)).accounting
    assert refused is not None
    assert refused["outcome"] == "declined"
    assert refused["reason"].startswith("no_priors: ")
    for ratio, selector in ((0.2, SelectorName.HKVD), (1.0, SelectorName.PRIOR)):
        other = ask_cold(engine, prompt.token_ids, prompt.params(ratio, selector)).accounting
        assert other is not None
        assert other["outcome"] == "blended", "nothing is chosen by a prior"
