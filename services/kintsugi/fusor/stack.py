"""The interface between the fusor and a model: run single decoder layers over chosen tokens.

`engine.worker.stack` implements this on vLLM's layers and paged cache; tests implement it on a plain model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kintsugi.fusor.kernels.mass import MassKernel


@dataclass
class Hidden:
    """The residual stream of a set of tokens between two layers."""

    states: Tensor
    """`[tokens, hidden_size]`."""
    residual: Tensor | None
    """vLLM's layers carry the residual separately from the states; None before the first layer."""
    beside: tuple[Tensor, ...] = ()
    """What the model computes once and hands to its layers, each `[tokens, ...]`: positions, their cosines
    and sines, embeddings per layer."""

    def take(self, index: Tensor | slice) -> Hidden:
        residual = None if self.residual is None else self.residual[index]
        return Hidden(self.states[index], residual, tuple(one[index] for one in self.beside))

    def copy(self) -> Hidden:
        """The same over memory of its own, for a layer that changes its input in place."""
        residual = None if self.residual is None else self.residual.clone()
        return Hidden(self.states.clone(), residual, self.beside)


@dataclass(frozen=True)
class FreshKV:
    """K (before and after RoPE) and V of a set of tokens, each `[tokens, kv_heads of this rank, width]`. With
    latent attention K is the rotary key and V the latent, of one head."""

    query: Tensor
    """After RoPE, `[tokens, query heads of this rank, head_dim]`."""
    key_before_rope: Tensor | None
    """None where it was not asked for: `project_kv` may leave it out."""
    key: Tensor
    value: Tensor


@dataclass(frozen=True)
class AttentionRule:
    """How a layer turns queries and keys into attention weights, apart from the causal mask."""

    scale: float
    sliding_window: int | None = None
    """Number of positions that a token sees, including its own."""
    softcap: float | None = None
    kernel: MassKernel | None = None
    """Sums weights in the place of torch, where it can."""
    sinks: Tensor | None = None
    """`[query heads of this rank]`: logits that take probability and contribute no value."""
    slopes: Tensor | None = None
    """`[query heads of this rank]`: how much each position of distance lowers a logit (ALiBi)."""
    absorb: Callable[[Tensor], Tensor] | None = None
    """Latent attention: turns queries `[tokens, heads, width]` into those that are multiplied with a rotary
    key and the latent behind it, `[tokens, heads, rotary + latent]`. None: plain attention."""

    @property
    def is_latent(self) -> bool:
        return self.absorb is not None


@dataclass(frozen=True)
class LayerBatch:
    """Tokens prepared for layer calls; made by `DecoderStack.batch`, reused across layers."""

    num_tokens: int
    prepared: Any
    """Private to the implementation."""


@dataclass(frozen=True)
class Slots:
    """Places in the cache; made by `DecoderStack.slots`, reused across layers."""

    prepared: Any
    """Private to the implementation."""


class DecoderStack(Protocol):
    """Decoder layers over one or several sequences whose KV lies in a cache that this object owns.

    A layer call writes the K and V of its tokens into the cache, then lets each token attend to its
    own sequence's places up to and including its own: never to a later one. A token's place is its position,
    unless a batch says otherwise.

    On a GPU, no call waits for the device, apart from `sum_over_ranks` of a tensor on the host and, where the
    model's own attention has to serve tokens that were selected on the device, `batch`.
    """

    @property
    def device(self) -> torch.device:
        """Where hidden states and the cache lie."""
        ...

    @property
    def num_layers(self) -> int: ...

    @property
    def world_size(self) -> int:
        """Number of tensor-parallel ranks that run this pass together."""
        ...

    @property
    def projection_share(self) -> float:
        """Cost of `project_kv` ÷ cost of `run_layer` per token, not counting attention."""
        ...

    @property
    def sees_order_alone(self) -> bool:
        """Whether attention asks of a cached token only whether it lies before the query: no layer has a
        window or biases that count what lies between."""
        ...

    def with_own_cache(self, start: int, end: int) -> DecoderStack:
        """A stack of the same layers over a cache of its own, with places `[0, end)` for one sequence. In
        the first `start` lie those of sequence 0; in the others nothing, and what is written to them is gone
        once the layer ends."""
        ...

    def batch(
        self, positions: Tensor, owners: Tensor | None = None, places: Tensor | None = None
    ) -> LayerBatch:
        """Prepare int64 `positions` `[tokens]`, ascending within each owner; `owners` `[tokens]`, on the
        host, indexes the sequences and is None if there is only one. Positions lie on the host, or on
        `device` where they were selected there. `places` `[tokens]`, where positions do: where in its
        sequence's cache each token lies, in the order of positions. None: at its position."""
        ...

    def slots(self, places: Tensor) -> Slots:
        """Prepare `places` of sequence 0, as for `batch`, for `write_kv`."""
        ...

    def embed(self, token_ids: Tensor, positions: Tensor) -> Hidden:
        """Embed int64 `token_ids` `[tokens]` at `positions` `[tokens]`, both on the host."""
        ...

    def begin_layer(self, layer: int) -> None:
        """Must be called before the first write to `layer`; `end_layer` ends it."""
        ...

    def end_layer(self, layer: int) -> None: ...

    def keeps_layer(self, layer: int) -> bool:
        """Whether all that was written to `layer` is still there when it begins again."""
        ...

    def write_kv(self, layer: int, slots: Slots, key: Tensor, value: Tensor) -> None:
        """Write rotated K and V `[tokens, kv_heads, head_dim]` of sequence 0 into the cache."""
        ...

    def project_kv(self, layer: int, hidden: Hidden, batch: LayerBatch) -> FreshKV:
        """Compute K and V of `layer` without its attention and MLP. Does not change `hidden`."""
        ...

    def run_layer(
        self, layer: int, hidden: Hidden, batch: LayerBatch, capture: bool = False
    ) -> FreshKV | None:
        """Run the layer; `hidden` becomes its output. With `capture`, return the tokens' K and V."""
        ...

    def attention_rule(self, layer: int) -> AttentionRule: ...

    def end_pass(self) -> Callable[[], bool]:
        """Mark the end of a pass in the device's queue. Returns what tells, without waiting, whether every
        rank's device has got there; ranks ask together."""
        ...

    def gather_heads(self, layer: int, values: Tensor) -> Tensor:
        """`[tokens, heads of this rank, width]` of a layer -> `[tokens, all its kv heads, width]`, on every
        rank."""
        ...

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """All-reduce, on the device or on the host, wherever `values` lie; with one rank, return the same
        tensor."""
        ...
