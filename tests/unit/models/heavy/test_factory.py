"""Random checkpoints: every shape loads and says something, the same seed gives the same bytes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kintsugi.core.errors import InvalidField
from kintsugi.models.cache import cache_folder
from kintsugi.models.passages import read_bundled_passages
from tests.fakes.random_models import factory
from tests.fakes.random_models.factory import make_checkpoint, make_checkpoint_of, make_checkpoint_once
from tests.fakes.random_models.shapes import SHAPES, TINY_SHAPES, find_shape
from tests.model_configs import FAMILIES, SEEDS, config_of


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KINTSUGI_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", TINY_SHAPES)
def test_a_tiny_shape_loads_and_generates(name: str, tmp_path: Path) -> None:
    shape = TINY_SHAPES[name]
    folder = make_checkpoint(shape, tmp_path / name)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.model_type == shape.architecture.value
    assert json.loads((folder / "config.json").read_text())["architectures"] == [type(model).__name__]
    inputs = tokenizer(read_bundled_passages()[0].text, return_tensors="pt")
    assert inputs.input_ids[0, 0] == tokenizer.bos_token_id
    generated = model.generate(**inputs, max_new_tokens=32)[0, inputs.input_ids.shape[1] :]
    assert len(generated) == 32, "greedy decoding must not stop by chance"
    assert len(set(generated.tolist())) >= 8, "greedy decoding must not collapse"


@pytest.mark.parametrize("name", FAMILIES)
def test_any_config_becomes_a_checkpoint_that_generates(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint_of(config_of(name), tmp_path / name, SEEDS.get(name, 0))
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = torch.arange(3, 63)[None] * 7 % 1000
    generated = model.generate(prompt, max_new_tokens=24, do_sample=False, eos_token_id=None)[0, 60:]
    assert len(set(generated.tolist())) >= 5, "greedy decoding must not collapse"


def test_attention_is_neither_uniform_nor_a_copy(tmp_path: Path) -> None:
    folder = make_checkpoint(find_shape("tiny-llama"), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(read_bundled_passages()[1].text, return_tensors="pt")
    with torch.no_grad():
        attentions = model(**inputs, output_attentions=True).attentions
    last_rows = torch.stack([layer[0, :, -1] for layer in attentions])
    effective = (-(last_rows * last_rows.clamp_min(1e-30).log()).sum(-1)).exp().mean()
    tokens = inputs.input_ids.shape[1]
    assert 2 < effective < tokens / 4, f"attention spreads over {effective:.0f} of {tokens} tokens"


def test_the_seed_decides_the_bytes(tmp_path: Path) -> None:
    shape = find_shape("tiny-llama")
    first, again, other = (
        make_checkpoint(shape, tmp_path / name, seed) for name, seed in (("a", 7), ("b", 7), ("c", 8))
    )
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in again.iterdir())
    for name in names:
        assert (first / name).read_bytes() == (again / name).read_bytes(), name
    assert (first / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()
    assert (first / "tokenizer.json").read_bytes() == (other / "tokenizer.json").read_bytes()


def test_a_layer_does_not_depend_on_how_many_there_are(tmp_path: Path) -> None:
    shape = find_shape("tiny-llama")
    short, long = (
        AutoModelForCausalLM.from_pretrained(make_checkpoint(replace(shape, layers=n), tmp_path / str(n)))
        for n in (1, 2)
    )
    torch.testing.assert_close(short.model.layers[0].state_dict(), long.model.layers[0].state_dict())


def test_a_cached_checkpoint_is_made_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make_checkpoint_once("tiny-llama", layers=1)
    assert first.is_relative_to(cache)
    monkeypatch.setattr(factory, "make_checkpoint", _must_not_run)
    assert make_checkpoint_once("tiny-llama", layers=1) == first


def _must_not_run(*_: object) -> Path:
    raise AssertionError("made a checkpoint that was cached")


def test_the_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KINTSUGI_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/kintsugi")


def test_bad_shapes_are_refused() -> None:
    with pytest.raises(InvalidField, match="tiny-llama"):
        find_shape("tiny-lama")
    with pytest.raises(InvalidField, match="layers"):
        replace(find_shape("tiny-llama"), layers=0)


def test_the_benchmark_model_has_210_million_parameters() -> None:
    model = factory._empty_model(SHAPES["llama-210m"].config(1, 2), torch.bfloat16)
    assert 205e6 < sum(parameter.numel() for parameter in model.parameters()) < 215e6
