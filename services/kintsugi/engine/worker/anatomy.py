"""Learns the calls and rotations of a loaded model's layers by running them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import set_forward_context

from kintsugi.core.errors import NotBlendable
from kintsugi.engine.worker.calls import LayerCalls, watch_calls
from kintsugi.engine.worker.model import LatentKV, Layer, LoadedModel
from kintsugi.engine.worker.native import mass_kernel, rotation_kernel
from kintsugi.engine.worker.ranks import is_so_on_any_rank, rank_and_size
from kintsugi.engine.worker.recurrence import RecurrentKV
from kintsugi.engine.worker.rotation import (
    TOKENS,
    KeyRotation,
    Projected,
    RotationCall,
    RotationFinder,
    sources_of,
)
from kintsugi.engine.worker.stack import CapturedKV, Prepared, VllmStack, capture_kv
from kintsugi.fusor.stack import Hidden
from kintsugi.models.declines import Decline, DeclineReason

SAMPLES = ((0, 11), (5, 12))
"""Position ranges of the observed tokens: two of different lengths."""


def learn_model(model: LoadedModel) -> LoadedModel:
    """Return the model with its calls, rotations and KV heads. Raises `NotBlendable`."""
    with torch.inference_mode(), model.custom_ops_on():
        try:
            calls = _learn_calls(model)
            model = dataclasses.replace(model, calls=calls)
            layers = _learn_rotations(model)
        except NotBlendable:
            raise
        except Exception as defect:
            feature = f"calls that failed under observation ({type(defect).__name__}: {defect})"
            raise Decline(DeclineReason.LAYER_CALLS, None, feature).error() from defect
    model = dataclasses.replace(model, layers=layers, mass_kernel=mass_kernel(model.device))
    return dataclasses.replace(model, kv_heads=tuple(_total_heads(model, layer) for layer in layers))


def free_blocks(model: LoadedModel, num_tokens: int) -> tuple[list[int], ...]:
    """Return block tables per cache group, disjoint because groups share memory, without the null block 0. A
    recurrent group has one block, in every column: vLLM reads the state before a token in that token's
    column."""
    groups = {layer.group.tables: layer.group for layer in model.layers}
    tables: list[list[int]] = []
    first = 1
    for index in range(max(groups) + 1):
        count = -(-num_tokens // groups[index].block_size) if index in groups else 0
        distinct = min(count, 1) if count and groups[index].is_recurrent else count
        tables.append([first + min(column, distinct - 1) for column in range(count)])
        first += distinct
    return tuple(tables)


def run_forward(model: LoadedModel, stack: VllmStack, token_ids: Tensor, positions: Tensor) -> Any:
    """Run the engine's own forward pass over ``positions`` of the stack's sequence."""
    prepared: Prepared = stack.batch(positions).prepared
    with set_forward_context(
        {**prepared.metadata, **stack.own_states(positions)},
        model.vllm_config,
        num_tokens=len(positions),
        slot_mapping=prepared.slots,
        skip_compiled=True,
    ):
        return model.forward(token_ids, positions)


def sample_token_ids(model: LoadedModel, count: int) -> Tensor:
    """Return made-up token ids, int64 `[count]`."""
    vocab: int = model.vllm_config.model_config.get_vocab_size()
    return (torch.arange(count, dtype=torch.int64) * 7919 + 13) % vocab


def _learn_calls(model: LoadedModel) -> LayerCalls:
    end = max(last for _, last in SAMPLES)
    stack = VllmStack(model, [free_blocks(model, end)], [end])

    def run(token_ids: Tensor, positions: Tensor) -> None:
        run_forward(model, stack, token_ids, positions)

    def forward(token_ids: Tensor, positions: Tensor) -> None:
        count = len(token_ids)
        with set_forward_context({}, model.vllm_config, num_tokens=count, skip_compiled=True):
            model.forward(token_ids, positions)

    samples = [(sample_token_ids(model, last - first), torch.arange(first, last)) for first, last in SAMPLES]
    return watch_calls(model.calls.modules, run, forward, samples)


def _learn_rotations(model: LoadedModel) -> tuple[Layer, ...]:
    kernel = rotation_kernel(model.device)

    def embed(positions: Tensor) -> Hidden:
        return model.embed(torch.zeros_like(positions) + sample_token_ids(model, 1), positions)

    def project(layer: int, hidden: Hidden, positions: Tensor) -> Projected:
        return _project(model, model.layers[layer], hidden, positions)

    calls = [model.calls.calls[layer.calls.start] for layer in model.layers]
    finder = RotationFinder(embed, project, calls, _num_positions(model))
    learnt = []
    for layer in model.layers:
        if layer.group.is_recurrent:
            learnt.append(layer)
            continue
        rotation = _find_on_every_rank(finder, layer.index)
        if rotation.rotary is not None:
            rotary = dataclasses.replace(rotation.rotary, kernel=kernel)
            rotation = dataclasses.replace(rotation, rotary=rotary)
        learnt.append(dataclasses.replace(layer, rotation=rotation))
    return tuple(learnt)


def _find_on_every_rank(finder: RotationFinder, layer: int) -> KeyRotation:
    """Find a layer's rotation on all ranks, which have different heads. Raises `NotBlendable` on every rank
    if one of them finds none."""
    rotation, declined = None, None
    try:
        rotation = finder.find(layer)
    except NotBlendable as error:
        declined = error
    if is_so_on_any_rank(declined is not None):
        others = Decline(DeclineReason.ROPE, layer, "keys without a known rotation on another rank")
        raise declined or others.error()
    assert rotation is not None
    return rotation


def _num_positions(model: LoadedModel) -> int:
    """Return the maximum number of positions. Raises `NotBlendable` if a rotation table is shorter: vLLM's
    kernels would read beyond its end."""
    tables = [buffer for name, buffer in model.root.named_buffers() if name.endswith("cos_sin_cache")]
    longest: int = model.vllm_config.model_config.max_model_len
    shortest = min((len(table) for table in tables), default=longest)
    if shortest < longest:
        feature = f"a rotation table of {shortest} positions, fewer than max_model_len ({longest})"
        raise Decline(DeclineReason.ROPE_LENGTH, None, feature).error()
    return longest


def _project(model: LoadedModel, layer: Layer, hidden: Hidden, positions: Tensor) -> Projected:
    """Run a layer up to its attention, and record the rotation modules that it calls."""
    captured, sources = CapturedKV(), list[RotationCall]()
    hooks = sources_of(layer.module, positions, sources)
    try:
        with (
            set_forward_context({}, model.vllm_config, num_tokens=TOKENS, skip_compiled=True),
            capture_kv(layer, captured, leave=True),
        ):
            model.run_layer(layer, hidden)
    finally:
        for hook in hooks:
            hook.remove()
    return Projected(captured.key, captured.value, sources)


def _total_heads(model: LoadedModel, layer: Layer) -> int:
    """Return the number of a layer's KV heads over all ranks."""
    if isinstance(layer.kv, LatentKV | RecurrentKV):
        return 1
    own, (_, ranks) = layer.kv.heads, rank_and_size()
    if ranks == 1:
        return own
    # vLLM's projections know the number of KV heads of their layer. The config has the number of most layers.
    found = [getattr(module, "total_num_kv_heads", None) for module in layer.module.modules()]
    totals = [*filter(None, found), model.vllm_config.model_config.get_total_num_kv_heads()]
    for total in totals:
        if own == max(1, total // ranks):
            return int(total)
    feature = f"{own} KV heads on each of {ranks} ranks, which fits none of the totals {totals}"
    raise Decline(DeclineReason.ARCHITECTURE, None, feature).error()
