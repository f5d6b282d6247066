"""What the fusor needs of a model: its decoder layers, one at a time, over chosen tokens.

`engine.worker.stack` implements this on vLLM's layers and paged cache; tests implement it on a plain model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass
class Hidden:
    """The residual stream of some tokens between two layers."""

    states: Tensor
    """`[tokens, hidden_size]`."""
    residual: Tensor | None
    """vLLM's layers carry the residual apart from the states; None before the first layer."""

    def take(self, index: Tensor | slice) -> Hidden:
        return Hidden(self.states[index], None if self.residual is None else self.residual[index])


@dataclass(frozen=True)
class FreshKV:
    """K (before RoPE, and after) and V of some tokens, each `[tokens, kv_heads of this rank, head_dim]`."""

    query: Tensor
    """After RoPE, `[tokens, query heads of this rank, head_dim]`."""
    key_before_rope: Tensor
    key: Tensor
    value: Tensor


@dataclass(frozen=True)
class AttentionRule:
    """How a layer turns queries and keys into weights, the causal mask apart."""

    scale: float
    sliding_window: int | None = None
    """A token sees this many positions, its own included."""
    softcap: float | None = None


@dataclass(frozen=True)
class LayerBatch:
    """Tokens prepared for layer calls; made by `DecoderStack.batch`, reused across layers."""

    num_tokens: int
    prepared: Any
    """What the implementation keeps for them."""


class DecoderStack(Protocol):
    """Decoder layers over one or several sequences whose KV lies in a cache that this object owns.

    A layer call writes the K and V of its tokens into the cache, then lets each token attend to its
    own sequence's positions up to and including its own: never to a later one.
    """

    @property
    def num_layers(self) -> int: ...

    @property
    def world_size(self) -> int:
        """Tensor-parallel ranks that run this pass together."""
        ...

    @property
    def projection_share(self) -> float:
        """Cost of `project_kv` ÷ cost of `run_layer` per token, attention apart."""
        ...

    def batch(self, positions: Tensor, owners: Tensor | None = None) -> LayerBatch:
        """Prepare int64 `positions` `[tokens]`, ascending within each owner; `owners` `[tokens]` indexes
        the sequences and is None where there is only one."""
        ...

    def embed(self, token_ids: Tensor) -> Hidden: ...

    def begin_layer(self, layer: int) -> None:
        """Called before anything of `layer` is written; balanced by `end_layer`."""
        ...

    def end_layer(self, layer: int) -> None: ...

    def write_kv(self, layer: int, positions: Tensor, key: Tensor, value: Tensor) -> None:
        """Put rotated K and V `[tokens, kv_heads, head_dim]` of sequence 0 into the cache."""
        ...

    def project_kv(self, layer: int, hidden: Hidden, batch: LayerBatch) -> FreshKV:
        """K and V of `layer` without its attention and MLP. Leaves `hidden` as it was."""
        ...

    def run_layer(
        self, layer: int, hidden: Hidden, batch: LayerBatch, capture: bool = False
    ) -> FreshKV | None:
        """Run the layer; `hidden` becomes its output. With `capture`, the tokens' K and V."""
        ...

    def attention_rule(self, layer: int) -> AttentionRule: ...

    def synchronize(self) -> None:
        """Return once everything that was queued on the device is done."""
        ...

    def gather_heads(self, values: Tensor) -> Tensor:
        """`[tokens, heads of this rank, head_dim]` -> `[tokens, all kv heads, head_dim]`, on every rank."""
        ...

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """All-reduce; the same tensor where there is one rank."""
        ...
