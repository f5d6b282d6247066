"""Rotation of stored keys against transformers' own, and against the formula in complex numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from kintsugi.fusor.rope import Rotary, measure_rotary

HEADS, HEAD_DIM, POSITIONS = 2, 32, 6000
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10_000.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 2048,
    },
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0},
}


def transformers_rope(kind: str) -> LlamaRotaryEmbedding:
    config = LlamaConfig(
        hidden_size=HEADS * HEAD_DIM,
        num_attention_heads=HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=8192,
        rope_parameters=KINDS[kind],
    )
    return LlamaRotaryEmbedding(config)


def table_of(rope: LlamaRotaryEmbedding) -> Tensor:
    """As vLLM keeps it: cosines, then sines, with whatever the scaling multiplies them by."""
    angles = torch.arange(POSITIONS).float()[:, None] * rope.inv_freq
    scaling = float(rope.attention_scaling)
    return torch.cat((angles.cos() * scaling, angles.sin() * scaling), -1)


def keys_and_positions(count: int = 50, seed: int = 1, head_dim: int = HEAD_DIM) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(count, HEADS, head_dim, generator=generator)
    return keys, torch.randint(0, POSITIONS, (count,), generator=generator)


def turned(keys: Tensor, positions: Tensor, base: float, neox: bool, rotary_dim: int) -> Tensor:
    """RoPE as multiplication by complex numbers, in fp64."""
    half = rotary_dim // 2
    angles = positions.double()[:, None] * base ** (-torch.arange(half).double() / half)
    part = keys[..., :rotary_dim].double()
    real, imaginary = (part[..., :half], part[..., half:]) if neox else (part[..., 0::2], part[..., 1::2])
    result = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angles), angles)[:, None]
    pairs = (result.real, result.imag)
    rotated = torch.cat(pairs, -1) if neox else torch.stack(pairs, -1).flatten(-2)
    return torch.cat((rotated, keys[..., rotary_dim:].double()), -1)


def plain_table(base: float, rotary_dim: int, scale: float = 1.0) -> Tensor:
    half = rotary_dim // 2
    angles = torch.arange(POSITIONS).double()[:, None] * base ** (-torch.arange(half).double() / half)
    return (torch.cat((angles.cos(), angles.sin()), -1) * scale).float()


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_it_turns_as_transformers_does(kind: str) -> None:
    rope = transformers_rope(kind)
    keys, positions = keys_and_positions()
    cos, sin = rope(keys, positions[None])
    heads_first = keys.transpose(0, 1)[None]
    expected, _ = apply_rotary_pos_emb(heads_first, heads_first, cos, sin)
    got = Rotary.from_table(table_of(rope), is_neox=True).rotate(keys, positions)
    assert torch.allclose(got, expected[0].transpose(0, 1), atol=2e-6, rtol=1e-5)


def test_yarn_scales_by_what_its_table_holds() -> None:
    rope = transformers_rope("yarn")
    assert rope.attention_scaling > 1.1
    keys, positions = keys_and_positions()
    got = Rotary.from_table(table_of(rope), is_neox=True).rotate(keys, positions)
    assert torch.allclose(got.norm(dim=-1), keys.norm(dim=-1) * rope.attention_scaling, rtol=1e-5)


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("rotary_dim", [2, 16, 32])
def test_partial_and_interleaved_against_complex_numbers(neox: bool, rotary_dim: int) -> None:
    keys, positions = keys_and_positions()
    rotary = Rotary.from_table(plain_table(10_000.0, rotary_dim), is_neox=neox)
    assert rotary.rotary_dim == rotary_dim
    before = keys.clone()
    got = rotary.rotate(keys, positions)
    assert torch.equal(keys, before)
    assert torch.equal(got[..., rotary_dim:], keys[..., rotary_dim:])
    expected = turned(keys, positions, 10_000.0, neox, rotary_dim)
    assert torch.allclose(got.double(), expected, atol=1e-5, rtol=0)


@settings(max_examples=50, deadline=None)
@given(
    here=st.integers(0, POSITIONS // 2 - 1),
    further=st.integers(0, POSITIONS // 2 - 1),
    neox=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_two_turns_are_one(here: int, further: int, neox: bool, seed: int) -> None:
    keys, _ = keys_and_positions(3, seed)
    rotary = Rotary.from_table(plain_table(10_000.0, HEAD_DIM), is_neox=neox)
    first, second, both = (torch.full((3,), p) for p in (here, further, here + further))
    once = rotary.rotate(keys, both)
    assert torch.allclose(rotary.rotate(rotary.rotate(keys, first), second), once, atol=1e-4, rtol=0)


def test_position_0_leaves_keys_as_they_are() -> None:
    keys, _ = keys_and_positions(4)
    rotary = Rotary.from_table(plain_table(10_000.0, HEAD_DIM), is_neox=True)
    assert torch.equal(rotary.rotate(keys, torch.zeros(4, dtype=torch.int64)), keys)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, POSITIONS - 1), min_size=1, max_size=20))
def test_each_token_reads_its_own_table_row(places: list[int]) -> None:
    keys, _ = keys_and_positions(len(places))
    table = plain_table(10_000.0, HEAD_DIM)
    whole = Rotary.from_table(table, is_neox=True).rotate(keys, torch.tensor(places))
    for row, place in enumerate(places):
        one_row = Rotary.from_table(table[place : place + 1], is_neox=True)
        alone = one_row.rotate(keys[row : row + 1], torch.zeros(1, dtype=torch.int64))
        assert torch.equal(alone[0], whole[row])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtype_is_kept_and_rounded_once(dtype: torch.dtype) -> None:
    """The result is the fp32 rotation, rounded: not a rotation in 16 bits."""
    keys, positions = keys_and_positions()
    rotary = Rotary.from_table(plain_table(10_000.0, HEAD_DIM), is_neox=True)
    low = keys.to(dtype)
    got = rotary.rotate(low, positions)
    assert got.dtype == dtype
    assert torch.equal(got, rotary.rotate(low.float(), positions).to(dtype))


def test_a_table_in_16_bits_is_read_in_fp32() -> None:
    table = plain_table(10_000.0, HEAD_DIM).to(torch.bfloat16)
    rotary = Rotary.from_table(table, is_neox=True)
    assert rotary.cos.dtype == rotary.sin.dtype == torch.float32
    assert torch.equal(rotary.cos, table[:, : HEAD_DIM // 2].float())


def test_any_layout_of_the_keys_and_none_at_all() -> None:
    keys, positions = keys_and_positions()
    rotary = Rotary.from_table(plain_table(10_000.0, 16), is_neox=False)
    strided = keys.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(rotary.rotate(strided, positions), rotary.rotate(keys, positions))
    assert rotary.rotate(keys[:0], positions[:0]).shape == (0, HEADS, HEAD_DIM)


def rotations() -> dict[str, Rotary]:
    table = table_of(transformers_rope("yarn"))
    return {
        "halves": Rotary.from_table(table, is_neox=True),
        "neighbours": Rotary.from_table(table, is_neox=False),
        "a quarter, halves": Rotary(table[:, :4].contiguous(), table[:, 16:20].contiguous(), True),
        "a quarter, neighbours": Rotary(table[:, :4].contiguous(), table[:, 16:20].contiguous(), False),
        "one pair": Rotary(table[:, :1].contiguous(), table[:, 16:17].contiguous(), True),
    }


@pytest.mark.parametrize("kind", rotations())
def test_a_rotation_is_taken_off_again(kind: str) -> None:
    rotary = rotations()[kind]
    keys, positions = keys_and_positions()
    assert torch.allclose(rotary.unrotate(rotary.rotate(keys, positions), positions), keys, atol=1e-5)


@pytest.mark.parametrize("kind", rotations())
def test_a_rotation_is_measured_from_what_it_does(kind: str) -> None:
    rotary = rotations()[kind]
    measured = measure_rotary(rotary.rotate, HEAD_DIM, POSITIONS, torch.zeros(1))
    assert measured is not None
    assert measured.rotary_dim == rotary.rotary_dim
    assert torch.equal(measured.cos, rotary.cos)
    assert torch.equal(measured.sin, rotary.sin)
    keys, positions = keys_and_positions()
    assert torch.equal(measured.rotate(keys, positions), rotary.rotate(keys, positions))


def test_what_is_no_rotation_is_not_measured() -> None:
    assert measure_rotary(lambda keys, _: keys, HEAD_DIM, POSITIONS, torch.zeros(1)) is None
    mixing = torch.randn(HEAD_DIM, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    assert measure_rotary(lambda keys, _: keys @ mixing, HEAD_DIM, POSITIONS, torch.zeros(1)) is None
