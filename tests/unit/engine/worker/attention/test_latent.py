"""Latent attention as vLLM calls and keeps it, and our attention in its place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kintsugi.engine.worker.attention.latent import LatentRows, needs_rows, replace_latent_attention
from kintsugi.engine.worker.model import HeadsKV, LatentKV, kv_of
from kintsugi.engine.worker.stack import _reads_cache
from kintsugi.fusor.latent import absorb_query, attend_to_latents

HEADS, NOPE, ROTARY, RANK, WIDTH = 3, 8, 4, 16, 6


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class MLAAttention(torch.nn.Module):
    """The attributes of vLLM's that count here."""

    def __init__(self) -> None:
        super().__init__()
        self.num_kv_heads, self.head_size = 1, RANK + ROTARY
        self.kv_lora_rank, self.qk_rope_head_dim, self.qk_nope_head_dim = RANK, ROTARY, NOPE
        self.kv_cache_dtype, self._k_scale = "auto", torch.ones(())
        self.kv_cache = torch.zeros(4, 2, RANK + ROTARY)
        self.W_UK_T, self.W_UV = random(HEADS, NOPE, RANK, seed=1), random(HEADS, RANK, WIDTH, seed=2)
        self.impl: Any = SimpleNamespace(scale=0.3, do_kv_cache_update=self._write)
        self.attn_backend = SimpleNamespace(get_name=lambda: "CPU_MLA")

    def _write(
        self, latent: Tensor, key: Tensor, cache: Tensor, slots: Tensor, dtype: str, scale: Tensor
    ) -> None:
        assert dtype == "auto"
        cache.view(-1, RANK + ROTARY)[slots] = torch.cat((latent, key.squeeze(1)), -1)

    def forward_impl(self, *_: Any, **__: Any) -> Tensor:
        raise AssertionError("vLLM's own")


def test_a_latent_takes_the_place_of_v_and_its_rotary_key_that_of_k() -> None:
    kv = kv_of(MLAAttention())
    assert isinstance(kv, LatentKV)
    assert (kv.heads, kv.key_width, kv.value_width) == (1, ROTARY, RANK)
    query, latent, rotary = random(5, HEADS, NOPE + ROTARY), random(5, RANK), random(5, 1, ROTARY)
    got = kv.tell_apart(query, latent, rotary)
    assert [tuple(one.shape) for one in got] == [(5, HEADS, NOPE + ROTARY), (5, 1, ROTARY), (5, 1, RANK)]
    assert torch.equal(got[1], rotary)
    assert torch.equal(got[2][:, 0], latent)


def test_plain_attention_stores_k_and_v() -> None:
    attention: Any = SimpleNamespace(num_kv_heads=2, head_size=4, head_size_v=6)
    kv = kv_of(attention)
    assert type(kv) is HeadsKV
    query, key, value = kv.tell_apart(random(5, 16), random(5, 8), random(5, 12))
    assert [tuple(one.shape) for one in (query, key, value)] == [(5, 4, 4), (5, 2, 4), (5, 2, 6)]


def test_what_is_written_is_latent_before_rotary_key() -> None:
    attention = MLAAttention()
    key, value = random(2, 1, ROTARY), random(2, 1, RANK)
    kv = kv_of(attention)
    assert isinstance(kv, LatentKV)
    kv.write(torch.tensor([3, 6]), key, value)
    written = attention.kv_cache.view(-1, RANK + ROTARY)[[3, 6]]
    assert torch.equal(written, torch.cat((value[:, 0], key[:, 0]), -1))


def test_queries_are_absorbed_by_vllm_s_weights() -> None:
    attention, query = MLAAttention(), random(5, HEADS, NOPE + ROTARY)
    kv = kv_of(attention)
    assert isinstance(kv, LatentKV)
    assert torch.equal(kv.absorb(query), absorb_query(query, attention.W_UK_T))


def test_each_sequence_attends_to_its_own_latents() -> None:
    attention = MLAAttention()
    attention.kv_cache.copy_(random(4, 2, RANK + ROTARY, seed=3))
    flat = attention.kv_cache.view(-1, RANK + ROTARY)
    query = random(5, HEADS, NOPE + ROTARY, seed=4)
    one, two = torch.tensor([4, 5, 1]), torch.tensor([2, 7])
    sequences = [
        LatentRows(slice(0, 3), torch.tensor([0, 1, 2]), one),
        LatentRows(slice(3, 5), torch.tensor([0, 1]), two),
    ]
    output = torch.zeros(5, HEADS * WIDTH)
    with replace_latent_attention(attention, sequences):
        attention.forward_impl(
            query, random(5, RANK), random(5, 1, ROTARY), attention.kv_cache, None, output=output
        )
    for sequence in sequences:
        arguments = (query[sequence.rows], flat[sequence.slots], sequence.places)
        expected = attend_to_latents(*arguments, attention.W_UK_T, attention.W_UV, 0.3)
        assert torch.equal(output[sequence.rows], expected.flatten(1))
    with pytest.raises(AssertionError, match="vLLM's own"):
        attention.forward_impl()


def test_only_the_backend_that_prefills_from_the_first_token_needs_ours() -> None:
    attention = MLAAttention()
    assert needs_rows(attention)
    attention.attn_backend = SimpleNamespace(get_name=lambda: "AMX_MLA")
    assert not needs_rows(attention)


@pytest.mark.parametrize(
    ("positions", "owners", "reads"),
    [
        ([0, 1, 2], [0, 0, 0], False),
        ([0, 1, 0, 1], [0, 0, 1, 1], False),
        ([7], [0], False),
        ([3, 5, 9], [0, 0, 0], False),
        ([5, 6], [0, 0], True),
        ([0, 1, 4], [0, 0, 0], True),
        ([0, 1, 2, 3], [0, 0, 1, 1], True),
    ],
)
def test_a_prefill_behind_cached_tokens_is_told(positions: list[int], owners: list[int], reads: bool) -> None:
    assert _reads_cache(torch.tensor(positions), torch.tensor(owners)) is reads
