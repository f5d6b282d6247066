"""Writes a training state as a checkpoint folder that transformers and vLLM load.

python -m benchmarks.testbed.export --state runs/a/state.pt --out runs/bundled
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.testbed.model import ModelShape
from benchmarks.testbed.tokenizer import BOS, EOS, PAD, build_vocabulary, save_tokenizer

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""transformers' class by model type."""


def config_of(shape: ModelShape) -> dict[str, object]:
    """config.json for transformers and vLLM. The RoPE base stands in both spellings that loaders read."""
    vocabulary = build_vocabulary()
    return {
        "architectures": [ARCHITECTURES[shape.model_type]],
        "model_type": shape.model_type,
        **asdict(shape),
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": vocabulary[BOS],
        "eos_token_id": vocabulary[EOS],
        "pad_token_id": vocabulary[PAD],
        "torch_dtype": "float32",
        "dtype": "float32",
    }


def export(state_path: Path, out: Path) -> None:
    """Writes config.json, model.safetensors (fp32), the tokenizer and generation_config.json."""
    state = torch.load(state_path, weights_only=True)
    shape = ModelShape(**state["shape"])
    out.mkdir(parents=True, exist_ok=True)
    config = config_of(shape)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = {name: tensor.float().contiguous() for name, tensor in state["model"].items()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(out, shape.max_position_embeddings)
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    generation["do_sample"] = False
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    export(arguments.state, arguments.out)


if __name__ == "__main__":
    main()
