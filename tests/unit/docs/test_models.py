"""The algebra in docs/MODELS.md, run against transformers' own Gated DeltaNet."""

from __future__ import annotations

import re
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kintsugi.core.layout import Codec, KVLayout, LayerGroup, Part, PartKind

PAGE = Path("docs/MODELS.md").read_text(encoding="utf-8")
PROSE = " ".join(PAGE.split())
TOKENS, KEY_WIDTH, VALUE_WIDTH = 23, 8, 5


@pytest.fixture(scope="module")
def algebra() -> dict[str, Any]:
    """The functions that the page defines."""
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    return names


@pytest.fixture(scope="module")
def inputs() -> dict[str, np.ndarray]:
    random = np.random.default_rng(5)
    key = random.normal(size=(TOKENS, KEY_WIDTH))
    return {
        "key": key / np.linalg.norm(key, axis=1, keepdims=True),
        "value": random.normal(size=(TOKENS, VALUE_WIDTH)),
        "alpha": random.uniform(0.6, 1.0, TOKENS),
        "beta": random.uniform(0.0, 1.0, TOKENS),
        "start": random.normal(size=(KEY_WIDTH, VALUE_WIDTH)),
    }


def state_of_transformers(inputs: dict[str, np.ndarray]) -> np.ndarray:
    """The state behind all tokens, one by one, as Qwen3-Next computes it."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    def heads(values: np.ndarray) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32)[None, :, None]

    _, state = torch_recurrent_gated_delta_rule(
        heads(inputs["key"]),
        heads(inputs["key"]),
        heads(inputs["value"]),
        g=heads(np.log(inputs["alpha"])),
        beta=heads(inputs["beta"]),
        initial_state=torch.tensor(inputs["start"], dtype=torch.float32)[None, None],
        output_final_state=True,
    )
    return state[0, 0].numpy()


def pair_of(algebra: dict[str, Any], inputs: dict[str, np.ndarray], first: int, end: int) -> Any:
    names = ("alpha", "beta", "key", "value")
    tokens = [algebra["of_token"](*(inputs[name][at] for name in names)) for at in range(first, end)]
    return reduce(algebra["join"], tokens)


def test_a_chunk_is_a_pair(algebra: dict[str, Any], inputs: dict[str, np.ndarray]) -> None:
    pair = pair_of(algebra, inputs, 0, TOKENS)
    state = algebra["end_state"](pair, inputs["start"])
    np.testing.assert_allclose(state, state_of_transformers(inputs), atol=1e-5)


def test_chunks_join_to_one_pair(algebra: dict[str, Any], inputs: dict[str, np.ndarray]) -> None:
    whole = pair_of(algebra, inputs, 0, TOKENS)
    chunks = [pair_of(algebra, inputs, first, end) for first, end in ((0, 7), (7, 20), (20, TOKENS))]
    for got, expected in zip(reduce(algebra["join"], chunks), whole, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-12)


def test_errors_do_not_grow(algebra: dict[str, Any], inputs: dict[str, np.ndarray]) -> None:
    factor, _ = pair_of(algebra, inputs, 0, TOKENS)
    assert np.linalg.norm(factor, 2) <= 1


def test_a_short_chunk_has_few_vectors(algebra: dict[str, Any], inputs: dict[str, np.ndarray]) -> None:
    """Both matrices, but for a multiple of the identity, are made from the same three keys."""
    factor, constant = pair_of(algebra, inputs, 0, 3)
    rest = factor - np.prod(inputs["alpha"][:3]) * np.eye(KEY_WIDTH)
    both = np.hstack([inputs["key"][:3].T, rest, constant])
    assert np.linalg.matrix_rank(both) == np.linalg.matrix_rank(rest) == 3


def test_sizes_are_those_of_qwen3_next() -> None:
    from transformers import Qwen3NextConfig

    config = Qwen3NextConfig()
    rows, columns = config.linear_key_head_dim, config.linear_value_head_dim
    pair = config.linear_num_value_heads * (rows**2 + rows * columns)
    token = 2 * config.num_key_value_heads * config.head_dim
    recurrent = config.layer_types.count("linear_attention")
    assert f"{pair:,} per layer" in PROSE
    assert f"as much as {pair // token:,} tokens" in PROSE
    assert f"{pair * recurrent / 1e6:.1f} million over its {recurrent} recurrent layers" in PROSE
    assert f"{2 * pair * recurrent / 1e6:.0f} MB in 16 bits" in PROSE
    assert f"up to {(rows**2 + rows * columns) // (2 * rows + columns)} tokens" in PROSE


def test_bytes_of_a_token_are_those_of_the_layouts() -> None:
    from transformers import Qwen3_5TextConfig, Qwen3NextConfig

    for config in (Qwen3NextConfig(), Qwen3_5TextConfig()):
        heads, width = config.linear_num_value_heads, config.linear_value_head_dim
        key = 2 * config.linear_num_key_heads * config.linear_key_head_dim
        inputs = (Part(PartKind.INPUT, key + heads * width), Part(PartKind.GATE, 2 * heads))
        kv = tuple(Part(kind, config.head_dim) for kind in (PartKind.K, PartKind.V))
        recurrent = config.layer_types.count("linear_attention")
        attending = config.num_hidden_layers - recurrent
        layout = KVLayout.of_groups(
            [LayerGroup(recurrent, 1, inputs), LayerGroup(attending, config.num_key_value_heads, kv)],
            "bfloat16",
        )
        raw, int8 = (layout.chunk_bytes(codec, 256) / 256 / 1e3 for codec in (Codec.RAW, Codec.INT8))
        assert re.search(rf"\({recurrent} .*{attending}.*\) \| {raw:.0f} KB \| {int8:.0f} KB", PAGE)
