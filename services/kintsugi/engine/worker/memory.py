"""Device memory for passes, of which vLLM's own profile knows nothing: reserved once, and bounded.

vLLM leaves a share of a GPU's memory alone (`gpu_memory_utilization`). A part of that is taken when the
first blend comes, so that torch's allocator keeps it for what passes load; blends are admitted while there is
room for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kintsugi.engine.protocol import BlendJob
from kintsugi.engine.worker.model import Layer, LoadedModel
from kintsugi.engine.worker.stack import lacks_blocks, min_over_ranks
from kintsugi.fusor.blend import needs_loaded
from kintsugi.fusor.gaps import find_left_out
from kintsugi.fusor.selectors import Selector, depends_on_question, make_selector
from kintsugi.fusor.staging import keep_for_loading

SHARE_OF_FREE = 0.25
"""Share of the free memory that passes get. vLLM has given back what it computes with, and takes that again
from the rest."""

LAYERS_IN_USE = 3
"""Layers of loaded KV that a pass holds beside those that wait: the one it computes with, the one that is
decoded, and the bytes that is decoded from."""

ROTATION_LAYERS = 3
"""What rotating a layer's keys takes, in layers of 16-bit KV, of which K is half: the keys as stored, and in
fp32 all of them, and two products and a difference of half of them each."""

HIDDEN_COPIES = 5
"""States and residuals of a layer's input and of its output, and one of them while units are joined."""


def reserve_memory(device: torch.device) -> float:
    """Reserve memory for passes. Returns the bytes that they may use on every rank: inf on a CPU, 0 where it
    cannot be had. Ranks have to ask together, and not before vLLM has captured its CUDA graphs: that empties
    torch's caches."""
    if device.type == "cpu":
        return math.inf
    free, _ = torch.cuda.mem_get_info(device)
    budget = int(SHARE_OF_FREE * free)
    try:
        keep_for_loading(budget, device)
    except torch.OutOfMemoryError:
        budget = 0
    return min_over_ranks(budget)


def pass_bytes(model: LoadedModel, job: BlendJob, prefetch_layers: int) -> int:
    """Most device memory that a blend holds while none of its chunks is lost, apart from what a unit computes
    with: vLLM's profile covers a prefill of as many tokens."""
    selection, start, num_tokens = job.plan.selection, job.tokens.start, len(job.tokens.token_ids)
    selector = make_selector(selection, len(model.layers))
    end = start + num_tokens + depends_on_question(selection)
    groups = {layer.group.index: layer for layer in model.layers}
    scratch = {index: _scratch_bytes(layer, job, end) for index, layer in groups.items()}

    # The engine's prefix cache may hold the beginning of the first hit.
    loaded_tokens = sum(hit.end - max(hit.start, start) for hit in job.plan.hits)
    kept = [not scratch[layer.group.index] for layer in model.layers]
    layers = prefetch_layers + LAYERS_IN_USE + ROTATION_LAYERS + _num_layers_asked(selector, kept)
    loaded = layers * loaded_tokens * model.kv_width * model.dtype.itemsize

    # Every token is embedded; layers compute those that are left after the selector.
    widest = max(selector.ratio_at(layer) for layer in range(len(model.layers)))
    computed = num_tokens - loaded_tokens + math.ceil(widest * loaded_tokens)
    rows = max(num_tokens, HIDDEN_COPIES * computed)
    hidden = rows * model.vllm_config.model_config.get_hidden_size() * model.dtype.itemsize
    asking = _asking_bytes(model, job, [*groups.values()], end) if depends_on_question(selection) else 0
    return int(loaded + hidden + sum(scratch.values()) + asking)


def _num_layers_asked(selector: Selector, kept: list[bool]) -> int:
    """Layers of loaded KV that stay after the question's pass. `kept`: whether the cache keeps what is
    written to each layer."""
    asked = range(max(selector.query_layers, default=-1) + 1)
    return sum(needs_loaded(selector, layer, kept[layer]) for layer in asked)


def _scratch_bytes(layer: Layer, job: BlendJob, end: int) -> int:
    """Size of the cache of one layer in which a pass works where vLLM has no block for some position before
    `end` (`engine.worker.stack`), and of what is copied into or out of it; 0 where it has all of them."""
    group = layer.group
    if not lacks_blocks(job.tokens.block_ids[group.tables], -(-end // group.block_size)):
        return 0
    return _cache_bytes(layer, end)


def _asking_bytes(model: LoadedModel, job: BlendJob, layers: Sequence[Layer], end: int) -> int:
    """Size of the question's own cache (`fusor.question`), of one layer of each group; 0 where it uses that
    of the blend."""
    if not model.sees_order_alone:
        return 0
    plan = job.plan
    left_out = find_left_out(plan.hits, plan.chunks, job.tokens.start, plan.exact_end)
    places = end - sum(map(len, left_out))
    return sum(_cache_bytes(layer, places) for layer in layers) if left_out else 0


def _cache_bytes(layer: Layer, end: int) -> int:
    """Size of a scratch cache of one layer with places before `end`, and of a copy."""
    group, cache = layer.group, layer.attention.kv_cache
    blocks = 1 + -(-end // group.block_size) * (group.block_size // group.kernel_block_size)
    return 2 * blocks * int(cache.nbytes // len(cache))
