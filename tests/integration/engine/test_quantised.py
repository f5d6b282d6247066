"""Weights and activations in 8-bit integers, a checkpoint as compressed-tensors writes it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kintsugi.engine.local import LocalEngine
from tests.conftest import Figure, Supports
from tests.fakes.random_models.factory import make_checkpoint_once
from tests.integration.engine.conftest import UNCALIBRATED, EngineSlot, engine_dtype
from tests.integration.engine.test_architectures import assert_exact, saved

pytestmark = pytest.mark.engine

SHAPE = "tiny-llama"
INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**INT8, "strategy": "channel", "dynamic": False},
            "input_activations": {**INT8, "strategy": "token", "dynamic": True},
        }
    },
}


def quantise(folder: Path) -> None:
    """Round the projections of the checkpoint in `folder` to integers, one scale per output channel."""
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        scale = tensors[name].float().abs().amax(1, keepdim=True) / 127
        tensors[f"{name}_scale"] = scale
        tensors[name] = (tensors[name].float() / scale).round().to(torch.int8)
    save_file(tensors, weights, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": CONFIG}))


@pytest.fixture
def engine(engine_slot: EngineSlot, tmp_path: Path) -> Iterator[LocalEngine]:
    engine_slot.close()
    folder = tmp_path / "model"
    shutil.copytree(make_checkpoint_once(SHAPE), folder)
    quantise(folder)
    with LocalEngine.start(
        folder,
        extra_config={"store": "ram://quantised", **UNCALIBRATED},
        dtype=engine_dtype(),
        max_model_len=2048,
        block_size=32,
        kv_cache_memory_bytes=64 << 20,
    ) as engine:
        yield engine


def test_full_ratio_is_full_prefill(engine: LocalEngine, supports: Supports, figure: Figure) -> None:
    prompt = saved(engine, 0)
    figure("r1_max_abs_dlogprob", f"{SHAPE}, int8 weights", assert_exact(engine, prompt, prompt.params(1.0)))
    alone = saved(engine, 0, (301,))
    assert_exact(engine, alone, alone.params(0.0))
    supports(SHAPE, "quantised weights", "exact")
