"""Attention over latents, against the same attention over the K and V that follow from them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kintsugi.fusor import latent
from kintsugi.fusor.latent import absorb_query, attend_to_latents

HEADS, NOPE, ROTARY, RANK, WIDTH = 3, 8, 4, 16, 6
SCALE = 0.3


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


W_UK, W_UV = random(HEADS, NOPE, RANK, seed=1), random(HEADS, RANK, WIDTH, seed=2)


def expanded(query: Tensor, cached: Tensor, positions: Tensor) -> Tensor:
    """Each head's own K and V, one query at a time."""
    keys = torch.einsum("tr,hpr->thp", cached[:, :RANK], W_UK)
    values = torch.einsum("tr,hrv->thv", cached[:, :RANK], W_UV)
    output = torch.zeros(len(query), HEADS, WIDTH)
    for row, position in enumerate(positions.tolist()):
        for head in range(HEADS):
            seen = slice(0, position + 1)
            key = torch.cat((keys[seen, head], cached[seen, RANK:]), -1)
            weights = (key @ query[row, head] * SCALE).softmax(0)
            output[row, head] = weights @ values[seen, head]
    return output


@pytest.mark.parametrize("logits_max", [1, 50, 1 << 23])
def test_latents_stand_for_the_k_and_v_of_every_head(
    monkeypatch: pytest.MonkeyPatch, logits_max: int
) -> None:
    monkeypatch.setattr(latent, "LOGITS_MAX", logits_max)
    positions = torch.tensor([0, 3, 4, 9])
    query, cached = random(4, HEADS, NOPE + ROTARY, seed=3), random(10, RANK + ROTARY, seed=4)
    got = attend_to_latents(query, cached, positions, W_UK, W_UV, SCALE)
    torch.testing.assert_close(got, expanded(query, cached, positions))


def test_later_tokens_are_not_seen() -> None:
    query, cached = random(1, HEADS, NOPE + ROTARY, seed=3), random(10, RANK + ROTARY, seed=4)
    other = cached.clone()
    other[6:] = 1e3
    one, two = (
        attend_to_latents(query, context, torch.tensor([5]), W_UK, W_UV, SCALE) for context in (cached, other)
    )
    assert torch.equal(one, two)


def test_an_absorbed_query_meets_the_rotary_key_and_then_the_latent() -> None:
    query, cached = random(2, HEADS, NOPE + ROTARY, seed=5), random(7, RANK + ROTARY, seed=6)
    keys = torch.einsum("tr,hpr->thp", cached[:, :RANK], W_UK)
    rotary = cached[:, None, RANK:].expand(-1, HEADS, -1)
    expected = torch.einsum("nhd,thd->nht", query, torch.cat((keys, rotary), -1))
    side_by_side = torch.cat((cached[:, RANK:], cached[:, :RANK]), -1)
    torch.testing.assert_close(absorb_query(query, W_UK) @ side_by_side.T, expected)
