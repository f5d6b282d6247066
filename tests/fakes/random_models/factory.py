"""Creates checkpoints with random weights that transformers and vLLM load like any other."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from kintsugi.models.cache import cache_folder, make_folder_once
from tests.fakes.random_models.shapes import ModelShape, find_shape
from tests.fakes.random_models.vocabulary import BOS_ID, EOS_ID, train_tokenizer
from tests.fakes.random_models.weights import WeightTraits, fill_weights

RECIPE = 2
"""Increase this when the same shape and seed produce other weights, so that cached checkpoints are not
used."""


def make_checkpoint(shape: ModelShape, folder: Path, seed: int = 0) -> Path:
    """Write config, weights (safetensors) and tokenizer of a random model into `folder`, and return `folder`.

    The same shape and seed produce the same bytes. Memory: one copy of the weights.
    """
    config = shape.config(bos_token_id=BOS_ID, eos_token_id=EOS_ID)
    return _make(config, getattr(torch, shape.dtype), WeightTraits.of_shape(shape), folder, seed)


def make_checkpoint_of(config: PretrainedConfig, folder: Path, seed: int = 0) -> Path:
    """Like `make_checkpoint`, with float32 weights, for the config of any decoder that transformers knows.
    The ids of its special tokens are set to the tokenizer's."""
    config.bos_token_id, config.eos_token_id, config.pad_token_id = BOS_ID, EOS_ID, EOS_ID
    return _make(config, torch.float32, WeightTraits.of_config(config), folder, seed)


def _make(
    config: PretrainedConfig, dtype: torch.dtype, traits: WeightTraits, folder: Path, seed: int
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    model = _empty_model(config, dtype)
    fill_weights(model, traits, seed)
    model.generation_config = GenerationConfig(
        bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=EOS_ID, do_sample=False
    )
    model.save_pretrained(folder)
    text = config.get_text_config()
    train_tokenizer(text.vocab_size, text.max_position_embeddings).save_pretrained(folder)
    return folder


def _empty_model(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Allocate a model without initialising it, because every parameter will be overwritten."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model = model.to_empty(device="cpu")
    model.tie_weights()  # `to_empty` separates tied weights
    return model


def make_checkpoint_once(name: str, seed: int = 0, layers: int | None = None) -> Path:
    """Return the checkpoint of the shape called `name`. It is created on first use.

    ``layers`` overrides the shape's number of layers. Several processes may call this at the same time.
    Raises `InvalidField` for an unknown name, and as `make_folder_once` does.
    """
    shape = find_shape(name)
    if layers is not None:
        shape = dataclasses.replace(shape, layers=layers)
    final = cache_folder() / "checkpoints" / f"{name}-{shape.layers}l-seed{seed}-r{RECIPE}"
    return make_folder_once(final, lambda draft: make_checkpoint(shape, draft, seed))
