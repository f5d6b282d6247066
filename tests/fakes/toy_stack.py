"""A small decoder in plain torch behind `fusor.stack.DecoderStack`, over a dense cache that knows what
was written, and the same decoder run densely as the reference for a blend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kintsugi.core.layout import Part
from kintsugi.fusor.rope import Rotary
from kintsugi.fusor.stack import AttentionRule, FreshKV, Hidden, LayerBatch, Slots, T

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB, POSITIONS_MAX = 32, 4, 2, 8, 97, 512


class ToyModel:
    """Weights and the formulas of one layer: RMSNorm, GQA attention with RoPE, a gated MLP."""

    def __init__(
        self, layers: int = 4, dtype: torch.dtype = torch.float64, seed: int = 0, kv_heads: int = KV_HEADS
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            gain = 1.5 / shape[-2] ** 0.5
            return (torch.randn(*shape, generator=generator, dtype=torch.float64) * gain).to(dtype)

        self.layers, self.dtype, self.kv_heads = layers, dtype, kv_heads
        self.embedding = random(VOCAB, HIDDEN) * VOCAB**0.5
        self.query = random(layers, HIDDEN, HEADS * HEAD_DIM)
        self.key = random(layers, HIDDEN, kv_heads * HEAD_DIM)
        self.value = random(layers, HIDDEN, kv_heads * HEAD_DIM)
        self.output = random(layers, HEADS * HEAD_DIM, HIDDEN)
        self.up = random(layers, HIDDEN, 2 * HIDDEN)
        self.down = random(layers, 2 * HIDDEN, HIDDEN)
        frequency = 100.0 ** -(torch.arange(HEAD_DIM // 2, dtype=torch.float64) / (HEAD_DIM // 2))
        self.angles = torch.arange(POSITIONS_MAX)[:, None] * frequency

    @property
    def rotary(self) -> Rotary:
        return Rotary.from_table(torch.cat((self.angles.cos(), self.angles.sin()), -1), is_neox=True)

    def rotate(self, heads: Tensor, positions: Tensor) -> Tensor:
        """`[tokens, heads, head_dim]` by RoPE, in the model's dtype."""
        pairs = torch.complex(*heads.double().chunk(2, -1)) * torch.exp(1j * self.angles[positions])[:, None]
        return torch.cat((pairs.real, pairs.imag), -1).to(heads.dtype)

    def project(self, layer: int, stream: Tensor, positions: Tensor) -> tuple[Tensor, FreshKV]:
        """Queries after RoPE, and K and V, of tokens with the residual stream `stream`."""
        normed = _norm(stream)
        query = (normed @ self.query[layer]).view(-1, HEADS, HEAD_DIM)
        key = (normed @ self.key[layer]).view(-1, self.kv_heads, HEAD_DIM)
        value = (normed @ self.value[layer]).view(-1, self.kv_heads, HEAD_DIM)
        query = self.rotate(query, positions)
        return query, FreshKV(query, key, self.rotate(key, positions), value)

    def attend(
        self,
        layer: int,
        query: Tensor,
        places: Tensor,
        key: Tensor,
        value: Tensor,
        unseen: Sequence[int] = (),
    ) -> Tensor:
        """Queries at `places` over K and V of places 0…n: never over a later one, nor those `unseen`."""
        key, value = (kv.repeat_interleave(HEADS // self.kv_heads, dim=1) for kv in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) / HEAD_DIM**0.5
        visible = torch.arange(len(key))[None] <= places[:, None]
        visible[:, list(unseen)] = False
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, value).flatten(1) @ self.output[layer]

    def mlp(self, layer: int, stream: Tensor) -> Tensor:
        return torch.nn.functional.silu(_norm(stream) @ self.up[layer]) @ self.down[layer]

    def dense(
        self,
        token_ids: Tensor,
        start: int = 0,
        fresh: Mapping[int, Sequence[int]] | None = None,
        loaded: Callable[[int], tuple[Tensor, Tensor]] | None = None,
        unseen: Sequence[int] = (),
    ) -> DenseRun:
        """Everything at full width. Where a position is not in `fresh[layer]`, its K and V are those of
        `loaded(layer)`, both `[tokens, kv_heads, head_dim]` after RoPE, before anything attends; nothing
        attends to positions that are `unseen`."""
        positions = torch.arange(start, start + len(token_ids))
        stream = self.embedding[token_ids]
        queries, raw_keys, keys, values = [], [], [], []
        for layer in range(self.layers):
            query, kv = self.project(layer, stream, positions)
            key, value = kv.key, kv.value
            if fresh is not None and loaded is not None:
                stale = torch.tensor([p not in set(fresh[layer]) for p in range(len(token_ids))])
                cached_key, cached_value = loaded(layer)
                key = torch.where(stale[:, None, None], cached_key.to(key.dtype), key)
                value = torch.where(stale[:, None, None], cached_value.to(value.dtype), value)
            stream = stream + self.attend(layer, query, positions - start, key, value, unseen)
            stream = stream + self.mlp(layer, stream)
            queries.append(query)
            assert kv.key_before_rope is not None
            raw_keys.append(kv.key_before_rope)
            keys.append(key)
            values.append(value)
        return DenseRun(
            torch.stack(queries), torch.stack(raw_keys), torch.stack(keys), torch.stack(values), stream
        )


@dataclass(frozen=True)
class DenseRun:
    """Queries, K before RoPE, K and V, each `[layers, tokens, heads, head_dim]`; the last residual stream."""

    queries: Tensor
    keys_before_rope: Tensor
    keys: Tensor
    values: Tensor
    stream: Tensor


class ToyStack:
    """`DecoderStack` over sequences of at most `POSITIONS_MAX` tokens."""

    def __init__(
        self,
        model: ToyModel,
        sequences: int = 1,
        world_size: int = 1,
        other_ranks: Callable[[Tensor], Tensor] = torch.zeros_like,
    ) -> None:
        """`other_ranks` maps what this rank brings to an all-reduce to the sum of the others' parts."""
        self.model = model
        self.device = torch.device("cpu")
        self.world_size = world_size
        self.failure: str | None = None
        self.projection_share = 0.125
        self.open_layer: int | None = None
        self.calls: list[tuple[str, int, int]] = []
        """(what, layer, tokens) of every `project_kv` and `run_layer`."""
        self.writes: list[tuple[int, int]] = []
        """(layer, tokens) of every `write_kv`."""
        self.places = POSITIONS_MAX
        """Places that each sequence has in the cache."""
        self.sees_order_alone = True
        self.forgets = False
        """Whether a layer that ends loses what was written to it, as vLLM's sliding windows do."""
        self._other_ranks = other_ranks
        shape = (model.layers, sequences, POSITIONS_MAX, model.kv_heads, HEAD_DIM)
        self.keys = torch.zeros(shape, dtype=model.dtype)
        self.values = torch.zeros(shape, dtype=model.dtype)
        self.written = torch.zeros(shape[:3], dtype=torch.bool)

    @property
    def num_layers(self) -> int:
        return self.model.layers

    def with_own_cache(self, start: int, end: int) -> ToyStack:
        own = ToyStack(self.model)
        own.calls, own.places = self.calls, end
        for mine, theirs in ((own.keys, self.keys), (own.values, self.values), (own.written, self.written)):
            mine[:, :, :start] = theirs[:, :1, :start]
        return own

    def contain(self, act: Callable[[], T], otherwise: Callable[[], T]) -> T:
        if self.world_size == 1:
            return act()
        if self.failure is None:
            try:
                return act()
            except RuntimeError as error:
                self.failure = repr(error)
        return otherwise()

    def batch(
        self, positions: Tensor, owners: Tensor | None = None, places: Tensor | None = None
    ) -> LayerBatch:
        owners = torch.zeros_like(positions) if owners is None else owners
        places = positions if places is None else places
        for owner in owners.unique():
            mine = owners == owner
            assert bool((positions[mine].diff() > 0).all()), "positions ascend within an owner"
            assert bool((places[mine].diff() > 0).all()), "so do places"
        return LayerBatch(len(positions), (positions, owners, places))

    def embed(self, token_ids: Tensor, positions: Tensor) -> Hidden:
        return Hidden(self.model.embedding[token_ids], None)

    def begin_layer(self, layer: int) -> None:
        assert self.open_layer is None
        self.open_layer = layer
        if self.forgets:
            self.written[layer] = False

    def end_layer(self, layer: int) -> None:
        assert self.open_layer == layer
        self.open_layer = None

    def keeps_layer(self, layer: int) -> bool:
        return not self.forgets

    def slots(self, places: Tensor) -> Slots:
        return Slots(places)

    def write_kv(self, layer: int, slots: Slots, key: Tensor, value: Tensor) -> None:
        self.writes.append((layer, len(slots.prepared)))
        self._write(layer, torch.zeros_like(slots.prepared), slots.prepared, key, value)

    def _write(self, layer: int, owners: Tensor, places: Tensor, key: Tensor, value: Tensor) -> None:
        assert self.open_layer == layer
        assert not len(places) or int(places.max()) < self.places
        self.keys[layer, owners, places] = key.to(self.keys.dtype)
        self.values[layer, owners, places] = value.to(self.values.dtype)
        self.written[layer, owners, places] = True

    def _zeros(self, num_tokens: int) -> FreshKV:
        """What a rank that has failed goes on with."""
        query = torch.zeros(num_tokens, HEADS, HEAD_DIM, dtype=self.model.dtype)
        key = torch.zeros(num_tokens, self.model.kv_heads, HEAD_DIM, dtype=self.model.dtype)
        return FreshKV(query, key, key, key)

    def project_kv(self, layer: int, hidden: Hidden, batch: LayerBatch) -> FreshKV:
        if self.failure is not None:
            return self._zeros(batch.num_tokens)
        assert len(hidden.states) == batch.num_tokens
        self.calls.append(("project", layer, batch.num_tokens))
        return self.model.project(layer, _stream(hidden), batch.prepared[0])[1]

    def run_layer(
        self, layer: int, hidden: Hidden, batch: LayerBatch, capture: bool = False
    ) -> FreshKV | None:
        if self.failure is not None:
            return self._zeros(batch.num_tokens) if capture else None
        assert len(hidden.states) == batch.num_tokens
        self.calls.append(("run", layer, batch.num_tokens))
        positions, owners, places = batch.prepared
        stream = _stream(hidden)
        query, kv = self.model.project(layer, stream, positions)
        self._write(layer, owners, places, kv.key, kv.value)
        attended = torch.empty_like(stream)
        for owner in owners.unique():
            mine = owners == owner
            end = int(places[mine].max()) + 1
            assert bool(self.written[layer, owner, :end].all()), "a query may see what nobody wrote"
            attended[mine] = self.model.attend(
                layer,
                query[mine],
                places[mine],
                self.keys[layer, owner, :end],
                self.values[layer, owner, :end],
            )
        # As vLLM's layers do: the MLP's output is added to the residual by the next layer.
        hidden.residual = stream + attended
        hidden.states = self.model.mlp(layer, hidden.residual)
        return kv if capture else None

    @property
    def attending(self) -> tuple[int, ...]:
        return tuple(range(self.num_layers))

    def parts(self, layer: int) -> tuple[Part, ...]:
        return ()  # K and V

    def attention_rule(self, layer: int) -> AttentionRule:
        return AttentionRule(HEAD_DIM**-0.5)

    def end_pass(self) -> Callable[[], bool]:
        """Nothing is queued: torch computes on the CPU at once."""
        return lambda: True

    def gather_heads(self, layer: int, values: Tensor) -> Tensor:
        return values

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        return values if self.world_size == 1 else values + self._other_ranks(values)


def _stream(hidden: Hidden) -> Tensor:
    return hidden.states if hidden.residual is None else hidden.states + hidden.residual


def _norm(stream: Tensor) -> Tensor:
    return stream * torch.rsqrt(stream.square().mean(-1, keepdim=True) + 1e-6)
