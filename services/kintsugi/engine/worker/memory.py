"""Reserves and bounds device memory for passes, which vLLM's memory profile does not include.

vLLM leaves a share of a GPU's memory unused (`gpu_memory_utilization`). The first blend reserves a part of
it, which torch's allocator keeps for loaded KV; blends are admitted while they fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from vllm.config import CacheConfig
from vllm.logger import init_logger

from kintsugi.engine.protocol import BlendJob
from kintsugi.engine.worker.model import Layer, LoadedModel, kv_of
from kintsugi.engine.worker.ranks import min_over_ranks
from kintsugi.engine.worker.stack import lacks_blocks
from kintsugi.fusor.blend import needs_loaded
from kintsugi.fusor.gaps import find_left_out
from kintsugi.fusor.loader import PREFETCH_LAYERS
from kintsugi.fusor.selectors import Selector, depends_on_question, make_selector
from kintsugi.fusor.staging import keep_for_loading

logger = init_logger(__name__)

SHARE_OF_REST = 0.6
"""Share for passes of the memory that vLLM leaves unused. The rest is for what vLLM's profile does not
include: CUDA graphs and fragments."""

SHARE_OF_FREE = 0.25
"""Share of the free memory for passes where the size of vLLM's KV cache is fixed. vLLM has freed its working
memory, of unknown size, and allocates it again from the rest."""

LAYERS_IN_USE = 3
"""Layers of loaded KV that a pass holds in addition to the prefetched ones: the layer in use, the layer being
decoded, and its encoded bytes."""

ROTATION_LAYERS = 3
"""Memory for rotating a layer's keys, in layers of 16-bit KV, half of which is K: the stored keys, the keys
in fp32, and in fp32 two products and a difference of half the keys each."""

LAYERS_OF_KV = PREFETCH_LAYERS + LAYERS_IN_USE + ROTATION_LAYERS
"""Layers of loaded KV that a pass holds, without those that it keeps after the question's pass."""

HIDDEN_COPIES = 5
"""Copies of hidden states: states and residuals of a layer's input and output, and one while units are
joined."""


def find_room(device: torch.device, cache: CacheConfig) -> float:
    """Return the bytes that passes may use on this rank; inf on a CPU."""
    if device.type == "cpu":
        return math.inf
    free, total = torch.cuda.mem_get_info(device)
    if cache.kv_cache_memory_bytes:
        return int(SHARE_OF_FREE * free)
    # vLLM's working memory, free at present, is in its own share.
    return int(SHARE_OF_REST * min(free, (1 - cache.gpu_memory_utilization) * total))


def warn_of_short_memory(model: LoadedModel) -> None:
    """Log which prompts will be too long to be blended, if some are, and what would help. Call at start."""
    config = model.vllm_config
    room, length_max = find_room(model.device, config.cache_config), config.model_config.max_model_len
    hidden_bytes = HIDDEN_COPIES * config.model_config.get_hidden_size()
    token_bytes = (LAYERS_OF_KV * model.kv_width + hidden_bytes) * model.dtype.itemsize
    if room < length_max * token_bytes:
        logger.warning(
            "Prompts of more than about %d tokens are prefilled in full (device_memory): a blend of "
            "max_model_len=%d tokens needs up to %d MiB in addition to vLLM's share of the device, and "
            "%d MiB are reserved; lower gpu_memory_utilization to blend longer prompts",
            room // token_bytes,
            length_max,
            length_max * token_bytes >> 20,
            int(room) >> 20,
        )


def reserve_memory(device: torch.device, cache: CacheConfig) -> float:
    """Reserve memory for passes. Returns the bytes that they may use on every rank: inf on a CPU, 0 if the
    memory cannot be allocated. All ranks must call it together, after vLLM has captured its CUDA graphs,
    which empties torch's caches."""
    budget = find_room(device, cache)
    if math.isinf(budget):
        return budget
    try:
        keep_for_loading(int(budget), device)
    except torch.OutOfMemoryError:
        budget = 0
    return min_over_ranks(int(budget))


def pass_bytes(model: LoadedModel, job: BlendJob) -> int:
    """Return the maximum device memory that a blend needs if it loses no chunk. Excludes the working memory
    of a unit: vLLM's profile covers a prefill of the same number of tokens."""
    selection, start, num_tokens = job.plan.selection, job.tokens.start, len(job.tokens.token_ids)
    selector = make_selector(selection, len(model.layers), model.attending)
    end = start + num_tokens + depends_on_question(selection)
    groups = {layer.group.index: layer for layer in model.layers}
    scratch = {index: _scratch_bytes(layer, job, end) for index, layer in groups.items()}

    # The engine's prefix cache may hold the beginning of the first hit.
    loaded_tokens = sum(hit.end - max(hit.start, start) for hit in job.plan.hits)
    kept = [not scratch[layer.group.index] for layer in model.layers]
    layers = LAYERS_OF_KV + _num_layers_asked(selector, kept)
    loaded = layers * loaded_tokens * model.kv_width * model.dtype.itemsize

    # Every token is embedded; layers compute those that are left after the selector.
    widest = max(selector.ratio_at(layer) for layer in range(len(model.layers)))
    computed = num_tokens - loaded_tokens + math.ceil(widest * loaded_tokens)
    rows = max(num_tokens, HIDDEN_COPIES * computed)
    hidden = rows * model.vllm_config.model_config.get_hidden_size() * model.dtype.itemsize
    asking = _asking_bytes(model, job, [*groups.values()], end) if depends_on_question(selection) else 0
    return int(loaded + hidden + sum(scratch.values()) + asking)


def describe_refusal(needed: int, room: float) -> str:
    """Return `reason: detail` for a blend that needs more bytes than passes may use in total."""
    return (
        f"device_memory: a blend of this prompt needs {needed >> 20} MiB of the device, more than "
        f"the {int(room) >> 20} MiB that are reserved; lower gpu_memory_utilization"
    )


def _num_layers_asked(selector: Selector, kept: list[bool]) -> int:
    """Return how many layers of loaded KV stay in memory after the question's pass. ``kept``: whether the
    cache keeps each layer's KV."""
    asked = range(max(selector.query_layers, default=-1) + 1)
    return sum(needs_loaded(selector, layer, kept[layer]) for layer in asked)


def _scratch_bytes(layer: Layer, job: BlendJob, end: int) -> int:
    """Return the size of a layer's scratch cache with its copy. A pass uses one in a recurrent layer, and if
    vLLM has no block for some position before ``end`` (`engine.worker.stack`). 0 if it uses none."""
    group = layer.group
    if not group.is_recurrent and not lacks_blocks(
        job.tokens.block_ids[group.tables], -(-end // group.block_size)
    ):
        return 0
    return _cache_bytes(layer, end)


def _asking_bytes(model: LoadedModel, job: BlendJob, layers: Sequence[Layer], end: int) -> int:
    """Return the size of the question's own cache (`fusor.question`) for one layer of each group; 0 if it
    uses the blend's cache."""
    if not model.sees_order_alone:
        return 0
    plan = job.plan
    left_out = find_left_out(plan.hits, plan.chunks, job.tokens.start, plan.exact_end)
    places = end - sum(map(len, left_out))
    return sum(_cache_bytes(layer, places) for layer in layers) if left_out else 0


def _cache_bytes(layer: Layer, end: int) -> int:
    """Return the size of one layer's scratch cache for the places before ``end``, with a copy; of recurrent
    layers, that of one layer's inputs and of the final states of all layers of the group."""
    group, cache = layer.group, layer.attention.kv_cache
    if group.is_recurrent:
        states = 2 * len(group.layer_names) * sum(state[0].nbytes for state in cache)
        return int(end * kv_of(layer.attention).token_width * cache[0].itemsize + states)
    blocks = 1 + -(-end // group.block_size) * (group.block_size // group.kernel_block_size)
    return 2 * blocks * int(cache.nbytes // len(cache))
