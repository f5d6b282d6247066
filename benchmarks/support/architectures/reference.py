"""CacheBlend on any transformers decoder: slow, obviously correct, and independent of `kintsugi.fusor`.

Everything happens where a layer attends. Each layer of the whole prompt runs at full width, and the K and V
of the tokens that are not fresh there are replaced by those of their chunk. What a chunk's K and V are is
found by running the chunk alone after the prefix; at every layer the attention module is called twice, first
with the position embeddings of the place in the prompt, only to see its K and V, then with its own. So the
reference needs no knowledge of projections, norms or rotations: the module itself applies them to K. A latent
(MLA) is expanded per token before attention, so that replacing K and V of a token there is the same as
replacing its latent.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.activations import XIELUActivation
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from kintsugi.core.errors import InvalidField
from tests.oracle import fresh_positions, load_model

ATTENTION = "kintsugi_reference"

OnAttention = Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Sees a module's key (as it is attended to) and value, `[1, heads, tokens, width]`; returns what to use."""

_POSITIONS = ("position_embeddings", "position_ids", "cache_position")
"""Arguments of attention modules that hold the tokens' positions."""

_LEGACY = frozenset({"gptj", "bloom"})
"""Model types that do not attend through transformers' attention interface: methods of their modules, `_attn`
and `_reshape`, take or return what is attended to."""

_watching: list[OnAttention] = []


@dataclass(frozen=True)
class _Stored:
    """One chunk's K and V where it stands in the prompt, by layer: `[heads, tokens, width]`."""

    first: int
    keys: list[Tensor]
    values: list[Tensor]


class Reference:
    """One checkpoint in memory, in float32. Not thread-safe. Raises `InvalidField` for a model whose
    attention does not pass through transformers' attention interface."""

    def __init__(self, folder: Path, **overrides: object) -> None:
        """`overrides` are fields of the config."""
        config = AutoConfig.from_pretrained(folder, **overrides)
        loader = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
        is_legacy = config.model_type in _LEGACY
        attention = "eager" if is_legacy else ATTENTION
        try:
            self._model: Any = load_model(
                loader, folder, config=config, dtype=torch.float32, attn_implementation=attention
            )
        except KeyError as error:
            raise InvalidField("model", f"{config.model_type} has a list of attentions of its own") from error
        for module in self._model.modules():
            if isinstance(module, XIELUActivation):
                module.bfloat16()  # vLLM keeps its parameters in bfloat16, whatever the model's dtype is
        for module in self._model.modules() if is_legacy else ():
            if hasattr(module, "_attn"):
                module._attn = partial(_attend_legacy, module)
            if hasattr(module, "_reshape"):
                module._reshape = partial(_watch_reshape, module, module._reshape)
            if hasattr(module, "gelu_impl"):
                # transformers approximates Bloom's GELU; vLLM does not.
                module.gelu_impl = nn.GELU()
        if not self._trace([0])[0]:
            raise InvalidField("model", f"{config.model_type} attends without the attention interface")

    def blended(
        self,
        prompt: Sequence[int],
        prefix: Sequence[int],
        hits: Sequence[tuple[int, int]],
        active: Mapping[int, Collection[int]],
        measured: Collection[int] = (),
    ) -> Tensor:
        """fp32 `[vocab]`: log-probabilities after a blend of all but the last token of ``prompt``.

        ``hits`` are the spans that were loaded, ``prefix`` is what chunks are prefilled after; ``active``
        and ``measured`` are as in `tests.oracle.fresh_positions`. Raises `InvalidField` for a model whose
        attention does not pass through transformers' attention interface.
        """
        modules, places = self._trace(prompt)
        if len(modules) != len(active):
            raise InvalidField("active", f"names {len(active)} layers, the model attends in {len(modules)}")
        stored = [self._isolated(prompt, prefix, hit, modules, places) for hit in hits]
        region = range(len(prompt) - 1)
        fresh = fresh_positions(active, measured, region)
        loaded = {p for first, end in hits for p in range(first, end) if p in region}
        order = {id(module): layer for layer, module in enumerate(modules)}

        def replace(module: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            layer = order[id(module)]
            key, value = key.clone(), value.clone()
            for chunk in stored:
                length = chunk.keys[layer].shape[1]
                rows = [row for row in range(length) if chunk.first + row in loaded - fresh[layer]]
                at = [chunk.first + row for row in rows]
                key[0, :, at] = chunk.keys[layer][:, rows]
                value[0, :, at] = chunk.values[layer][:, rows]
            return key, value

        return self._run(prompt, replace)

    def full(self, prompt: Sequence[int]) -> Tensor:
        """fp32 `[vocab]`: log-probabilities after an ordinary full prefill."""
        return self._run(prompt, lambda _module, key, value: (key, value))

    @torch.inference_mode()
    def _run(self, token_ids: Sequence[int], watch: OnAttention) -> Tensor:
        with _watched(watch):
            output = self._model(input_ids=torch.tensor([list(token_ids)]), use_cache=False)
        logprobs: Tensor = output.logits[0, -1].float().log_softmax(-1)
        return logprobs

    def _trace(self, prompt: Sequence[int]) -> tuple[list[nn.Module], list[dict[str, Any]]]:
        """Return the attention modules in the order in which they run, and the position arguments of each."""
        modules: list[nn.Module] = []

        def note(module: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            modules.append(module)
            return key, value

        self._run(prompt, note)
        places: list[dict[str, Any]] = [{} for _ in modules]

        def keep(layer: int, keywords: dict[str, Any]) -> dict[str, Any]:
            places[layer] = {name: keywords[name] for name in _POSITIONS if keywords.get(name) is not None}
            return keywords

        with _on_calls(modules, keep):
            self._run(prompt, lambda _module, key, value: (key, value))
        return modules, places

    def _isolated(
        self,
        prompt: Sequence[int],
        prefix: Sequence[int],
        hit: tuple[int, int],
        modules: list[nn.Module],
        places: list[dict[str, Any]],
    ) -> _Stored:
        """Run one chunk after the prefix; at each layer, see its K and V as if it stood at `hit`."""
        first, end = hit
        own = torch.arange(len(prefix) + end - first)
        there = torch.cat((torch.arange(len(prefix)), torch.arange(first, end)))
        stored = _Stored(first, [], [])
        attends = False

        def see(_module: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            if not attends:
                stored.keys.append(key[0, :, len(prefix) :].clone())
                stored.values.append(value[0, :, len(prefix) :].clone())
            return key, value

        def call_twice(layer: int, keywords: dict[str, Any]) -> dict[str, Any]:
            nonlocal attends
            given = places[layer]
            elsewhere = {name: _taken(value, there, len(prompt)) for name, value in given.items()}
            attends = False
            modules[layer].forward(**{**keywords, **elsewhere})
            attends = True
            here = {name: _taken(value, own, len(prompt)) for name, value in given.items()}
            return {**keywords, **here}

        with _on_calls(modules, call_twice):
            self._run([*prefix, *prompt[first:end]], see)
        return stored


def _taken(value: Any, rows: Tensor, num_tokens: int) -> Any:
    """The rows of a tensor, or of each of several, along the dimension that counts tokens."""
    if isinstance(value, tuple | list):
        return type(value)(_taken(one, rows, num_tokens) for one in value)
    dimension = list(value.shape).index(num_tokens)
    return value.index_select(dimension, rows)


@contextmanager
def _on_calls(
    modules: Sequence[nn.Module], change: Callable[[int, dict[str, Any]], dict[str, Any]]
) -> Iterator[None]:
    """Let `change` see and replace the keyword arguments of the modules' calls."""

    def hook(layer: int) -> Callable[..., tuple[tuple[()], dict[str, Any]]]:
        def before(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
            names = list(inspect.signature(module.forward).parameters)[: len(arguments)]
            return (), change(layer, {**dict(zip(names, arguments, strict=True)), **keywords})

        return before

    handles = [
        module.register_forward_pre_hook(hook(layer), with_kwargs=True)
        for layer, module in enumerate(modules)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _watched(watch: OnAttention) -> Iterator[None]:
    _watching.append(watch)
    try:
        yield
    finally:
        _watching.pop()


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_ignored: object,
) -> tuple[Tensor, None]:
    """Attention of `[1, heads, tokens, width]` under transformers' own mask: causal, windowed, in chunks."""
    assert attention_mask is not None
    key, value = _watching[-1](module, key, value)
    groups = query.shape[1] // key.shape[1]
    key, value = (kv.repeat_interleave(groups, dim=1) for kv in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + attention_mask
    if s_aux is not None:
        sink = s_aux.view(1, -1, 1, 1).expand(1, -1, scores.shape[2], 1)
        scores = torch.cat((scores, sink), dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2).contiguous(), None


def _attend_legacy(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
) -> tuple[Tensor, None]:
    attended, _ = _attend(module, query, key, value, attention_mask)
    return attended.transpose(1, 2), None


def _watch_reshape(
    module: nn.Module, reshape: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]], projected: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = reshape(projected)
    return query, *_watching[-1](module, key, value)


AttentionInterface.register(ATTENTION, _attend)
AttentionMaskInterface.register(ATTENTION, eager_mask)
