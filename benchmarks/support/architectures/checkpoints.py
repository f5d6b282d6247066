"""Makes a tiny checkpoint of any architecture that transformers has a config for.

Weights are random, and yet the model does not repeat one token: projections are scaled by their fan-in,
queries and keys have some contrast, and the weights of the last norm have random signs, so that a head that
is tied to the embeddings does not simply prefer the token that was read last.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import blake3
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from benchmarks.support.architectures.catalogue import Architecture
from kintsugi.models.cache import cache_folder, make_folder_once
from kintsugi.models.reference import resolve_model
from tests.fakes.random_models.vocabulary import BOS_ID, EOS_ID, train_tokenizer

RECIPE = 4
"""Increase this when the same entry gives other weights, so that older cached checkpoints are not used."""

VOCAB, POSITIONS = 1024, 8192

TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": EOS_ID,
    "tie_word_embeddings": False,
}
"""Default fields of every model. An entry may override them; None there keeps the class's default."""

SMALLER: dict[str, Any] = {
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "zero_expert_num": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "shared_intermediate_size": 128,
    "moe_shared_expert_intermediate_size": 128,
    "expert_ffn_hidden_size": 128,
    "ffn_hidden_size": 256,
    "ffn_dim": 256,
    "intermediate_size_mlp": 256,
    "q_lora_rank": 64,
    "o_lora_rank": 64,
    # Not a multiple of any backend's block, so that windows end inside blocks.
    "sliding_window": 200,
    "sliding_window_size": 200,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_num_heads": 4,
    "mamba_d_state": 16,
    "ssm_state_size": 16,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 32,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 32,
}
"""Sizes that only some config classes have, and whose default is not None."""

_TOKENS = ("image", "video", "vision_start", "vision_end", "boi", "eoi", "audio")
"""Special tokens of vision-language configs; their ids occur in no prompt here."""


def make_config(architecture: Architecture) -> PretrainedConfig:
    """The tiny config of `architecture`."""
    changes = dict(architecture.changes)
    text = changes.pop("text_config", None)
    if text is None:
        values = _sized(architecture.model_type, changes)
    else:
        inner = _sized(text["model_type"], text)
        values = {"tie_word_embeddings": False, **changes, "text_config": inner}
        default = CONFIG_MAPPING[architecture.model_type]().to_dict()
        for number, token in enumerate(_TOKENS):
            names = [name for name in (f"{token}_token_id", f"{token}_token_index") if name in default]
            values.update(dict.fromkeys(names, VOCAB - 1 - number))
    config: PretrainedConfig = CONFIG_MAPPING[architecture.model_type](**values)
    config.architectures = [architecture.model_class]
    config.dtype = "float32"
    return config


def _sized(model_type: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Field values of a text config."""
    default = CONFIG_MAPPING[model_type]()
    smaller = {name: value for name, value in SMALLER.items() if default.to_dict().get(name)}
    # vLLM would apply it to a class in which every head has its own keys.
    unshared = {} if hasattr(default, "num_key_value_heads") else {"num_key_value_heads": None}
    values = {**TINY, **smaller, **unshared, **changes}
    return {name: value for name, value in values.items() if value is not None}


def make_checkpoint_once(architecture: Architecture) -> Path:
    """The checkpoint of `architecture`, made or fetched on first use. Safe with several processes."""
    if architecture.pretrained:
        return Path(resolve_model(architecture.pretrained))
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", architecture.name)
    fields = make_config(architecture).to_json_string(use_diff=False) + json.dumps(_as_given(architecture))
    digest = blake3.blake3(fields.encode()).hexdigest(8)
    final = cache_folder() / "architectures" / f"{slug}-{digest}-r{RECIPE}"
    return make_folder_once(final, lambda draft: _make(architecture, draft))


def _as_given(architecture: Architecture) -> dict[str, Any]:
    """Fields that are written as the entry gives them, because transformers' class may rename or omit fields
    that vLLM's class reads."""
    if not architecture.stand_in:
        return {}
    return {name: value for name, value in architecture.changes.items() if value is not None}


_PROCESSORS = {
    "qwen2_5_vl": "Qwen2VLVideoProcessor",
    "qwen3_vl": "Qwen3VLVideoProcessor",
    "qwen3_5": "Qwen3VLVideoProcessor",
}
"""transformers' class for videos by model type; images have one class in this family."""


def _write_processors(config: PretrainedConfig, folder: Path) -> None:
    """Write the processor that vLLM asks for an image's number of tokens. A KV consumer accepts embeddings of
    images, so vLLM asks even if prompts have no images."""
    vision = config.vision_config
    names = ("patch_size", "temporal_patch_size")
    sizes = {name: getattr(vision, name) for name in names} | {"merge_size": vision.spatial_merge_size}
    common = {**sizes, "size": {"shortest_edge": 56 * 56, "longest_edge": 224 * 224}}
    image = {"image_processor_type": "Qwen2VLImageProcessor", **common}
    video = {"video_processor_type": _PROCESSORS[config.model_type], **common}
    (folder / "preprocessor_config.json").write_text(json.dumps(image))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video))


def _make(architecture: Architecture, folder: Path) -> None:
    config = make_config(architecture)
    train_tokenizer(VOCAB, POSITIONS).save_pretrained(folder)
    if config.model_type in _PROCESSORS:
        _write_processors(config, folder)
    if architecture.stand_in:
        config.save_pretrained(folder)
        _write_fields(folder, _as_given(architecture))
        # vLLM loads dummy weights, but the fingerprint needs a file.
        save_file({"stand_in": torch.zeros(1)}, folder / "model.safetensors")
        return
    loader = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = loader.from_config(config, dtype=torch.float32)
    fill_weights(model, config)
    if architecture.zeroed:
        for name, parameter in model.named_parameters():
            if architecture.zeroed in name:
                parameter.data.zero_()
    model.save_pretrained(folder)
    # transformers writes the name of its own class.
    _write_fields(folder, {"architectures": [architecture.model_class]})


def _write_fields(folder: Path, fields: Mapping[str, Any]) -> None:
    """Set fields of the checkpoint's config."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}, indent=1))


_GAINS = (
    (re.compile(r"(q|k|query|key|q_b|q_a|kv_a)_proj"), math.sqrt(2.0)),
    (re.compile(r"down_proj|fc2|fc_out|dense_4h_to_h"), 1.5),
    (re.compile(r"(^|\.)(gate|router|lm_head|embed_out)\."), 2.0),
)
"""Standard deviation of a projection's output for inputs of unit RMS; 1 for the others."""
_LAST_NORM = re.compile(
    r"(^|\.)(norm|final_layernorm|final_layer_norm|final_norm|norm_f|ln_f|embedding_norm)\.weight$"
)
_QUERY_KEY_NORM = re.compile(r"(q|k|query|key)_(layer)?norm")
_EMBEDDING = re.compile(r"embed_tokens|wte|embed_in\b|word_embeddings|tok_embeddings|embeddings\.weight")


@torch.no_grad()
def clear_unset(model: nn.Module) -> None:
    """Zero the vectors that vLLM's classes leave uninitialised until a checkpoint is loaded: biases of
    projections and of routers. The weights of norms are set when the class is made."""
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 and "norm" not in name and "ln_" not in name:
            parameter.zero_()


@torch.no_grad()
def fill_weights(model: nn.Module, config: PretrainedConfig) -> None:
    """Overwrite every parameter in place. The same names and shapes give the same values."""
    for name, parameter in model.named_parameters():
        seed = int.from_bytes(blake3.blake3(name.encode()).digest(8), "little") >> 1
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        parameter.copy_(_values(name, parameter, noise, config))


def _values(name: str, given: Tensor, noise: Tensor, config: PretrainedConfig) -> Tensor:
    """``given`` is what the class initialised the parameter to: 0 or 1 for the weights of a norm."""
    if given.ndim < 2:
        if _LAST_NORM.search(name) and not re.search(r"\.\d+\.", name):
            centre = given.mean()  # 0 where the norm multiplies by one plus the weight
            return noise.sign() * (1 + 0.1 * noise.abs()) - (1 - centre)
        if "norm" in name or "ln_" in name:
            contrast = math.sqrt(2.0) - 1 if _QUERY_KEY_NORM.search(name) else 0.0
            return given + contrast + 0.1 * noise
        return noise if "sinks" in name else given.nan_to_num() + 0.2 * noise
    if _EMBEDDING.search(name):
        # A tied head mostly repeats the current token, so scale up the layers' contribution.
        spread = 1.0 if config.get_text_config().tie_word_embeddings else math.sqrt(TINY["num_hidden_layers"])
        return noise * spread / _embedding_scale(config)
    gain = next((gain for pattern, gain in _GAINS if pattern.search(name)), 1.0)
    return noise * gain / math.sqrt(given.shape[-1])


def _embedding_scale(config: PretrainedConfig) -> float:
    """The factor by which the model multiplies embeddings."""
    if "gemma" in config.model_type:
        return math.sqrt(config.get_text_config().hidden_size)
    return float(getattr(config, "embedding_multiplier", None) or getattr(config, "scale_emb", None) or 1.0)
