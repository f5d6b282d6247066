"""Device memory for passes, of which vLLM's own profile knows nothing: reserved at start, and bounded.

vLLM leaves a share of a GPU's memory alone (`gpu_memory_utilization`). A part of that is taken once, when the
KV caches lie in place, so that torch's allocator keeps it; passes are admitted while it has room for them.
"""

from __future__ import annotations

import math

import torch

from kintsugi.engine.protocol import BlendJob
from kintsugi.engine.worker.model import LoadedModel
from kintsugi.engine.worker.stack import min_over_ranks
from kintsugi.fusor.selectors import make_selector

SHARE_OF_FREE = 0.25
"""Share of the free memory that passes get. vLLM captures its CUDA graphs afterwards, in what is left."""

LAYERS_IN_USE = 3
"""Layers of loaded KV that a pass holds beside those that wait: the one it computes with, the one that is
decoded, and the bytes that is decoded from."""

HIDDEN_COPIES = 4
"""States and residuals of a layer's input and of its output."""


def reserve_memory(device: torch.device) -> float:
    """Reserve memory for passes. Returns the bytes that they may use on every rank, inf on a CPU."""
    if device.type == "cpu":
        return math.inf
    free, _ = torch.cuda.mem_get_info(device)
    budget = min_over_ranks(int(SHARE_OF_FREE * free))
    torch.empty(budget, dtype=torch.uint8, device=device)  # freed at once; torch's allocator keeps it
    return budget


def pass_bytes(model: LoadedModel, job: BlendJob, prefetch_layers: int) -> int:
    """Most device memory that a blend holds between two units."""
    loaded_tokens = sum(hit.num_tokens for hit in job.plan.hits)
    layer_bytes = loaded_tokens * model.kv_width * model.dtype.itemsize
    asked = make_selector(job.plan.selection, len(model.layers)).query_layers
    layers = prefetch_layers + LAYERS_IN_USE + (max(asked) + 1 if asked else 0)
    hidden_size: int = model.vllm_config.model_config.get_hidden_size()
    hidden = HIDDEN_COPIES * len(job.tokens.token_ids) * hidden_size * model.dtype.itemsize
    total: int = layers * layer_bytes + hidden
    return total
