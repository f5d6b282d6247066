"""The interface between the fusor and a model: run single decoder layers over chosen tokens.

`engine.worker.stack` implements this on vLLM's layers and paged cache; tests implement it on a plain model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from kintsugi.core.layout import Part
from kintsugi.fusor.kernels.native import MassKernel

T = TypeVar("T")


@dataclass
class Hidden:
    """The residual stream of a set of tokens between two layers."""

    states: Tensor
    """`[tokens, hidden_size]`."""
    residual: Tensor | None
    """vLLM's layers carry the residual separately from the states; None before the first layer."""
    beside: tuple[Tensor, ...] = ()
    """Tensors `[tokens, ...]` that the model computes once and passes to its layers: positions, their cosines
    and sines, embeddings per layer."""

    def take(self, index: Tensor | slice) -> Hidden:
        residual = None if self.residual is None else self.residual[index]
        return Hidden(self.states[index], residual, tuple(one[index] for one in self.beside))

    def copy(self) -> Hidden:
        """Return a copy with its own memory, for a layer that changes its input in place."""
        residual = None if self.residual is None else self.residual.clone()
        return Hidden(self.states.clone(), residual, self.beside)


@dataclass(frozen=True)
class FreshKV:
    """K (before and after RoPE) and V of a set of tokens, each `[tokens, kv_heads of this rank, width]`. With
    latent attention K is the rotary key and V the latent, of one head. In a recurrent layer K is the input of
    its convolution and scan and V its gates, of one head."""

    query: Tensor
    """After RoPE, `[tokens, query heads of this rank, head_dim]`. Empty in a recurrent layer."""
    key_before_rope: Tensor | None
    """None if `project_kv` left it out."""
    key: Tensor
    value: Tensor


@dataclass(frozen=True)
class AttentionRule:
    """How a layer computes attention weights from queries and keys, apart from the causal mask."""

    scale: float
    sliding_window: int | None = None
    """Number of positions that a token sees, including its own."""
    softcap: float | None = None
    kernel: MassKernel | None = None
    """Sums the weights of tensors that it supports in place of torch."""
    sinks: Tensor | None = None
    """`[query heads of this rank]`: logits that take probability and contribute no value."""
    slopes: Tensor | None = None
    """`[query heads of this rank]`: how much each position of distance lowers a logit (ALiBi)."""
    absorb: Callable[[Tensor], Tensor] | None = None
    """Latent attention: converts queries `[tokens, heads, width]` to queries over a rotary key followed by
    the latent, `[tokens, heads, rotary + latent]`. None: plain attention."""


@dataclass(frozen=True)
class LayerBatch:
    """Tokens prepared for layer calls; made by `DecoderStack.batch`, reused across layers."""

    num_tokens: int
    prepared: Any
    """Private to the implementation."""


@dataclass(frozen=True)
class Slots:
    """Slots of the cache; made by `DecoderStack.slots`, reused across layers."""

    prepared: Any
    """Private to the implementation."""


class DecoderStack(Protocol):
    """Decoder layers over one or several sequences whose KV lies in a cache that this object owns.

    A layer call writes the K and V of its tokens into the cache, then lets each token attend to its own
    sequence's places up to and including its own. A recurrent layer scans these places instead; the state
    after the last place is given to the engine when the pass ends. A token's place is its position, unless a
    batch specifies `places`.

    On a GPU, no call waits for the device, except `sum_over_ranks` of a tensor on the host, and `batch` if
    the model's own attention computes tokens that were selected on the device.
    """

    @property
    def device(self) -> torch.device:
        """The device of hidden states and cache."""
        ...

    @property
    def num_layers(self) -> int: ...

    @property
    def world_size(self) -> int:
        """Number of tensor-parallel ranks that run this pass together."""
        ...

    @property
    def failure(self) -> str | None:
        """Why this rank of several failed and went on with zeros; None if it did not."""
        ...

    def contain(self, act: Callable[[], T], otherwise: Callable[[], T]) -> T:
        """Return `act()`, which may contain collective operations only if `otherwise` takes part in those
        that are left. If `act` raises on one of several ranks, or this rank has failed before, return
        `otherwise()`: the ranks agree on failures at the pass's end. With one rank, `act` may raise."""
        ...

    @property
    def projection_share(self) -> float:
        """Cost of `project_kv` ÷ cost of `run_layer` per token, not counting attention."""
        ...

    @property
    def sees_order_alone(self) -> bool:
        """Whether attention depends only on the order of tokens, not on their distance: no layer has a window
        or position biases."""
        ...

    def with_own_cache(self, start: int, end: int) -> DecoderStack:
        """Return a stack of the same layers with its own cache of places `[0, end)` for one sequence. The
        first `start` places hold those of sequence 0. The others are empty, and what is written to them is
        dropped when the layer ends."""
        ...

    def batch(
        self, positions: Tensor, owners: Tensor | None = None, places: Tensor | None = None
    ) -> LayerBatch:
        """Prepare int64 `positions` `[tokens]`, ascending within each owner, on the host, or on `device` if
        they were selected there. `owners` `[tokens]`, on the host: indices of the sequences; None if there is
        only one. `places` `[tokens]`, on the device of `positions`: the place of each token in its sequence's
        cache, in the order of positions; None: its position."""
        ...

    def slots(self, places: Tensor) -> Slots:
        """Prepare `places` of sequence 0, as for `batch`, for `write_kv`."""
        ...

    def embed(self, token_ids: Tensor, positions: Tensor) -> Hidden:
        """Embed int64 `token_ids` `[tokens]` at `positions` `[tokens]`, both on the host."""
        ...

    def begin_layer(self, layer: int) -> None:
        """Begin a layer, before the first write to it. `end_layer` ends it."""
        ...

    def end_layer(self, layer: int) -> None: ...

    def keeps_layer(self, layer: int) -> bool:
        """Return whether the cache of `layer` keeps what was written until the layer begins again."""
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

    @property
    def attending(self) -> tuple[int, ...]:
        """Layers with attention, at which the question's attention can be measured."""
        ...

    def attention_rule(self, layer: int) -> AttentionRule:
        """Return the rule of an attending layer."""
        ...

    def parts(self, layer: int) -> tuple[Part, ...]:
        """Return what a chunk's frame of this layer consists of."""
        ...

    def end_pass(self) -> Callable[[], bool]:
        """Mark the end of a pass in the device's queue. Returns a function that reports, without waiting,
        whether every rank's device has reached it. All ranks call it together."""
        ...

    def gather_heads(self, layer: int, values: Tensor) -> Tensor:
        """Gather `[tokens, heads of this rank, width]` of a layer to `[tokens, all kv heads, width]` on every
        rank."""
        ...

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """All-reduce `values`, on the device or on the host. With one rank, returns the same tensor."""
        ...
