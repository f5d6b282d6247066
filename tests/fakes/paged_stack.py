"""Llama's decoder layers in plain torch over a paged cache, on any device: what a blend can be run on, and
compared with a dense prefill, where there is no vLLM.

Weights are random and shared by every second layer: they are read as often as real ones, and a model of 80
layers fits beside its cache. Attention of one run of positions is torch's own, over K and V gathered from the
cache; of scattered positions, the product's kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from kintsugi.core.layout import Part
from kintsugi.fusor.attention import attend_scattered
from kintsugi.fusor.rope import Rotary
from kintsugi.fusor.sliced import Cut, run_in_units
from kintsugi.fusor.stack import AttentionRule, FreshKV, Hidden, LayerBatch, Slots, T
from kintsugi.fusor.staging import upload

BLOCK_SIZE = 16
DISTINCT_LAYERS = 2
VOCAB = 1_000


@dataclass(frozen=True)
class ModelShape:
    """One rank's share of a model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int


class PagedModel:
    """Weights; `[in, out]` each."""

    def __init__(
        self, shape: ModelShape, positions_max: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.shape, self.device, self.dtype = shape, device, dtype
        torch.manual_seed(0)

        def random(*sizes: int) -> Tensor:
            return torch.randn(*sizes, device=device, dtype=dtype) * sizes[0] ** -0.5

        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.split = (q, kv, kv)
        self.embedding = random(VOCAB, shape.hidden) * VOCAB**0.5
        self.weights = [
            (random(shape.hidden, q + 2 * kv), random(q, shape.hidden), random(shape.hidden, 2 * shape.mlp),
             random(shape.mlp, shape.hidden))
            for _ in range(DISTINCT_LAYERS)
        ]  # fmt: skip
        half = shape.head_dim // 2
        angles = torch.arange(positions_max)[:, None] * 10_000.0 ** -(torch.arange(half) / half)
        self.rotary = Rotary(angles.cos().to(device), angles.sin().to(device), is_neox=True)


@dataclass(frozen=True)
class _Prepared:
    positions: Tensor
    places: Tensor
    slots: Tensor
    run: tuple[int, int] | None
    """First place and end, where the places are known to be one run."""


class PagedStack:
    """`fusor.stack.DecoderStack` for one sequence of at most `positions_max` tokens."""

    world_size = 1
    failure: str | None = None
    sees_order_alone = True

    def __init__(self, model: PagedModel, positions_max: int) -> None:
        self.model, self.device = model, model.device
        shape, blocks = model.shape, -(-positions_max // BLOCK_SIZE)
        size = (shape.layers, blocks, BLOCK_SIZE, shape.kv_heads, shape.head_dim)
        self.keys = torch.zeros(size, dtype=model.dtype, device=model.device)
        self.values = torch.zeros_like(self.keys)
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(1))
        self.table = order.int().to(model.device)
        qkv, out = sum(model.split), model.split[0]
        self.projection_share = qkv / (qkv + out + 3 * shape.mlp)

    @property
    def num_layers(self) -> int:
        return self.model.shape.layers

    def with_own_cache(self, start: int, end: int) -> PagedStack:
        own = PagedStack(self.model, end)
        mine, theirs = own.slots(torch.arange(start)), self.slots(torch.arange(start))
        for layer in range(self.num_layers):
            for to, of in ((own.keys, self.keys), (own.values, self.values)):
                to[layer].flatten(0, 1)[mine.prepared] = of[layer].flatten(0, 1)[theirs.prepared]
        return own

    def contain(self, act: Callable[[], T], otherwise: Callable[[], T]) -> T:
        return act()

    def batch(
        self, positions: Tensor, owners: Tensor | None = None, places: Tensor | None = None
    ) -> LayerBatch:
        assert owners is None
        places = positions if places is None else places
        run = None
        if places.device.type == "cpu" and len(places):
            first, last = int(places[0]), int(places[-1])
            run = (first, last + 1) if last - first + 1 == len(places) else None
        places = self._there(places)
        return LayerBatch(len(positions), _Prepared(self._there(positions), places, self._slots(places), run))

    def slots(self, places: Tensor) -> Slots:
        return Slots(self._slots(self._there(places)))

    def _there(self, positions: Tensor) -> Tensor:
        same = positions.device.type == self.device.type
        return positions if same else upload(positions, self.device)

    def _slots(self, places: Tensor) -> Tensor:
        return self.table[places // BLOCK_SIZE].long() * BLOCK_SIZE + places % BLOCK_SIZE

    def embed(self, token_ids: Tensor, positions: Tensor) -> Hidden:
        return Hidden(self.model.embedding[upload(token_ids, self.device)], None)

    def begin_layer(self, layer: int) -> None:
        """Nothing has to be prepared."""

    def end_layer(self, layer: int) -> None:
        """Nothing has to be put back."""

    def keeps_layer(self, layer: int) -> bool:
        return True

    def write_kv(self, layer: int, slots: Slots, key: Tensor, value: Tensor) -> None:
        self._write(layer, slots.prepared, key, value)

    def _write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        for cache, fresh in ((self.keys, key), (self.values, value)):
            cache[layer].view(-1, *fresh.shape[1:]).index_copy_(0, slots, fresh)

    def project_kv(self, layer: int, hidden: Hidden, batch: LayerBatch) -> FreshKV:
        return self._project(layer, _stream(hidden), batch.prepared.positions)

    def _project(self, layer: int, stream: Tensor, positions: Tensor) -> FreshKV:
        projected = _norm(stream) @ self.model.weights[layer % DISTINCT_LAYERS][0]
        query, key, value = (
            part.view(len(stream), -1, self.model.shape.head_dim)
            for part in projected.split(self.model.split, -1)
        )
        rotary = self.model.rotary
        return FreshKV(rotary.rotate(query, positions), key, rotary.rotate(key, positions), value)

    def run_layer(
        self, layer: int, hidden: Hidden, batch: LayerBatch, capture: bool = False
    ) -> FreshKV | None:
        prepared: _Prepared = batch.prepared
        stream = _stream(hidden)
        fresh = self._project(layer, stream, prepared.positions)
        self._write(layer, prepared.slots, fresh.key, fresh.value)
        _, output, up, down = self.model.weights[layer % DISTINCT_LAYERS]
        hidden.residual = stream + self._attend(layer, fresh.query, prepared).flatten(1) @ output
        gate, value = (_norm(hidden.residual) @ up).chunk(2, -1)
        hidden.states = (torch.nn.functional.silu(gate) * value) @ down
        return fresh if capture else None

    def _attend(self, layer: int, query: Tensor, prepared: _Prepared) -> Tensor:
        scale = self.model.shape.head_dim**-0.5
        if prepared.run is None:
            places = prepared.places.int()
            return attend_scattered(
                query, self.keys[layer], self.values[layer], self.table, places, scale=scale
            )
        end, group = prepared.run[1], self.model.shape.heads // self.model.shape.kv_heads
        table = self.table[: -(-end // BLOCK_SIZE)].long()
        key, value = (
            cache[layer][table].flatten(0, 1)[:end].repeat_interleave(group, 1).transpose(0, 1)[None]
            for cache in (self.keys, self.values)
        )
        mask = causal_lower_right(len(query), end)
        attended: Tensor = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None], key, value, attn_mask=mask, scale=scale
        )
        return attended[0].transpose(0, 1)

    @property
    def attending(self) -> tuple[int, ...]:
        return tuple(range(self.num_layers))

    def parts(self, layer: int) -> tuple[Part, ...]:
        return ()  # K and V

    def attention_rule(self, layer: int) -> AttentionRule:
        return AttentionRule(self.model.shape.head_dim**-0.5)

    def end_pass(self) -> Callable[[], bool]:
        if self.device.type != "cuda":
            return lambda: True
        end = torch.cuda.current_stream(self.device).record_event()
        return lambda: bool(end.query())

    def gather_heads(self, layer: int, values: Tensor) -> Tensor:
        return values

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        return values

    def prefill(self, token_ids: Tensor, unit_tokens_max: int) -> Hidden:
        """The dense prefill that a blend is compared with. `token_ids` on the host."""
        cut = Cut.of(self, torch.arange(len(token_ids)), unit_tokens_max)
        hidden = self.embed(token_ids, torch.arange(len(token_ids)))
        for layer in range(self.num_layers):
            for _ in run_in_units(self, layer, hidden, cut):
                pass
        return hidden


def _stream(hidden: Hidden) -> Tensor:
    return hidden.states if hidden.residual is None else hidden.states + hidden.residual


def _norm(stream: Tensor) -> Tensor:
    wide = stream.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(stream.dtype)
