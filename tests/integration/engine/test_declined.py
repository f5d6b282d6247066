"""What cannot be blended is served all the same, and every response says why."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kintsugi.engine.local import Generation
from kintsugi.engine.scheduler import hashing
from kintsugi.engine.worker import side as worker
from tests.conftest import Supports
from tests.fakes.random_models.shapes import TINY_SHAPES
from tests.integration.engine.conftest import (
    NAMESPACE,
    PREFIX,
    EngineSlot,
    ask_cold,
    chunks_of,
    rag,
)
from tests.model_configs import ATTENTION_CHUNK

pytestmark = pytest.mark.engine

RANK = 8


def make_adapter(folder: Path) -> Path:
    """A LoRA of the query and value projections, as PEFT writes one."""
    shape = TINY_SHAPES["tiny-llama"]
    torch.manual_seed(0)
    tensors = {}
    for layer in range(shape.layers):
        for name, heads in (("q_proj", shape.heads), ("v_proj", shape.kv_heads)):
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(RANK, shape.hidden)
            tensors[f"{stem}.lora_B.weight"] = torch.randn(heads * shape.head_dim, RANK)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def reason_of(generation: Generation) -> str:
    assert generation.accounting is not None
    assert generation.accounting["outcome"] == "declined"
    reason: str = generation.accounting["reason"]
    return reason


@pytest.mark.composed("adapters")
def test_an_engine_with_adapters_blends_nothing(
    engine_slot: EngineSlot, tmp_path: Path, supports: Supports
) -> None:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    engine = engine_slot.get("tiny-llama", enable_lora=True, max_lora_rank=RANK, max_loras=1)
    chunks = chunks_of(100, 257, seed=9)
    assert all(reason_of(save).startswith("lora: ") for save in engine.save(PREFIX, chunks, NAMESPACE))
    prompt = rag(*chunks)
    full = ask_cold(engine, prompt.token_ids)
    declined = ask_cold(engine, prompt.token_ids, prompt.params(0.0))
    assert reason_of(declined).startswith("lora: ")
    assert declined.token_ids == full.token_ids
    wire = {"kv_transfer_params": prompt.params(0.0).to_mapping()}
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, extra_args=wire)
    adapter = LoRARequest("adapter", 1, str(make_adapter(tmp_path)))
    (output,) = engine.llm.generate(
        [{"prompt_token_ids": prompt.token_ids}], sampling, use_tqdm=False, lora_request=adapter
    )
    assert output.kv_transfer_params["kintsugi"]["outcome"] == "declined"
    assert list(output.outputs[0].token_ids) != full.token_ids
    supports("every", "LoRA", "declined")


@pytest.fixture
def without_numba_afterwards() -> Iterator[None]:
    """vLLM's proposer imports numba, and vLLM 0.32 starts no further engine in a process that has llvmlite:
    it looks through all modules for Triton kernels, and fails at llvmlite's functions."""
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "llvmlite"]:
        del sys.modules[name]


@pytest.mark.composed("n-gram speculation")
@pytest.mark.usefixtures("without_numba_afterwards")
@pytest.mark.filterwarnings(r"ignore:[\s\S]*reflected list:Warning")  # of vLLM's proposer
def test_beside_n_gram_speculation_nothing_is_blended(engine_slot: EngineSlot, supports: Supports) -> None:
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    engine = engine_slot.get("tiny-llama", speculative_config=speculation)
    chunks = chunks_of(50, 70, seed=29)
    for save in engine.save(PREFIX, chunks, NAMESPACE):
        assert reason_of(save).startswith("speculative_decoding: ")
    prompt = rag(*chunks)
    full = ask_cold(engine, prompt.token_ids)
    declined = ask_cold(engine, prompt.token_ids, prompt.params(0.0))
    assert reason_of(declined).startswith("speculative_decoding: ")
    assert declined.token_ids == full.token_ids
    supports("every", "speculative decoding", "declined")


DECLINES = {
    "hunyuan": "rope: layer 0 has keys that depend on more than their position",
    "gpt2": "learned_positions: the model has learned embeddings of absolute positions",
    "opt": "learned_positions: the model has learned embeddings of absolute positions",
    "gemma3n": "shared_kv: layer 2 has the KV of model.layers.0",
    "smollm3-dynamic": "rope_length: layer 0 has a rotation that depends on the prompt's total length",
    "olmo2-longrope": "rope_length: layer 0 has a rotation that depends on the prompt's total length",
    "llama-dynamic": "rope_length: the model has a rotation table of 2048 positions, fewer than",
}
"""By family of `tests.model_configs`. Keys normalised behind their rotation, positions added to embeddings,
layers that share KV, and tables that depend on the longest prompt or end before it."""


@pytest.mark.parametrize(
    "family", [f if f == "hunyuan" else pytest.param(f, marks=pytest.mark.full) for f in DECLINES]
)
@pytest.mark.engine("{family} float32")
def test_a_model_whose_keys_cannot_be_moved_is_served_without_blending(
    engine_slot: EngineSlot, family: str, supports: Supports
) -> None:
    engine = engine_slot.get(family, dtype="float32")
    chunks = chunks_of(100, 57, seed=9)
    for save in engine.save(PREFIX, chunks, NAMESPACE):
        assert save.accounting is not None
        assert save.accounting["outcome"] != "saved"
        assert save.accounting["reason"].startswith(DECLINES[family])
    prompt = rag(*chunks)
    full = ask_cold(engine, prompt.token_ids)
    declined = ask_cold(engine, prompt.token_ids, prompt.params(0.0))
    assert reason_of(declined).startswith(DECLINES[family])
    assert "prefix caching works as before; to blend, " in reason_of(declined)
    assert declined.token_ids == full.token_ids
    supports(family, "blending", "declined")


@pytest.mark.full
@pytest.mark.engine("llama4")
def test_a_prompt_longer_than_an_attention_chunk_is_declined(engine_slot: EngineSlot) -> None:
    engine = engine_slot.get("llama4", dtype="float32")
    chunks = chunks_of(300, ATTENTION_CHUNK - 300, seed=9)
    assert all(save.accounting for save in engine.save(PREFIX, chunks, NAMESPACE))
    short, long = rag(chunks[0]), rag(*chunks)
    blended = ask_cold(engine, short.token_ids, short.params(0.15))
    assert blended.accounting is not None
    assert blended.accounting["outcome"] == "blended"
    full = ask_cold(engine, long.token_ids)
    declined = ask_cold(engine, long.token_ids, long.params(0.15))
    assert reason_of(declined).startswith(
        f"attention_chunk: {len(long.token_ids)} tokens exceed the 512 tokens"
    )
    assert declined.token_ids == full.token_ids


def test_an_engine_whose_self_test_breaks_serves_without_blending(
    engine_slot: EngineSlot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only a failed check: a model that our layer calls do not fit may raise anything."""

    def broken(*_arguments: Any) -> None:
        raise IndexError("not what the plugin expects")

    monkeypatch.setattr(worker, "self_test", broken)
    engine_slot.close()
    engine = engine_slot.get("tiny-llama")
    prompt = rag(*chunks_of(100, seed=9))
    try:
        full = ask_cold(engine, prompt.token_ids)
        (save,) = engine.save(PREFIX, chunks_of(100, seed=9), NAMESPACE)
        assert save.accounting is not None
        assert save.accounting["outcome"] == "declined" or save.accounting["outcome"] == "failed"
        assert "IndexError: not what the plugin expects" in save.accounting["reason"]
        declined = ask_cold(engine, prompt.token_ids, prompt.params(0.0))
        assert reason_of(declined).startswith("self_test_failed")
        assert declined.token_ids == full.token_ids
    finally:
        engine_slot.close()


def test_an_engine_whose_names_do_not_keep_blends_apart_serves_without_blending(
    engine_slot: EngineSlot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashing, "fork", lambda request, *_: hashing.set_salt(request, NAMESPACE))
    engine_slot.close()
    engine = engine_slot.get("tiny-llama")
    prompt = rag(*chunks_of(100, seed=9))
    try:
        full = ask_cold(engine, prompt.token_ids)
        declined = ask_cold(engine, prompt.token_ids, prompt.params(0.0))
        assert reason_of(declined).startswith("self_test_failed: check 'names': ")
        assert declined.token_ids == full.token_ids
    finally:
        engine_slot.close()
