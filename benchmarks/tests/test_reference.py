"""The matrix's reference says what the oracle of the tests says, where both know the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, MptConfig, PretrainedConfig

from benchmarks.support.architectures.reference import Reference
from benchmarks.support.prompts import PREFIX, ChunkPrompt
from kintsugi.core.errors import InvalidField
from tests.fakes.random_models.factory import make_checkpoint_once
from tests.oracle import Oracle

PROMPT = ChunkPrompt.make((33, 70, 41), question=9, seed=3)
HITS = [(span.start, span.end) for span in PROMPT.spans]
LAST = len(PROMPT.token_ids) - 1


def active_positions(layers: int) -> Mapping[int, list[int]]:
    """Fewer in deeper layers; the question in all."""
    question = range(HITS[-1][1], LAST)
    return {layer: [*range(40, 90, 3 + layer), *question] for layer in range(layers)}


@pytest.mark.parametrize("shape", ["tiny-llama", "tiny-yarn", "tiny-gemma3"])
def test_the_reference_agrees_with_the_oracle(shape: str) -> None:
    folder = make_checkpoint_once(shape)
    oracle, reference = Oracle(folder), Reference(folder)
    active = active_positions(oracle.num_layers)
    expected = oracle.blended(PROMPT.token_ids, PREFIX, HITS, active).logprobs[0]
    got = reference.blended(PROMPT.token_ids, PREFIX, HITS, active)
    full = reference.full(PROMPT.token_ids)
    assert torch.allclose(got, expected, atol=1e-4)
    assert torch.allclose(full, oracle.full(PROMPT.token_ids).logprobs[0], atol=1e-4)
    assert float((got - full).abs().max()) > 0.1, "else this would compare full prefill with itself"


def test_what_is_all_recomputed_is_a_full_prefill() -> None:
    reference = Reference(make_checkpoint_once("tiny-llama"))
    active = {layer: range(LAST) for layer in range(4)}
    got = reference.blended(PROMPT.token_ids, PREFIX, HITS, active)
    assert torch.allclose(got, reference.full(PROMPT.token_ids), atol=1e-5)


def test_it_reads_other_fields_than_the_checkpoint_says() -> None:
    """As where vLLM's class and transformers' count a window differently."""
    folder = make_checkpoint_once("tiny-mistral-window")
    own, other = (
        Reference(folder, **fields).full(PROMPT.token_ids) for fields in ({}, {"sliding_window": 2})
    )
    assert float((own - other).abs().max()) > 1e-3


def saved(config: PretrainedConfig, folder: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def test_bloom_attends_to_what_the_reference_puts_there(tmp_path: Path) -> None:
    config = BloomConfig(vocab_size=1024, hidden_size=64, n_layer=3, n_head=4, initializer_range=0.5)
    reference = Reference(saved(config, tmp_path))
    full = reference.full(PROMPT.token_ids)
    every = {layer: range(LAST) for layer in range(3)}
    recomputed = reference.blended(PROMPT.token_ids, PREFIX, HITS, every)
    reused = reference.blended(PROMPT.token_ids, PREFIX, HITS, active_positions(3))
    assert torch.allclose(recomputed, full, atol=1e-5)
    assert float((reused - full).abs().max()) > 0.1


def test_a_model_without_the_attention_interface_has_no_reference(tmp_path: Path) -> None:
    config = MptConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=2, max_seq_len=64)
    with pytest.raises(InvalidField, match="mpt attends without the attention interface"):
        Reference(saved(config, tmp_path))
