"""What cannot be blended is served all the same, and every response says why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kintsugi.core.errors import NotBlendable
from kintsugi.engine.local import Generation
from kintsugi.engine.scheduler import hashing
from kintsugi.engine.worker import side as worker
from kintsugi.models.shapes import TINY_SHAPES
from tests.conftest import Supports
from tests.integration.engine.conftest import (
    NAMESPACE,
    PREFIX,
    EngineSlot,
    ask_cold,
    chunks_of,
    rag,
)

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


def test_an_engine_on_a_vllm_that_lacks_something_serves_without_blending(
    engine_slot: EngineSlot, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kintsugi.engine import connector, declining_connector

    monkeypatch.setattr(connector, "KintsugiConnector", declining_connector.DecliningConnector)
    reason = "vllm_version: this vLLM lacks a name"
    monkeypatch.setattr(declining_connector, "describe_missing", lambda: reason)
    engine_slot.close()
    engine = engine_slot.get("tiny-llama")
    prompt = rag(*chunks_of(100, seed=9))
    try:
        full = ask_cold(engine, prompt.token_ids)
        assert full.accounting is None
        declined = ask_cold(engine, prompt.token_ids, prompt.params(0.0))
        assert reason_of(declined) == reason
        assert declined.token_ids == full.token_ids
        with pytest.raises(NotBlendable, match="is a DecliningConnector"):
            engine.save(PREFIX, chunks_of(100, seed=9), NAMESPACE)
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
