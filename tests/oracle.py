"""CacheBlend on plain transformers models: slow, obviously correct, and independent of `kintsugi.fusor`.

The whole prompt goes through the model at full width. Just before each layer's attention, the K and V of
the tokens that are not fresh at that layer are replaced by those that were cached for their chunk. The
hidden state of a token that is not computed at a layer is garbage from there on, and nothing reads it:
its K and V are replaced, and sets of computed tokens only shrink with depth.

Works for every decoder whose layers have `self_attn` with `k_proj`, `v_proj`, perhaps `k_norm`, take
`position_embeddings` and attend through transformers' attention interface.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM

ATTENTION = "kintsugi_oracle"


@dataclass(frozen=True)
class CachedChunk:
    """What a store would hold of one chunk: lists by layer of `[tokens, kv_heads, head_dim]`."""

    keys_before_rope: list[Tensor]
    values: list[Tensor]


@dataclass(frozen=True)
class OracleAnswer:
    """`logprobs` `[1 + continuation, vocab]`, fp32: after the prompt's last token, then after each
    continuation token. Deviations: layer -> squared distance of cached from fresh K (V) after RoPE, fp32
    `[prompt tokens]`, zero outside hits; true only for tokens that are fresh at that layer."""

    logprobs: Tensor
    key_deviation: dict[int, Tensor] = field(default_factory=dict)
    value_deviation: dict[int, Tensor] = field(default_factory=dict)


def measured_layers(selector: str, check_layer: int, ratio: float, num_layers: int) -> range:
    """Layers at which a selector compares loaded with fresh KV, and so leaves fresh KV of all that it saw."""
    if selector in ("random", "chunk_head", "query", "prior") or not 0 < ratio < 1:
        return range(0)
    check = min(check_layer, num_layers - 1)
    return range(check, num_layers if selector == "hkvd_gradual" else check + 1)


def fresh_positions(
    active: Mapping[int, Collection[int]], measured: Collection[int], region: range
) -> dict[int, set[int]]:
    """Layer -> positions of `region` (what the pass computed or loaded) with fresh K and V.

    `active` is `Accounting.recomputed_positions`. At a measured layer that is every token of the layer
    before, elsewhere the tokens that the layer computes.
    """
    return {
        layer: set(active[layer])
        | (set() if layer not in measured else set(active[layer - 1]) if layer else set(region))
        for layer in active
    }


class Oracle:
    """One checkpoint in memory. Not thread-safe."""

    def __init__(self, folder: Path | str, dtype: torch.dtype = torch.float32) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=ATTENTION
        ).eval()
        self._attentions: list[Any] = [layer.self_attn for layer in self.model.model.layers]
        self._cached: dict[tuple[tuple[int, ...], tuple[int, ...]], CachedChunk] = {}

    @property
    def num_layers(self) -> int:
        return len(self._attentions)

    def blended(
        self,
        prompt: Sequence[int],
        prefix: Sequence[int],
        hits: Sequence[tuple[int, int]],
        active: Mapping[int, Collection[int]],
        measured: Collection[int] = (),
        continuation: Sequence[int] = (),
        start: int = 0,
    ) -> OracleAnswer:
        """Log-probabilities after a blend of positions `[start, len(prompt) - 1)`.

        `hits` are the spans that were loaded; `prefix` is the chunk space's; `active` and `measured` are
        as in `fresh_positions`. Positions before `start` (exact prefix hits) and from the last prompt
        token on are fresh at every layer.
        """
        region = range(start, len(prompt) - 1)
        fresh = fresh_positions(active, measured, region)
        assert sorted(fresh) == list(range(self.num_layers)), "active must name every layer"
        hit = {p for first, end in hits for p in range(first, end) if p in region}
        stale = {layer: sorted(hit - fresh[layer]) for layer in fresh}
        return self._run(prompt, prefix, hits, stale, continuation)

    def attended(
        self,
        prompt: Sequence[int],
        prefix: Sequence[int],
        hits: Sequence[tuple[int, int]],
        layers: Collection[int],
    ) -> Tensor:
        """fp32 `[prompt tokens]`, zero outside hits: the attention weights that the tokens behind the last
        hit give each hit token at `layers`, summed over tokens and heads, while every hit keeps its cached
        KV. Weights are relative to all positions from the first hit on."""
        hit = sorted({p for first, end in hits for p in range(first, end)})
        asking = range(hit[-1] + 1, len(prompt))
        watched = {layer: _Watch(hit[0], asking) for layer in layers}
        self._run(prompt, prefix, hits, dict.fromkeys(range(self.num_layers), hit), (), watched)
        total = torch.zeros(len(prompt))
        for watch in watched.values():
            total[hit] += watch.weights[hit]
        return total

    def prior(self, lead: Sequence[int], other_lead: Sequence[int], chunk: Sequence[int]) -> Tensor:
        """fp32 `[chunk tokens]`: squared distance of each token's K and V behind `lead` from those behind
        `other_lead`, ÷ the mean squared norm behind `lead`; mean over layers."""
        mine, theirs = self.cached(lead, chunk), self.cached(other_lead, chunk)
        pairs = [
            *zip(mine.keys_before_rope, theirs.keys_before_rope, strict=True),
            *zip(mine.values, theirs.values, strict=True),
        ]
        moved = [(one - other).square().sum((1, 2)) / one.square().sum((1, 2)).mean() for one, other in pairs]
        return torch.stack(moved).sum(0) / self.num_layers

    def full(self, prompt: Sequence[int], continuation: Sequence[int] = ()) -> OracleAnswer:
        """Log-probabilities of an ordinary full prefill."""
        return self._run(prompt, (), (), {}, continuation)

    @torch.inference_mode()
    def cached(self, prefix: Sequence[int], chunk: Sequence[int]) -> CachedChunk:
        """The chunk alone behind the prefix, with K captured before RoPE."""
        name = (tuple(prefix), tuple(chunk))
        if name not in self._cached:
            self._cached[name] = self._isolated(list(prefix), list(chunk))
        return self._cached[name]

    def _isolated(self, prefix: list[int], chunk: list[int]) -> CachedChunk:
        token_ids = prefix + chunk
        config = self.model.config
        if len(token_ids) == config.num_key_value_heads:
            # Tokens and heads must differ in number for `_token_major`; a later token changes nothing.
            token_ids = [*token_ids, 0]
        keys: list[Tensor] = []
        values: list[Tensor] = []
        shape = (len(token_ids), config.num_key_value_heads, self._attentions[0].head_dim)
        rows = slice(len(prefix), len(prefix) + len(chunk))
        handles = []
        for attention in self._attentions:
            before_rope = getattr(attention, "k_norm", attention.k_proj)
            for module, sink in ((before_rope, keys), (attention.v_proj, values)):
                handles.append(
                    module.register_forward_hook(
                        lambda _m, _i, output, sink=sink: sink.append(_token_major(output, shape)[rows])
                    )
                )
        try:
            self.model(torch.tensor([token_ids]), use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        return CachedChunk(keys, values)

    @torch.inference_mode()
    def _run(
        self,
        prompt: Sequence[int],
        prefix: Sequence[int],
        hits: Sequence[tuple[int, int]],
        stale: Mapping[int, list[int]],
        continuation: Sequence[int],
        watched: Mapping[int, _Watch] | None = None,
    ) -> OracleAnswer:
        chunks = [(first, end, self.cached(prefix, prompt[first:end])) for first, end in hits]
        swaps = [
            _Swap(
                self._modeling(),
                layer,
                chunks,
                stale.get(layer, []),
                len(prompt),
                (watched or {}).get(layer),
            )
            for layer in range(self.num_layers)
        ]
        with self._swapping(swaps):
            output = self.model(torch.tensor([[*prompt, *continuation]]), use_cache=False)
        logprobs = output.logits[0, len(prompt) - 1 :].float().log_softmax(-1)
        return OracleAnswer(
            logprobs,
            {swap.layer: swap.key_deviation for swap in swaps},
            {swap.layer: swap.value_deviation for swap in swaps},
        )

    def _modeling(self) -> Any:
        """The module that defines the model: it has the model's own `apply_rotary_pos_emb`."""
        return sys.modules[type(self._attentions[0]).__module__]

    @contextmanager
    def _swapping(self, swaps: list[_Swap]) -> Iterator[None]:
        handles = []
        for attention, swap in zip(self._attentions, swaps, strict=True):
            attention.kintsugi_swap = swap
            handles.append(attention.register_forward_pre_hook(swap.note_rotation, with_kwargs=True))
        try:
            yield
        finally:
            for attention, handle in zip(self._attentions, handles, strict=True):
                handle.remove()
                attention.kintsugi_swap = None


@dataclass
class _Watch:
    """Adds up the attention weights that some tokens give, relative to positions from `first` on."""

    first: int
    asking: range
    weights: Tensor = field(default_factory=lambda: torch.zeros(0))
    """fp32 `[tokens]`."""

    def see(self, scores: Tensor) -> None:
        """`scores` `[1, heads, tokens, tokens]`: logits, minus infinity where nothing is seen."""
        relevant = scores[0, :, self.asking.start : self.asking.stop].float().clone()
        relevant[..., : self.first] = float("-inf")
        self.weights = relevant.softmax(-1).sum((0, 1))


class _Swap:
    """Puts cached K and V in the place of those that are not fresh at one layer."""

    def __init__(
        self,
        modeling: Any,
        layer: int,
        chunks: list[tuple[int, int, CachedChunk]],
        stale: list[int],
        num_tokens: int,
        watch: _Watch | None = None,
    ) -> None:
        self.layer = layer
        self.watch = watch
        self.key_deviation = torch.zeros(num_tokens)
        self.value_deviation = torch.zeros(num_tokens)
        self._modeling = modeling
        self._chunks = chunks
        self._stale = set(stale)
        self._cos_sin: tuple[Tensor, Tensor] | None = None

    def note_rotation(self, _module: object, _arguments: object, keywords: dict[str, Any]) -> None:
        """Before the attention module runs: the cosines and sines of this layer at prompt positions."""
        self._cos_sin = keywords["position_embeddings"]

    def __call__(self, key: Tensor, value: Tensor) -> None:
        """`key` (after RoPE) and `value`, `[1, kv_heads, tokens, head_dim]`, are changed in place."""
        for first, end, chunk in self._chunks:
            cached_key = self._rotated(chunk.keys_before_rope[self.layer], first, end)
            cached_value = chunk.values[self.layer].transpose(0, 1)
            span = slice(first, end)
            self.key_deviation[span] = _squared_distance(key[0, :, span], cached_key)
            self.value_deviation[span] = _squared_distance(value[0, :, span], cached_value)
            for position in range(first, end):
                if position in self._stale:
                    key[0, :, position] = cached_key[:, position - first]
                    value[0, :, position] = cached_value[:, position - first]

    def _rotated(self, key: Tensor, first: int, end: int) -> Tensor:
        """`[tokens, kv_heads, head_dim]` before RoPE -> `[kv_heads, tokens, head_dim]` at the positions."""
        assert self._cos_sin is not None
        cos, sin = (table[:, first:end] for table in self._cos_sin)
        heads_first = key.transpose(0, 1)[None]
        rotated, _ = self._modeling.apply_rotary_pos_emb(heads_first, heads_first, cos, sin)
        return rotated[0]


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    sliding_window: int | None = None,
    **_ignored: object,
) -> tuple[Tensor, None]:
    """Attention of `[1, heads, tokens, head_dim]` with a mask of its own: strictly causal, windowed."""
    assert attention_mask is None
    swap = getattr(module, "kintsugi_swap", None)
    if swap is not None:
        key, value = key.clone(), value.clone()
        swap(key, value)
    groups = query.shape[1] // key.shape[1]
    key, value = (kv.repeat_interleave(groups, dim=1) for kv in (key, value))
    positions = torch.arange(query.shape[2])
    visible = positions[None, :] <= positions[:, None]
    if sliding_window is not None:
        visible &= positions[None, :] > positions[:, None] - sliding_window
    scores = (query @ key.transpose(2, 3) * scaling).masked_fill(~visible, float("-inf"))
    if swap is not None and swap.watch is not None:
        swap.watch.see(scores)
    output = scores.float().softmax(-1).to(query.dtype) @ value
    return output.transpose(1, 2).contiguous(), None


def _token_major(output: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """A projection's or norm's output of one sequence as `[tokens, kv_heads, head_dim]`."""
    tokens, heads, _ = shape
    one = output[0]
    if one.shape[:2] == (heads, tokens):
        one = one.transpose(0, 1)
    return one.reshape(shape).clone()


def _squared_distance(fresh: Tensor, cached: Tensor) -> Tensor:
    """`[kv_heads, tokens, head_dim]` twice -> fp32 `[tokens]`."""
    return (fresh.float() - cached.float()).square().sum((0, 2))


AttentionInterface.register(ATTENTION, _attend)
