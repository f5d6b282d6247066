"""What a recipe decides: the architecture, where its heads begin, and every weight of the model."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.testbed.evaluate import project
from benchmarks.testbed.export import config_of
from benchmarks.testbed.generator import Shape
from benchmarks.testbed.model import LOCAL_HEADS, TinyModel, initialise, rotate, rotation
from benchmarks.testbed.recipes import RECIPES, Rates, Recipe, Stage
from benchmarks.testbed.train import train

STEPS = (Stage(2, 112, 2, Shape((2, 3), (1, 2), (0, 1))),)


def test_the_second_family_is_another_architecture() -> None:
    llama, qwen3 = (config_of(RECIPES[name].shape) for name in ("llama", "qwen3"))
    assert (llama["architectures"], qwen3["architectures"]) == (["LlamaForCausalLM"], ["Qwen3ForCausalLM"])
    assert (llama["model_type"], qwen3["model_type"]) == ("llama", "qwen3")
    ratios = [int(str(c["num_attention_heads"])) / int(str(c["num_key_value_heads"])) for c in (llama, qwen3)]
    assert ratios == [2, 4]
    assert llama["rope_parameters"] != qwen3["rope_parameters"]
    norms = [
        sum("self_attn.k_norm" in name for name in TinyModel(RECIPES[family].shape).state_dict())
        for family in ("llama", "qwen3")
    ]
    assert norms == [0, RECIPES["qwen3"].shape.num_hidden_layers]


@pytest.mark.parametrize("family", sorted(RECIPES))
def test_some_heads_begin_by_looking_back(family: str) -> None:
    shape = RECIPES[family].shape
    model = TinyModel(shape)
    initialise(model, 1)
    tokens = torch.arange(300, 340)
    with torch.no_grad():
        queries, keys, _ = project(model.decoder_layers()[0], model.model.embed_tokens(tokens))
    cos, sin = rotation(shape, torch.arange(len(tokens)))
    keys = rotate(keys, cos, sin).repeat_interleave(len(queries) // len(keys), dim=0)
    scores = rotate(queries, cos, sin) @ keys.transpose(1, 2) / math.sqrt(shape.head_dim)
    for head, back in LOCAL_HEADS:
        looks = scores[head, -1].softmax(-1)
        assert int(looks.argmax()) == len(tokens) - 1 - back
        assert float(looks.max()) > 0.7


@pytest.mark.parametrize("family", sorted(RECIPES))
def test_the_seed_decides_the_weights(family: str, tmp_path: Path) -> None:
    shape = replace(RECIPES[family].shape, intermediate_size=96, num_hidden_layers=6)
    recipe = Recipe(shape, STEPS, Rates(muon=0.012))
    states = []
    for number, one in enumerate((recipe, recipe, replace(recipe, seed=2))):
        train(tmp_path / str(number), one)
        states.append(torch.load(tmp_path / str(number) / "state.pt", weights_only=True)["model"])
    first, again, other = states
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    begun = TinyModel(shape)
    initialise(begun, recipe.seed)
    trained = [name for name, weight in begun.state_dict().items() if not torch.equal(weight, first[name])]
    assert trained == list(first)


def test_a_digest_names_the_whole_recipe() -> None:
    recipe = RECIPES["qwen3"]
    others = [
        replace(recipe, seed=2),
        replace(recipe, rates=replace(recipe.rates, muon=0.02)),
        replace(recipe, stages=recipe.stages[1:]),
        replace(recipe, shape=replace(recipe.shape, rope_theta=1e6)),
    ]
    assert replace(recipe).digest == recipe.digest
    assert len({one.digest for one in (recipe, *others)}) == 5
