"""Code for models that are made from the bundled one: their names, files and command."""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from kintsugi.models.bundled import bundled_checkpoint

KEPT_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype", "dtype", "max_position_embeddings"),
)
"""Fields of the bundled model's config that hold for every model made from it."""


def bundled_fields(*more: str) -> dict[str, Any]:
    """The fields `KEPT_FIELDS`, and ``more``, of the bundled model's config."""
    base = json.loads((bundled_checkpoint() / "config.json").read_text())
    return {name: base[name] for name in (*KEPT_FIELDS, *more)}


def digest_of(recipe: str) -> str:
    """Names a recipe that starts from the bundled model's weights: 12 hexadecimal digits."""
    weights = hashlib.sha256((bundled_checkpoint() / "model.safetensors").read_bytes()).hexdigest()
    return hashlib.sha256(f"{recipe} {weights}".encode()).hexdigest()[:12]


def write_files(folder: Path, config: Mapping[str, Any], weights: dict[str, Tensor]) -> None:
    """Write everything that transformers and vLLM load; the tokenizer is the bundled model's."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in bundled_checkpoint().iterdir():
        if path.name.startswith(("tokenizer", "special_tokens", "generation_config", "chat_template")):
            shutil.copy(path, folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def run(description: str | None, makes: Mapping[str, Callable[[Path, int], None]], steps: int) -> None:
    """The command: make a model in a folder, by this number of ``steps`` unless another is given. ``makes``:
    by the name of its kind, the first unless another is given."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--kind", choices=list(makes), default=next(iter(makes)))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=steps)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    makes[arguments.kind](arguments.out, arguments.steps)
