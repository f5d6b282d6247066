"""The oracle against plain transformers, where blending is exact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig
from vllm.compilation.decorators import support_torch_compile

from tests.fakes.random_models.factory import make_checkpoint
from tests.fakes.random_models.shapes import TINY_SHAPES
from tests.oracle import Oracle, fresh_positions, load_model, measured_layers

PREFIX, CHUNK, QUESTION = 3, 230, 9
"""Longer than the windows of the shapes that have one."""


@pytest.fixture(scope="module", params=sorted(TINY_SHAPES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(TINY_SHAPES[request.param], tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


PROMPT = [0, *(2 + (17 * i * i + 5 * i) % 900 for i in range(PREFIX + CHUNK + QUESTION))]
CONTINUATION = [5, 77, 400]


def test_with_everything_fresh_it_is_the_plain_model(folder: Path, oracle: Oracle) -> None:
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        logits = plain(torch.tensor([PROMPT + CONTINUATION]), use_cache=False).logits[0]
    expected = logits[len(PROMPT) - 1 :].log_softmax(-1)
    everything = dict.fromkeys(range(oracle.num_layers), range(len(PROMPT) - 1))
    hits = [(20, 60), (90, 131)]
    answer = oracle.blended(PROMPT, PROMPT[:PREFIX], hits, everything, continuation=CONTINUATION)
    assert answer.logprobs.shape == expected.shape
    assert float((answer.logprobs - expected).abs().max()) <= 1e-5
    assert torch.equal(answer.logprobs, oracle.full(PROMPT, CONTINUATION).logprobs)


def test_a_chunk_behind_its_own_prefix_is_exact(oracle: Oracle) -> None:
    hit = (PREFIX, PREFIX + CHUNK)
    others = [p for p in range(len(PROMPT) - 1) if not hit[0] <= p < hit[1]]
    answer = oracle.blended(PROMPT, PROMPT[:PREFIX], [hit], dict.fromkeys(range(oracle.num_layers), others))
    assert float((answer.logprobs - oracle.full(PROMPT).logprobs).abs().max()) <= 1e-4
    for deviation in (*answer.key_deviation.values(), *answer.value_deviation.values()):
        assert float(deviation.max()) <= 1e-6


def test_a_moved_chunk_is_approximate_and_exact_at_layer_0(oracle: Oracle) -> None:
    hits = [(60, 120), (120, 121), (121, 180)]
    others = [p for p in range(len(PROMPT) - 1) if not 60 <= p < 180]
    reused = dict.fromkeys(range(oracle.num_layers), others)
    answer = oracle.blended(PROMPT, PROMPT[:PREFIX], hits, reused)
    full = oracle.full(PROMPT).logprobs
    assert float(answer.key_deviation[0].max()) <= 1e-6
    assert float(answer.value_deviation[1].max()) > 1e-3
    assert float((answer.logprobs - full).abs().max()) > 1e-3
    # Two full-width layers change the answer, though not what was cached.
    nearly = {**reused, 0: range(len(PROMPT) - 1), 1: range(len(PROMPT) - 1)}
    better = oracle.blended(PROMPT, PROMPT[:PREFIX], hits, nearly)
    assert float(better.value_deviation[1].max()) > 1e-3
    assert not torch.equal(better.logprobs, answer.logprobs)


def test_what_is_attended_to(folder: Path, oracle: Oracle) -> None:
    """A chunk behind its own prefix has exact KV: the oracle attends to what the plain model does."""
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        attentions = plain(torch.tensor([PROMPT]), use_cache=False, output_attentions=True).attentions
    hit = range(PREFIX, PREFIX + CHUNK)
    expected = torch.zeros(len(PROMPT))
    for layer in (0, 2):
        weights = attentions[layer][0, :, hit.stop :].clone()
        weights[..., : hit.start] = 0
        expected += (weights / weights.sum(-1, keepdim=True)).sum((0, 1))
    got = oracle.attended(PROMPT, PROMPT[:PREFIX], [(hit.start, hit.stop)], [0, 2])
    assert torch.allclose(got[hit.start : hit.stop], expected[hit.start : hit.stop], atol=1e-4)
    assert float(got[: hit.start].abs().sum() + got[hit.stop :].abs().sum()) == 0


def test_bfloat16(folder: Path) -> None:
    oracle = Oracle(folder, torch.bfloat16)
    others = [p for p in range(len(PROMPT) - 1) if not PREFIX <= p < PREFIX + 40]
    active = dict.fromkeys(range(oracle.num_layers), others)
    answer = oracle.blended(PROMPT, PROMPT[:PREFIX], [(PREFIX, PREFIX + 40)], active)
    assert answer.logprobs.dtype == torch.float32
    assert float((answer.logprobs - oracle.full(PROMPT).logprobs).abs().mean()) < 0.1


def test_what_is_fresh() -> None:
    active = {0: [0, 1, 2, 3], 1: [0, 2, 3], 2: [2, 3]}
    assert fresh_positions(active, (), range(5)) == {0: {0, 1, 2, 3}, 1: {0, 2, 3}, 2: {2, 3}}
    assert fresh_positions(active, [1, 2], range(5)) == {0: {0, 1, 2, 3}, 1: {0, 1, 2, 3}, 2: {0, 2, 3}}
    assert fresh_positions(active, [0], range(5))[0] == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
    ("selector", "ratio", "expected"),
    [
        ("hkvd", 0.15, [1]),
        ("hkvd_gradual", 0.15, [1, 2, 3]),
        ("random", 0.15, []),
        ("chunk_head", 0.15, []),
        ("query", 0.15, []),
        ("hybrid", 0.15, [1]),
        ("hkvd", 0.0, []),
        ("hkvd_gradual", 1.0, []),
    ],
)
def test_measured_layers(selector: str, ratio: float, expected: list[int]) -> None:
    assert list(measured_layers(selector, 1, ratio, 4)) == expected
    assert list(measured_layers("hkvd", 9, 0.5, 4)) == [3]


@support_torch_compile(dynamic_arg_dims={"x": 0})
class ChangedByVllm(nn.Module):
    """As vLLM leaves the class of a decoder that it has run through transformers."""

    def __init__(self, scale: int) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale

    @classmethod
    def from_pretrained(cls, folder: Path, scale: int) -> ChangedByVllm:
        return cls(scale)


def test_a_class_that_vllm_has_changed_can_be_made_and_runs_as_written(tmp_path: Path) -> None:
    LlamaConfig().save_pretrained(tmp_path)
    with pytest.raises(AssertionError, match="Current vLLM config is not set"):
        ChangedByVllm.from_pretrained(tmp_path, 3)
    model = load_model(ChangedByVllm, tmp_path, scale=3)
    assert torch.equal(model(torch.ones(2)), torch.full((2,), 3.0))
    assert model.do_not_compile
