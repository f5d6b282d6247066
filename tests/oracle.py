"""CacheBlend on plain transformers models: slow, obviously correct, and independent of `kintsugi.fusor`.

The whole prompt goes through the model at full width. Just before each layer's attention, the K and V of
the tokens that are not fresh at that layer are replaced by those that were cached for their chunk. The
hidden state of a token that is not computed at a layer is garbage from there on, and nothing reads it:
its K and V are replaced, and sets of computed tokens only shrink with depth.

A chunk's keys are never rotated here: it is prefilled behind the prefix at positions that are all moved by as
much as the chunk, so that the model itself gives them where the prompt has them.

A recurrent layer has no K and V, but projections of its input: there the projections of tokens that are not
fresh are replaced by those that were computed for their chunk.

Works for every decoder that attends through transformers' attention interface, and GPT-J.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

ATTENTION = "kintsugi_oracle"
WITHOUT_INTERFACE = ("gptj",)
"""Model types whose attention is a method `_attn`."""


@dataclass(frozen=True)
class CachedChunk:
    """What a store would hold of one chunk: lists by layer of `[tokens, kv_heads, head_dim]`."""

    keys_before_rope: list[Tensor]
    values: list[Tensor]


@dataclass(frozen=True)
class PlacedChunk:
    """One chunk's KV where a prompt has it: lists by layer of `[kv_heads, tokens, head_dim]`."""

    keys: list[Tensor]
    """After RoPE."""
    values: list[Tensor]
    projected: list[dict[str, Tensor]]
    """In recurrent layers, the outputs `[tokens, width]` of each projection by name."""


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
    if selector in ("random", "chunk_head", "query") or not 0 < ratio < 1:
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


def load_model(loader: Any, folder: Path | str, **arguments: Any) -> Any:
    """What `loader.from_pretrained` makes of ``folder``: a model that runs as transformers wrote it.

    Where vLLM runs a model through transformers, it changes the decoder's class in this process: from then on
    the class asks for vLLM's current config when it is made, and compiles itself when it is called.
    """
    with _vllm_without_compilation(folder):
        model = loader.from_pretrained(folder, **arguments).eval()
    for module in model.modules():
        # An engine that starts later changes the class of this model too.
        module.do_not_compile = True
    return model


@contextmanager
def _vllm_without_compilation(folder: Path | str) -> Iterator[None]:
    """Give vLLM a current config that compiles nothing; where vLLM is not imported, do nothing."""
    if "vllm.config" not in sys.modules:
        yield
        return
    from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config

    config = VllmConfig(compilation_config=CompilationConfig(mode=CompilationMode.NONE))
    # Only its model's config is read; a whole `ModelConfig` would want a model that vLLM can serve.
    config.model_config = SimpleNamespace(hf_config=AutoConfig.from_pretrained(folder))
    with set_current_vllm_config(config):
        yield


class Oracle:
    """One checkpoint in memory. Not thread-safe."""

    def __init__(self, folder: Path | str, dtype: torch.dtype = torch.float32, **overrides: object) -> None:
        """`overrides` are fields of the config."""
        config = AutoConfig.from_pretrained(folder, **overrides)
        has_interface = config.model_type not in WITHOUT_INTERFACE
        implementation = ATTENTION if has_interface else "eager"
        loader = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
        self.model: Any = load_model(
            loader, folder, config=config, dtype=dtype, attn_implementation=implementation
        )
        found = [module for module in self.model.modules() if _is_attention(module) or _is_recurrent(module)]
        self._attentions: list[Any] = sorted(found, key=lambda module: module.layer_idx)
        if not has_interface:
            for attention in self._attentions:
                attention._attn = partial(_attend_without_interface, attention)
        self._placed: dict[tuple[tuple[int, ...], tuple[int, ...], int], PlacedChunk] = {}
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
        left_out: Sequence[range] = (),
        begins: int | None = None,
        exact_end: int = 0,
    ) -> Tensor:
        """fp32 `[prompt tokens]`, zero outside hits: the attention weights that the tokens from `begins` on,
        or behind the last hit, give each hit token at `layers`, summed over tokens and heads, while every hit
        keeps its cached KV and nobody sees positions that are `left_out`. Weights are relative to all
        positions from the first hit on that does not begin before `exact_end`."""
        hit = sorted({p for first, end in hits for p in range(first, end)})
        asking = range(begins or hit[-1] + 1, len(prompt))
        first = min(start for start, _ in hits if start >= exact_end)
        watched = {layer: _Watch(first, asking) for layer in layers}
        unseen = [position for gap in left_out for position in gap]
        self._run(prompt, prefix, hits, dict.fromkeys(range(self.num_layers), hit), (), watched, unseen)
        total = torch.zeros(len(prompt))
        for watch in watched.values():
            total[hit] += watch.weights[hit]
        return total

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
    def _place(self, prefix: Sequence[int], chunk: Sequence[int], first: int) -> PlacedChunk:
        """The chunk alone behind the prefix, at positions from `first` on."""
        name = (tuple(prefix), tuple(chunk), first)
        if name not in self._placed:
            rows = slice(len(prefix), len(prefix) + len(chunk))
            notes = [_Note(rows) for _ in self._attentions]
            with self._seeing(notes):
                self._forward([*prefix, *chunk], first - len(prefix))
            self._placed[name] = PlacedChunk(
                [note.key for note in notes],
                [note.value for note in notes],
                [note.projected for note in notes],
            )
        return self._placed[name]

    def _forward(self, token_ids: list[int], start: int = 0) -> Any:
        positions = torch.arange(start, start + len(token_ids))
        return self.model(torch.tensor([token_ids]), position_ids=positions[None], use_cache=False)

    @torch.inference_mode()
    def _run(
        self,
        prompt: Sequence[int],
        prefix: Sequence[int],
        hits: Sequence[tuple[int, int]],
        stale: Mapping[int, list[int]],
        continuation: Sequence[int],
        watched: Mapping[int, _Watch] | None = None,
        unseen: Sequence[int] = (),
    ) -> OracleAnswer:
        chunks = [(first, end, self._place(prefix, prompt[first:end], first)) for first, end in hits]
        swaps = [
            _Swap(
                layer,
                chunks,
                stale.get(layer, []),
                len(prompt),
                (watched or {}).get(layer),
                unseen,
            )
            for layer in range(self.num_layers)
        ]
        with self._seeing(swaps):
            output = self._forward([*prompt, *continuation])
        logprobs = output.logits[0, len(prompt) - 1 :].float().log_softmax(-1)
        return OracleAnswer(
            logprobs,
            {swap.layer: swap.key_deviation for swap in swaps},
            {swap.layer: swap.value_deviation for swap in swaps},
        )

    @contextmanager
    def _seeing(self, seers: Sequence[_Swap | _Note]) -> Iterator[None]:
        """Let each layer's K and V be seen, and changed, just before they are attended to."""
        handles = []
        for attention, seer in zip(self._attentions, seers, strict=True):
            attention.kintsugi_seer = seer
            for name, projection in _projections_of(attention):
                see = partial(seer.see_projected, name)
                handles.append(
                    projection.register_forward_hook(lambda _m, _i, output, see=see: see(output.clone()))
                )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for attention in self._attentions:
                attention.kintsugi_seer = None


@dataclass
class _Note:
    """Keeps some rows of one layer's K and V."""

    rows: slice
    watch: None = None
    unseen: Sequence[int] = ()
    key: Tensor = field(default_factory=lambda: torch.zeros(0))
    value: Tensor = field(default_factory=lambda: torch.zeros(0))
    projected: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, key: Tensor, value: Tensor) -> None:
        self.key, self.value = key[0, :, self.rows].clone(), value[0, :, self.rows].clone()

    def see_projected(self, name: str, output: Tensor) -> Tensor:
        """`output` `[1, tokens, width]`."""
        self.projected[name] = output[0, self.rows].clone()
        return output


@dataclass
class _Watch:
    """Adds up the attention weights that some tokens give, relative to positions from `first` on."""

    first: int
    asking: range
    weights: Tensor = field(default_factory=lambda: torch.zeros(0))
    """fp32 `[tokens]`."""

    def see(self, scores: Tensor) -> None:
        """`scores` `[1, heads, tokens, tokens and a sink]`: logits, minus infinity where nothing is seen."""
        relevant = scores[0, :, self.asking.start : self.asking.stop].float().clone()
        relevant[..., : self.first] = float("-inf")
        self.weights = relevant.softmax(-1).sum((0, 1))


class _Swap:
    """Puts cached K and V in the place of those that are not fresh at one layer."""

    def __init__(
        self,
        layer: int,
        chunks: list[tuple[int, int, PlacedChunk]],
        stale: list[int],
        num_tokens: int,
        watch: _Watch | None = None,
        unseen: Sequence[int] = (),
    ) -> None:
        self.layer = layer
        self.watch = watch
        self.unseen = unseen
        self.key_deviation = torch.zeros(num_tokens)
        self.value_deviation = torch.zeros(num_tokens)
        self._chunks = chunks
        self._stale = set(stale)

    def __call__(self, key: Tensor, value: Tensor) -> None:
        """`key` (after RoPE) and `value`, `[1, kv_heads, tokens, head_dim]`, are changed in place."""
        for first, end, chunk in self._chunks:
            cached_key, cached_value = chunk.keys[self.layer], chunk.values[self.layer]
            span = slice(first, end)
            self.key_deviation[span] = _squared_distance(key[0, :, span], cached_key)
            self.value_deviation[span] = _squared_distance(value[0, :, span], cached_value)
            for position in range(first, end):
                if position in self._stale:
                    key[0, :, position] = cached_key[:, position - first]
                    value[0, :, position] = cached_value[:, position - first]

    def see_projected(self, name: str, output: Tensor) -> Tensor:
        """`output` `[1, tokens, width]` is changed in place and returned."""
        for first, end, chunk in self._chunks:
            for position in self._stale.intersection(range(first, end)):
                output[0, position] = chunk.projected[self.layer][name][position - first]
        return output


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_ignored: object,
) -> tuple[Tensor, None]:
    """Attention of `[1, heads, tokens, head_dim]` with a mask of its own: strictly causal, windowed."""
    assert attention_mask is None
    seer = getattr(module, "kintsugi_seer", None)
    if seer is not None:
        key, value = key.clone(), value.clone()
        seer(key, value)
    groups = query.shape[1] // key.shape[1]
    key, value = (kv.repeat_interleave(groups, dim=1) for kv in (key, value))
    positions = torch.arange(query.shape[2])
    visible = positions[None, :] <= positions[:, None]
    if sliding_window is not None:
        visible &= positions[None, :] > positions[:, None] - sliding_window
    scores = query @ key.transpose(2, 3) * scaling
    if seer is not None:
        visible[:, list(seer.unseen)] = False
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if s_aux is not None:
        scores = torch.cat((scores, s_aux.view(1, -1, 1, 1).expand(-1, -1, scores.shape[2], 1)), -1)
    if seer is not None and seer.watch is not None:
        seer.watch.see(scores)
    weights = scores.float().softmax(-1)[..., : key.shape[2]]
    output = weights.to(query.dtype) @ value
    return output.transpose(1, 2).contiguous(), None


def _attend_without_interface(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
) -> tuple[Tensor, None]:
    """What GPT-J calls `_attn`; its mask is the causal one."""
    output, weights = _attend(module, query, key, value, None, 1 / module.scale_attn)
    return output.transpose(1, 2), weights


def _is_attention(module: nn.Module) -> bool:
    """Whether a module attends: the one of each layer that knows its layer, and no layer itself."""
    return "Attention" in type(module).__name__ and hasattr(module, "layer_idx")


def _is_recurrent(module: nn.Module) -> bool:
    """Whether a module is a layer's short convolution or scan."""
    return hasattr(module, "layer_idx") and bool(_projections_of(module))


def _projections_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The projections of a recurrent layer's input; none of an attention."""
    return [(name, child) for name, child in module.named_children() if name.startswith("in_proj")]


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
